"""How soon a class sees what it has learned: from the quorum's last result to new weights at a worker, for a DCGAN of 6.3M parameters.

The coordinator is the real one, in a process of its own; three workers in theirs lease units through real desks and hand in a gradient
that was prepared before. What counts starts when the last `submit` of a round has returned, and ends when a worker has decoded the new
version: read what was handed in, aggregate, an Adam step for each network, journal, publish, be told, claim, read and decode 25 MB
(6.3 MB with the codec int8). No process polls: the interval is a minute. `CODEC=none python benchmarks/classroom_latency.py` prints where
the coordinator's time goes, too; with `--phases` also when each step of a round was done. The coordinator has as many threads as
`shoal coordinate` has; a worker has one.

All records of a round are written when it closes. The checksums of their frames are not on this way: they were computed part by part as
the frames were read. Nor is a copy of the mean: it is computed where the optimizer reads it. A snapshot waits until the weights are read.

100 ms are the goal. On two cores, where database, coordinator and three workers take turns, they are out of reach without a codec: a round
takes about 260 ms of processor time after the last `submit`. For 25 MB a gradient, three of them, in ms on a Xeon of 2.5 GHz:

    last gradient is read       database 15, coordinator 15     checked for finite numbers  5
    mean 12, Adam 11, copy 7                                    new weights are stored      database 57, coordinator 16
    journal, ledger and units   database and coordinator 15     three workers read them     database 3 × 14, workers 3 × 12
    they check and copy them    3 × 8

On the wall, medians of a round of 170 ms: the gradient is read after 20, decoded after 24, stepped after 42, copied after 46, the commit is
confirmed after 110, the workers are told after 115, and the first has read the weights after 158.

Storing the weights takes longest: 9 of the 57 are for receiving them, the rest is for 12,700 rows of 2 kB and their index. What was tried
for it and takes as long in all: INSERT instead of COPY (database 48, coordinator 22), one connection, parts of 64 kB or 1 MB, no foreign
key, other limits of malloc, smaller buffers, a busier background writer. Rows of 8,100 bytes, which are not cut up, take 28 and 17,
but every reading of them takes 8 more, and a class has more readers than writers. Writing over an old file takes 6, but a function that
returns a file's content to students would keep all of it until its last row; of rows in a table it keeps references.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from processes import Helper

from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.transports.database_address import Access
from shoal.transports.postgres import LeaseClient, PostgresServer, schema
from shoal.transports.postgres.access import connect

WORKERS = 3
WARM_UP, ROUNDS = 5, 30
COMPUTING_S = (1.0, 2.0)
"""How long a unit takes elsewhere: students' machines are not this one, and do not hand in all at once."""
DCGAN = {
    "model": {"kind": "dcgan", "image_size": 64, "latent_dim": 100, "generator_features": 64, "discriminator_features": 64, "channels": 1},
    "task": "gan",
    "data": {"source": {"kind": "builtin", "name": "digits"}},
    "training": {"batch_size": 16, "epochs": 1000, "optimizer": {"name": "Adam", "learning_rate": 0.0002}},
    "strategy": {"kind": "workunits", "batches_per_unit": 1, "units_per_update": WORKERS, "max_lag": 0},
    "evaluation": {"strategy": "never"},
    "checkpoint": {"strategy": "never"},
}


class Seen(NamedTuple):
    """What became of rounds, by the clock on the wall, which all processes share."""

    first_s: list[float]
    """Until one worker had the new version."""
    all_s: list[float]
    """Until each of those had that waited for it, and were not busy with another unit: a figure for every worker and round."""
    wal_bytes: float
    """Per round, what was written to the database's log."""
    grown_bytes: float
    """Per round, what the database became larger by."""
    gradient_bytes: int
    where: dict[str, float]
    """Milliseconds of the coordinator per round."""
    phases: dict[str, float]
    """When each step of a round was done, in milliseconds after the last `submit`: medians, in this order."""


def measure(codec: str = "none") -> Seen:
    with tempfile.TemporaryDirectory() as folder, EmbeddedPostgres(Path(folder)) as server:
        with connect(server.access) as connection:
            schema.init(connection)
            schema.grant(
                connection, "pupil", "secret", "coordinator"
            )  # all of them in one role, which a student's connections would not do for
        where = {name: value for name, value in server.access._asdict().items() if name != "options"}
        helpers = [Helper(__file__, "coordinate", folder=folder, codec=codec, **where)]
        try:
            helpers[0].hear()
            student = server.access._replace(user="pupil", password="secret").address
            helpers += [Helper(__file__, "work", 1, address=student, codec=codec) for _ in range(WORKERS)]
            size, *_ = [worker.hear() for worker in helpers[1:]]
            for worker in helpers[1:]:
                worker.say("go")
            return _watch(helpers, server.access, size)
        finally:
            for helper in helpers:
                helper.close()


def _watch(helpers: list[Helper], access: Access, size: int) -> Seen:
    for worker in helpers[1:]:
        worker.hear()  # warm
    with connect(access) as connection:
        before = _sizes(connection)
        started = time.time()
        told = [worker.hear() for worker in helpers[1:]]
        after = _sizes(connection)
    submitted: dict[int, float] = {}
    for submits, _ in told:
        for version, at in submits:
            submitted[version] = max(submitted.get(version, 0.0), at)
    waits: dict[int, list[list[float]]] = {}
    for _, versions in told:
        for version, *at in versions:
            if version - 1 in submitted:
                waits.setdefault(version, []).append([moment - submitted[version - 1] for moment in at])
    rounds, whole = len(submitted), [[steps[-1] for steps in found] for found in waits.values()]
    helpers[0].say([started, time.time()])
    where, spans = helpers[0].hear()
    return Seen(
        [min(found) for found in whole],
        [wait for found in whole for wait in found],
        (after[0] - before[0]) / rounds,
        (after[1] - before[1]) / rounds,
        size,
        {name: 1000 * seconds / rounds for name, seconds in where.items()},
        _phases(spans, {submitted[version - 1]: found for version, found in waits.items()}),
    )


def _phases(spans: list[tuple[str, float, float]], waits: dict[float, list[list[float]]]) -> dict[str, float]:
    """When the coordinator and the workers had done each step, in milliseconds after the last `submit` of a round. `spans`: what the
    coordinator did, and when it had done it; `waits`: by the time of the last `submit`, the seconds until each worker was told of the new
    weights, had read them, and had decoded them."""
    done: dict[str, list[float]] = {}
    for start, found in waits.items():
        told = min(steps[0] for steps in found)
        ends: dict[str, float] = {}
        for name, at, _ in spans:
            if start <= at <= start + told:
                ends[name] = at - start
        first, last = min(found, key=lambda steps: steps[-1]), max(found, key=lambda steps: steps[-1])
        for which, steps in (("the first worker", first), ("the last worker", last)):
            ends |= {f"{which} {step}": at for step, at in zip(("is told", "has read", "has decoded"), steps, strict=True)}
        for name, at in ends.items():
            done.setdefault(name, []).append(1000 * at)
    medians = {name: statistics.median(times) for name, times in done.items() if 2 * len(times) >= len(waits)}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


def _sizes(connection: Any) -> tuple[int, int]:
    row = connection.execute("SELECT (pg_current_wal_lsn() - '0/0')::int8, pg_database_size(current_database())").fetchone()
    return row[0], row[1]


# --- the coordinator -------------------------------------------------------------------------------------


def coordinate(given: dict[str, Any]) -> None:
    from ingest import Clock, Span

    from shoal.config.fields import Secret
    from shoal.config.load import resolve_data
    from shoal.config.schema.cluster import Postgres
    from shoal.runs.coordinator_setup import prepare
    from shoal.updates import codecs

    folder, codec = given.pop("folder"), given.pop("codec")
    settings = DCGAN | {"transport": {"kind": "postgres", "host": given["host"], "port": given["port"]}}
    settings["updates"] = {"codec": {"kind": codec}}
    loaded = resolve_data(settings, name="class", dialect="shoal", environ={})
    given["password"] = Secret(given["password"])
    transport = Postgres(poll_interval_s=60.0, **given)
    loop = prepare(loaded, run_dir=f"{folder}/run", resume=False, reporters=[], workers=WORKERS, transport=transport).loop
    clock, server = Clock(), loop.server
    assert isinstance(server, PostgresServer)
    clock.around(server.connection, "wait", "waiting")
    clock.around(server, "_new_rows", "looking for results")
    clock.around(server, "read", "reading gradients")
    clock.around(server, "_tidy", "tidying")
    clock.around(codecs, "borrow", "decoding")
    clock.around(codecs, "decode", "decoding")
    clock.around(loop.coordinator.learner, "apply", "Adam")
    clock.around(loop.coordinator, "handle", "the state machine and aggregation")
    clock.around(loop.coordinator.publisher, "since", "copying weights")
    clock.around(loop.coordinator.publisher, "everything", "copying weights")
    clock.around(server, "publish", "publishing")
    clock.around(server, "issue", "issuing units")
    clock.around(server, "consume", "consuming")
    clock.around(loop.store.journal, "append", "journal")
    clock.around(loop.store.ledger, "append", "ledger")
    clock.around(loop.driver, "snapshot", "snapshots")
    clock.around(loop.store, "carry_out", "transactions")
    clock.around(loop.recorder, "count", "records")
    print(json.dumps("there"), flush=True)

    def tell() -> None:
        span = Span(*json.loads(sys.stdin.readline()))
        shares = {name: share * (span.end - span.start) for name, share in clock.shares(span).items()}
        print(json.dumps([shares, [spent for spent in clock.spent if span.holds(spent[1])]]), flush=True)

    threading.Thread(target=tell, daemon=True).start()
    loop.train()


# --- a worker that has its gradient ready ----------------------------------------------------------------


def work(given: dict[str, Any]) -> None:
    import numpy as np
    import torch

    from shoal.config.schema.updates import Int8Codec, NoCodec
    from shoal.updates import codecs

    desk = LeaseClient(given["address"], poll_interval_s=60.0)
    welcome = desk.read_run(30.0)
    desk.join(None, {})
    weights = desk.weights(-1)
    while weights is None:
        desk.claim(1, 1.0)
        weights = desk.weights(-1)
    random = np.random.default_rng()
    codec = {"none": NoCodec(), "int8": Int8Codec()}[given["codec"]]
    base = torch.empty(welcome.header["size"])
    gradient = torch.from_numpy((1e-4 * random.standard_normal(base.numel())).astype(np.float32))
    frames = [*codecs.encode(codec, gradient, None), memoryview(weights.frames[-1])]  # and statistics of the networks
    codecs.renew(base, "full", codec, weights.frames[:-1])
    print(json.dumps(4 * welcome.header["size"]), flush=True)
    sys.stdin.readline()
    have, begun = weights.version, weights.version
    submits: list[tuple[int, float]] = []
    versions: list[tuple[int, float, float, float]] = []
    waits = True
    while have < begun + WARM_UP + ROUNDS:
        units = desk.claim(1, 60.0)
        told = time.time()
        newer = desk.weights(have)
        if newer is not None:
            have, read = newer.version, time.time()
            codecs.renew(base, newer.header["weights"], codec, newer.frames[:-1])
            if waits:
                versions.append((have, told, read, time.time()))
            if have == begun + WARM_UP:
                submits.clear(), versions.clear()
                print(json.dumps("warm"), flush=True)
        if units and units[0].iteration == have:
            time.sleep(random.uniform(*COMPUTING_S))
            header = {"base": have, "weight": 16.0, "samples": 16, "metrics": {"generator_loss": 1.0}}
            waits = desk.submit(units[0], header, frames) == "accepted"
            if waits:
                submits.append((have, time.time()))
    desk.leave()
    print(json.dumps([submits, versions]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        {"coordinate": coordinate, "work": work}[sys.argv[1]](json.loads(sys.argv[2]))
        sys.exit()
    seen = measure(os.environ.get("CODEC", "none"))
    for title, waits in (("first", seen.first_s), ("all", seen.all_s)):
        least, median, nine, most = (
            1000 * at for at in (min(waits), statistics.median(waits), statistics.quantiles(waits, n=10)[-1], max(waits))
        )
        print(f"{title}: median {median:.0f} ms, nine of ten within {nine:.0f} ms, {least:.0f} to {most:.0f} ms")
    log, grown = seen.wal_bytes / 1e6, seen.grown_bytes / 1e6
    print(f"{seen.gradient_bytes / 1e6:.1f} MB a gradient; a round: {log:.1f} MB of log, {grown:.1f} MB larger")
    for name, milliseconds in sorted(seen.where.items(), key=lambda item: -item[1]):
        print(f"{milliseconds:7.1f} ms  {name}")
    if "--phases" in sys.argv:
        for name, milliseconds in seen.phases.items():
            print(f"after {milliseconds:5.0f} ms: {name}")
