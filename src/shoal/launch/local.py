"""Worker processes on this machine. They are started, watched and started again, and they end with the process that started them.

A worker gets its secrets through its standard input, where no other user sees them, and leaves when that is closed: whatever happens to
the process that started it, no worker is left behind.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from shoal.config import Run
from shoal.config.environment import usable_cores
from shoal.config.plugins import as_arguments
from shoal.errors import ShoalError
from shoal.files import make_folder, open_file
from shoal.launch import forkserver
from shoal.launch.forkserver import write_line
from shoal.launch.waiting import wait_or_kill

MOST_FAILURES = 3
"""Failures in a row after which a worker is given up. A worker that was killed is always started again."""
USER_ERROR = 2
"""Exit code of a worker that would end in the same way if it were started again."""
_PAUSE_S, _LASTED_S = 1.0, 10.0


def fair_threads(workers: int) -> int:
    """Threads for each of `workers` workers. The coordinator beside them has one, since it mostly waits."""
    return max(1, usable_cores() // max(1, workers))


def shared_cores(processes: int) -> dict[str, str]:
    """Variables for processes that share the cores: with more threads than cores they would slow each other down."""
    return {"OMP_NUM_THREADS": str(fair_threads(processes)), "OMP_WAIT_POLICY": "PASSIVE"}


def pause_s(lasted_s: float) -> float:
    """Pause before a process that lived `lasted_s` seconds is restarted, so that one that always fails is not restarted in a busy loop."""
    return 0.0 if lasted_s > _LASTED_S else _PAUSE_S


def use_passive_waiting() -> None:
    """Let the threads of this process sleep while they wait for work, before torch starts them: others here could use the cores."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def worker_names(count: int, listed: Sequence[str]) -> list[str]:
    """Names for `count` workers: those of the settings first."""
    return [*listed[:count], *(f"w{number}" for number in range(len(listed[:count]) + 1, count + 1))]


def gpus_for(run: Run) -> list[str]:
    """The GPUs that workers of this machine share, by the names under which CUDA is asked for them; none where the run is not for them."""
    import torch

    if run.training.device not in ("auto", "cuda"):
        return []
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(number) for number in range(torch.cuda.device_count())]


def factory_arguments(run: Run) -> tuple[list[str], dict[str, str] | None]:
    """Arguments and variables for workers that may call the functions that a run names: those find the modules that this program finds."""
    from shoal.runs.live_objects import factory_names

    named = factory_names(run)
    if not named:
        return [], None
    path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))
    return [argument for name in named for argument in ("--factory", name)], {**os.environ, "PYTHONPATH": path}


class LocalWorker:
    """One worker process, and what became of it."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name, self.arguments = name, list(arguments)
        self.process: forkserver.ChildProcess | None = None
        self.failures = 0
        self.started_at = self.restart_at = 0.0
        self.failed = ""


class LocalWorkers:
    """The workers of a run on this machine."""

    passing: tuple[int, ...] = ()
    """Exit codes that say nothing about the worker: it is started again, however often."""

    def __init__(
        self,
        folder: Path,
        invitation: Mapping[str, Any],
        workers: Mapping[str, Sequence[str]],
        gpus: Sequence[str] = (),
        *,
        environ: Mapping[str, str] | None = None,
        again: bool = True,
        log: str = "",
    ) -> None:
        """`environ`: the workers' environment, if not this process's. `again`: start dead workers again. `log`: another name for it."""
        self.folder, self.invitation, self.gpus = folder, dict(invitation), gpus
        self.environ, self.again, self._log = environ, again, log
        self.workers = [LocalWorker(name, arguments) for name, arguments in workers.items()]
        make_folder(folder)

    def start(self) -> None:
        for worker in self.workers:
            self._start(worker)

    def _start(self, worker: LocalWorker) -> None:
        worker.started_at = time.monotonic()
        with open_file(self.log(worker), "ab", private=True) as log:
            worker.process = self.open(worker, log)
        with suppress(OSError):  # the process has ended already, and `look_after` will notice
            write_line(worker.process, json.dumps(self.invitation_of(worker)))

    def open(self, worker: LocalWorker, log: IO[bytes]) -> forkserver.ChildProcess:
        """Start a worker's process, which reads its invitation from its standard input."""
        environ = dict(self.environ or os.environ) | self._devices(worker)
        if "OMP_NUM_THREADS" not in os.environ:
            size, *_ = self.invitation.get("crew") or (1,)
            environ |= shared_cores(size * len(self.workers))
        return forkserver.start(["-m", "shoal", *self.command(worker, str(self.folder))], stdout=log, stderr=log, env=environ)

    def command(self, worker: LocalWorker, kept: str) -> list[str]:
        """The command line of a worker's process; `kept`: the folder for its receipts and state."""
        keeps = ["--receipts", f"{kept}/{worker.name}.jsonl", "--state", f"{kept}/{worker.name}"]
        if "--node" in worker.arguments:  # it holds layers of `shoal serve`, and has nothing to keep
            keeps = []
        plugins = as_arguments()  # those of this process
        return ["join", "--stdin", "--name", worker.name, *keeps, *worker.arguments, *plugins]

    def invitation_of(self, worker: LocalWorker) -> dict[str, Any]:
        """What a worker needs to join."""
        return self.invitation

    def _devices(self, worker: LocalWorker) -> dict[str, str]:
        """The GPUs that a worker sees: some of its own, or a shared one if there are fewer GPUs than workers."""
        if not self.gpus:
            return {}
        number, each = self.workers.index(worker), len(self.gpus) // len(self.workers)
        own = self.gpus[number * each : (number + 1) * each] or [self.gpus[number % len(self.gpus)]]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}

    def log(self, worker: LocalWorker) -> Path:
        return self.folder / f"{self._log or worker.name}.log"

    @property
    def ended(self) -> bool:
        """Whether all workers have finished their work."""
        return all(worker.process is not None and worker.process.poll() == 0 for worker in self.workers)

    def look_after(self, notify: Callable[[str], None], lost: Callable[[str], None] = lambda name: None) -> None:
        """Restart workers that died, except those that have reported why they cannot work. Raises ShoalError when none is left."""
        for worker in self.workers:
            code = worker.process.poll() if worker.process is not None else None
            if worker.failed or not code:
                continue
            if not worker.restart_at:
                lost(worker.name)
                self._ended(worker, code, notify)
            if worker.restart_at and time.monotonic() >= worker.restart_at:
                worker.restart_at = 0.0
                self._start(worker)
        if self.workers and all(worker.failed for worker in self.workers):
            raise ShoalError(f"no worker is left: {self.workers[0].failed}")

    def _ended(self, worker: LocalWorker, code: int, notify: Callable[[str], None]) -> None:
        last = last_line(self.log(worker))
        worker.failures = worker.failures + 1 if code > 0 and code not in self.passing else 0
        if code == USER_ERROR or worker.failures >= MOST_FAILURES:
            worker.failed = f"{worker.name}: {last.removeprefix('error: ')}"
            notify(f"warning: {worker.name} cannot work: {last} (see {self.log(worker)})")
            return
        worker.restart_at = time.monotonic() + pause_s(time.monotonic() - worker.started_at)
        how = f"was killed (signal {-code})" if code < 0 else f"ended with code {code}: {last}"
        if not self.again:
            raise ShoalError(f"a process of {worker.name} {how}")
        notify(f"warning: {worker.name} {how}; starting it again")

    def close(self, patience_s: float = 10.0) -> None:
        """Ask the workers to leave; those that do not leave in time are ended."""
        for worker in self.workers:
            if worker.process is not None:
                worker.process.stdin.close()
        until = time.monotonic() + patience_s
        for worker in self.workers:
            if worker.process is not None:
                wait_or_kill(worker.process, max(0.1, until - time.monotonic()))


def last_line(printed: Path | str) -> str:
    """The last line that a process printed: into a file, or as text."""
    if isinstance(printed, Path):
        printed = printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""
    lines = printed.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
