"""Runs of `shoal train` in processes of their own, and how fast they were once they were under way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parents[2] / "shared" / "data"
MNIST = DATA / "mnist"
QUIET = {"evaluation.strategy": "never", "checkpoint.strategy": "never", "training.epochs": "1000000"}
MLP = {
    "data.source.kind": "mnist",
    "data.source.path": str(MNIST),
    "model.hidden_sizes": "[128, 128]",
    "training.batch_size": "32",
}
"""The MLP of overhead.py, 118,794 parameters."""
PYTHON = sys.executable
_START_S = 90.0


class Speed(NamedTuple):
    """How fast a run was while it was watched."""

    samples: float
    """Per second."""
    steps: float
    """Per second: updates of the weights."""
    busy: tuple[float, ...]
    """Cores kept busy by the process that was started, and by its descendants; empty where the system does not tell."""

    def processor_us(self, index: int) -> float:
        """Microseconds of processor time for each step, of `busy[index]`: unlike the speed, it hardly depends on what else runs."""
        return 1e6 * self.busy[index] / max(1e-9, self.steps)


def command(run_dir: Path, settings: Mapping[str, str], *, preset: str = "starter", workers: int = 0) -> list[str]:
    """`shoal train` with these settings."""
    made = [sys.executable, "-m", "shoal", "train", preset, "--run-dir", str(run_dir)]
    made += [part for path, value in settings.items() for part in ("--set", f"{path}={value}")]
    return made + (["--workers", str(workers)] if workers else [])


def environment(threads: int | None) -> dict[str, str]:
    """This one's, with so many threads for each process; None: as many as Shoal and PyTorch choose."""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return kept | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


class Helper:
    """A process with a role from a file. It tells and is told in lines of JSON."""

    def __init__(
        self, script: str | Path, role: str, threads: int | None = None, python: Path | str = sys.executable, **given: Any
    ) -> None:
        command = [str(python), str(script), role, json.dumps(given)]
        env = environment(threads) | {"OMP_WAIT_POLICY": "PASSIVE"}  # as `shoal coordinate` sets it for itself
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, start_new_session=True)

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        return json.loads(line)

    def say(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End it, and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def watch(run_dir: Path, arguments: list[str], *, seconds: float, warm_up_s: float = 2.0, threads: int | None = None) -> Speed:
    """Start a run that would go on for ever, let it warm up, watch it for a while and stop it."""
    log = run_dir.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=output, env=environment(threads))
    try:
        _wait_for_records(run_dir, process, log)
        time.sleep(warm_up_s)
        before, first = _busy(process.pid), _last(run_dir)
        started = time.monotonic()
        time.sleep(seconds)
        after, last = _busy(process.pid), _last(run_dir)
        passed = time.monotonic() - started
    finally:
        _stop(process)
    wall = max(1e-9, last["wall_s"] - first["wall_s"])
    busy = tuple((late - early) / passed for early, late in zip(before, after, strict=True)) if before and after else ()
    return Speed((last["samples"] - first["samples"]) / wall, (last["step"] - first["step"]) / wall, busy)


def whole(run_dir: Path, arguments: list[str], *, threads: int | None = None) -> dict[str, Any]:
    """Run to the end; its summary."""
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment(threads))
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}\n{done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return summary


def _wait_for_records(run_dir: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_S
    while not records(run_dir):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"no training: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has noted of its training so far."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in found if record["split"] == "train"]


def _last(run_dir: Path) -> dict[str, Any]:
    return records(run_dir)[-1]


def _busy(pid: int) -> tuple[float, ...]:
    """Seconds of processor time that a process has had, and all its descendants together: a fork server starts the workers."""
    try:
        return seconds_of(pid), sum(map(seconds_of, _descendants(pid)))
    except OSError:
        return ()


def _descendants(pid: int) -> list[int]:
    """The processes that descend from a process, whichever of its threads began them."""
    children = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return [one for child in children for one in (child, *_descendants(child))]


def seconds_of(pid: int) -> float:
    """Processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
