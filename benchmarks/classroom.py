"""The classroom in figures: claims against pgqueuer and procrastinate, also beside a forgotten transaction, and how soon weights are seen.

See classroom_claims.py and classroom_latency.py for what is measured and how.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import classroom_latency
from classroom_claims import JOBS, Peer, Queue, Setting, Units, rate, snapshot_held
from run import Row

from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.transports.database_address import Access

MOST_MS = 100.0
BATCHES = (10, 100)
TIMES = 3
HELD_ROUNDS = 5
"""Rounds under the forgotten transaction; the dead rows of all of them are there in the last."""


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedPostgres(Path(folder)) as server:
        rows = claims(server.access)
    return [*rows, *latency()]


def claims(access: Access) -> list[Row]:
    ours = Units(access._replace(database="units"))
    peers = [Peer("pgqueuer", access._replace(database="pgqueuer")), Peer("procrastinate", access._replace(database="procrastinate"), 2)]
    rows = [*_compared(ours, peers, complete=False), *_compared(ours, peers, complete=True), _held(ours, peers[0])]
    ours.close()
    return rows


def _compared(ours: Units, peers: list[Peer], complete: bool) -> list[Row]:
    """One unit at a time, as a worker of ours does; and in bulk, each with its best batch."""
    what = "claimed and done" if complete else "claimed"
    rows = []
    single = _best(ours, [Setting(1, complete)])
    bulk = _best(ours, [Setting(batch, complete) for batch in BATCHES])
    for peer in peers:
        by_one = _best(peer, [Setting(1, complete)])
        rows.append(Row(f"units {what}, one by one, {peer.name}", single, by_one, "1/s", single / by_one, "≥ 2", _load()))
        in_bulk = max(by_one, _best(peer, [Setting(batch, complete) for batch in BATCHES]))
        target = "none: our results are handed in one by one" if complete else "≥ 2"
        rows.append(Row(f"units {what}, in bulk, {peer.name}", bulk, in_bulk, "1/s", bulk / in_bulk, target, _load()))
    return rows


def _best(queue: Queue, settings: list[Setting]) -> float:
    """The best setting's median."""
    jobs = {setting: JOBS if setting.batch > 1 else JOBS // 4 for setting in settings}
    return max(statistics.median(rate(queue, jobs[setting], setting) for _ in range(TIMES)) for setting in settings)


def _held(ours: Units, peer: Peer) -> Row:
    """With a snapshot held open, against before: ours, and the best peer's."""
    flat = [_flatness(queue) for queue in (ours, peer)]
    return Row("units claimed and done with a transaction held open", flat[0], flat[1], "share of before", flat[0], "≥ 0.9", _load())


def _flatness(queue: Queue) -> float:
    setting, jobs = Setting(10, True), JOBS // 2
    before = statistics.median(rate(queue, jobs, setting) for _ in range(TIMES))
    with snapshot_held(queue.access):
        under_it = [rate(queue, jobs, setting) for _ in range(HELD_ROUNDS)]
    return statistics.median(under_it[-TIMES:]) / before


def latency() -> list[Row]:
    return [row for codec in ("none", "int8") for row in _latency(codec)]


def _latency(codec: str) -> list[Row]:
    seen = classroom_latency.measure(codec)
    first, each = (1000 * statistics.median(waits) for waits in (seen.first_s, seen.all_s))
    log, least = seen.wal_bytes / 1e6, classroom_latency.WORKERS * seen.gradient_bytes / 1e6
    rows = [
        Row(f"last result to new weights, codec {codec}, {title}", value, MOST_MS, "ms", value / MOST_MS, "≤ 1", _load())
        for title, value in (("first worker", first), ("every worker", each))
    ]
    note = f"the database grows by {seen.grown_bytes / 1e6:.0f} MB a round; peer: the gradients themselves"
    return [*rows, Row(f"log of the database, a round, codec {codec}", log, least, "MB", log / least, "told", note)]


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"
