"""What a relay gives: a school whose workers share one line to the coordinator, with a relay in the school and without one.

Both are real processes: a coordinator, eight workers with `syncps`, and for the tree a `shoal relay` beside the workers. The line is a
proxy of 50 Mbit/s that all of the school's connections share. The peer is the star: every worker joins the coordinator through the line.
Each row is another view of the same two runs: what the school learns from in a second, what the line carries for one worker's
contribution, and what the coordinator's processor spends on it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import real_runs
from processes import Helper, environment, records, seconds_of
from run import Row

from shoal.transports.netem import NetemProxy, profile

WORKERS, BATCH = 8, 4
LINE = "50mbit"
SETTLING_S, SECONDS = 4.0, 20.0
MODELS = {85_002: "[256, 256]", 1_126_410: "[1024, 1024]"}
"""Numbers in a model: its hidden layers."""


class Moment(NamedTuple):
    """What had happened when a round was over."""

    at: float
    samples: int
    line_bytes: int
    processor_s: float


class Line(NetemProxy):
    """A proxy that counts what it carries."""

    def __init__(self, address: str) -> None:
        super().__init__(address, profile(LINE))
        self.carried = 0
        for lane in self._lanes:
            lane.carry = self._counting(lane.carry)  # type: ignore[method-assign]

    def _counting(self, carry: Any) -> Any:
        def counting(size: int, now: float) -> Any:
            self.carried += size
            return carry(size, now)

        return counting


def watched(hidden: str, relayed: bool) -> tuple[Moment, Moment]:
    """A run's first and last moment of the time that counts."""
    settings = real_runs.QUIET | {"strategy.kind": "syncps", "model.hidden_sizes": hidden, "training.batch_size": str(BATCH)}
    settings |= {"coordinator.devices_per_worker": str(WORKERS), "logging.every_steps": "1"}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        given = {"settings": settings, "workers": 1 if relayed else WORKERS, "folder": str(folder), "seconds": 1e6}
        coordinator = Helper(real_runs.__file__, "coordinate", 1, **given)
        stack.callback(coordinator.close)
        invitation = coordinator.hear()
        line = Line(invitation["address"])
        stack.callback(line.close)
        start = relay if relayed else workers
        start(stack, invitation | {"address": line.address}, folder)
        after_round(folder / "run", line, coordinator)
        time.sleep(SETTLING_S)
        first = after_round(folder / "run", line, coordinator)
        time.sleep(SECONDS)
        return first, after_round(folder / "run", line, coordinator)


def workers(stack: ExitStack, invitation: dict[str, Any], folder: Path) -> None:
    """Workers that join by themselves."""
    names = [f"w{number}" for number in range(WORKERS)]
    started = [Helper(real_runs.__file__, "work", 1, invitation=invitation, name=name, slowdown=1.0, weather="") for name in names]
    for worker in started:
        stack.callback(worker.close)
    for worker in started:
        worker.hear()
        worker.say("go")


def relay(stack: ExitStack, invitation: dict[str, Any], folder: Path) -> None:
    """The same workers below a relay."""
    command = [sys.executable, "-m", "shoal", "relay", invitation["address"], "--token", invitation["token"], "--name", "school"]
    command += ["--key", invitation["key"]] if invitation["key"] else []
    command += ["--expect", str(WORKERS), "--workers", str(WORKERS), "--run-dir", str(folder / "school"), "--host", "127.0.0.1"]
    with (folder / "relay.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(1))
    stack.callback(process.wait)
    stack.callback(process.terminate)


def after_round(run_dir: Path, line: Line, coordinator: Helper) -> Moment:
    """Wait for the end of a round."""
    before = len(records(run_dir))
    while len(found := records(run_dir)) == before:
        time.sleep(0.005)
    return Moment(time.monotonic(), found[-1]["samples"], line.carried, seconds_of(coordinator.process.pid))


class Seen(NamedTuple):
    """What a run did in the time that counts; the last two for a contribution of one worker."""

    samples_per_s: float
    line_bytes: float
    processor_ms: float


def seen(first: Moment, last: Moment) -> Seen:
    at, samples, line_bytes, processor_s = (after - before for before, after in zip(first, last, strict=True))
    contributions = samples / BATCH
    return Seen(samples / at, line_bytes / contributions, 1e3 * processor_s / contributions)


def measure() -> Iterator[Row]:
    """Some minutes."""
    for numbers, hidden in MODELS.items():
        star, tree = (seen(*watched(hidden, relayed)) for relayed in (False, True))
        name = f"tree, {WORKERS} workers behind {LINE}, {numbers:,} numbers"
        units = ("samples/s", "bytes on the line for a contribution", "ms of the coordinator for a contribution")
        for ours, peer, unit in zip(tree, star, units, strict=True):
            yield Row(f"{name}, {unit.split()[0]}", ours, peer, unit, ours / peer, "")
