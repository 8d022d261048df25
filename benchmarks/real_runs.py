"""Real runs on this machine, watched for a while: a coordinator and workers as `shoal coordinate` and `shoal join --slowdown --netem` make
them, each in a process of its own. What they did is what a simulation of the same settings has to foretell.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from processes import Helper

QUIET = {
    "evaluation.strategy": "never",
    "checkpoint.strategy": "never",
    "training.epochs": "1000000",
    "training.max_steps": "100000000",
    "logging.every_steps": "100000",
}
_SETTLING_S = 4.0
"""From the first version to the time that counts."""


class Seen(NamedTuple):
    """What a run did in the time that counts."""

    samples_per_s: float
    rejected: float
    """The share of the contributions that were turned away."""
    lag: float
    """The mean over all contributions."""
    contributions: int
    batch_s: float
    """Processor time that a batch took the workers: the mean over all of them."""
    stretch: float
    """How many times as long it took them by the clock, before they slept: they share the cores with each other, and with others."""


def watched(settings: Mapping[str, str], slowdown: Sequence[float], weather: str, seconds: float) -> Seen:
    """Run with these settings on top of `starter`, with a worker for each slowdown, and look at it for so long."""
    helpers: list[Helper] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = {"settings": dict(QUIET) | dict(settings), "workers": len(slowdown), "folder": folder, "seconds": seconds}
            coordinator = Helper(__file__, "coordinate", 1, **given)
            helpers.append(coordinator)
            invitation = coordinator.hear()
            numbered = list(enumerate(slowdown, 1))
            workers = [Helper(__file__, "work", 1, invitation=invitation, name=f"w{n}", slowdown=s, weather=weather) for n, s in numbered]
            helpers += workers
            for worker in workers:
                worker.hear()
            for worker in workers:
                worker.say("go")
            seen = coordinator.hear()
            for worker in workers:
                worker.say("tell")
            worked_s, passed_s, batches = (sum(column) for column in zip(*(worker.hear() for worker in workers), strict=True))
            return Seen(**seen, batch_s=worked_s / batches, stretch=passed_s / worked_s)
        finally:
            for helper in helpers:
                helper.close()


# --- the coordinator ------------------------------------------------------------------------------------


def coordinate(given: dict[str, Any]) -> None:
    from shoal.config.load import ConfigFile, Override, resolve
    from shoal.runs.coordinator_setup import prepare

    overrides = [Override(path, value, f"--set {path}={value}") for path, value in given["settings"].items()]
    loaded = resolve([ConfigFile("starter")], overrides, environ={})
    transport, run_dir = loaded.run.transport.replace(host=None, port=0), str(Path(given["folder"]) / "run")
    made = prepare(loaded, run_dir=run_dir, resume=False, reporters=[], workers=given["workers"], hosts=("127.0.0.1",), transport=transport)
    print(json.dumps(made.invitation._asdict()), flush=True)
    threading.Thread(target=lambda: _look(made.loop.coordinator, given["seconds"]), daemon=True).start()
    made.loop.train()


def _look(coordinator: Any, seconds: float) -> None:
    """Tell what happened between two versions that are so far apart: no half round counts."""
    lags: list[int] = []
    contribute = coordinator.contributions._admit

    def admit(turn: Any, event: Any, asked: Any, worker: Any) -> None:
        lags.append(worker.lag)
        contribute(turn, event, asked, worker)

    coordinator.contributions._admit = admit
    _next_version(coordinator)
    time.sleep(_SETTLING_S)
    before = _next_version(coordinator)
    lags.clear()
    time.sleep(seconds)
    after = _next_version(coordinator)
    counted = after[2] - before[2]
    rejected = 1 - (after[3] - before[3]) / max(1, counted)
    rate = (after[1] - before[1]) / (after[0] - before[0])
    figures = {"samples_per_s": rate, "rejected": rejected, "lag": sum(lags) / max(1, len(lags)), "contributions": counted}
    print(json.dumps(figures), flush=True)


def _next_version(coordinator: Any) -> tuple[float, int, int, int]:
    """Wait for a version; when it came, and the samples, contributions and accepted contributions until then."""
    state, version = coordinator.state, coordinator.state.version
    while state.version == version:
        time.sleep(0.002)
    counts = state.contributions
    return time.monotonic(), state.samples, sum(counts.values()), counts.get("accepted", 0)


# --- a worker -------------------------------------------------------------------------------------------


def work(given: dict[str, Any]) -> None:
    """Work as `shoal join` does; when asked, tell what the batches took."""
    from shoal.runs import connections, worker_run
    from shoal.transports.netem import NetemProxy, profile

    invitation = given["invitation"]
    proxy = NetemProxy(invitation["address"], profile(given["weather"]), secrets.randbits(32)) if given["weather"] else None
    address = invitation["address"] if proxy is None else proxy.address
    way = connections.JoinOptions(address, invitation["token"], invitation["key"], name=given["name"], slowdown=given["slowdown"])
    joined = worker_run.JoinedWorker(way, lambda text: None)
    joined.prepare()
    worker: Any = joined.worker
    told, begun = [0.0, 0.0, 0], [0.0]
    send, make = worker._send, worker.producer.make

    def making() -> Any:
        begun[0] = time.thread_time()
        return make()

    def sending(made: Any, *others: Any) -> None:
        told[0] += time.thread_time() - begun[0]
        told[1] += worker._step_s / worker.slowdown
        told[2] += made.batches
        send(made, *others)

    worker.producer.make, worker._send = making, sending
    print('"ready"', flush=True)
    sys.stdin.readline()
    threading.Thread(target=lambda: (sys.stdin.readline(), print(json.dumps(told), flush=True)), daemon=True).start()
    joined.work()


ROLES = {"coordinate": coordinate, "work": work}

if __name__ == "__main__":
    ROLES[sys.argv[1]](json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
