"""The processes of a demonstration: a coordinator and workers on this machine, which can be killed and started again.

They run the commands that users type: `shoal coordinate` prints an invitation, and `shoal join` uses it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.files import make_folder, open_file
from shoal.launch import forkserver
from shoal.launch.local import last_line, shared_cores
from shoal.launch.processes import ENDS_WITH_PARENT
from shoal.launch.waiting import wait_or_kill
from shoal.runs.invitation import Invitation
from shoal.transports.database_address import is_address
from shoal.transports.database_address import parse as parse_database

_POLL_INTERVAL_S = 0.05
_START_S = 120.0
_STOP_S = 30.0


class DemoProgress(NamedTuple):
    """How far a run has come, by its newest records."""

    version: int = 0
    samples: int = 0
    figures: Mapping[str, float] = MappingProxyType({})
    """The newest loss, and what the newest evaluation found."""


class DemoProcesses:
    """The processes of one demonstration. They end with the context."""

    def __init__(self, folder: Path, arguments: Sequence[str], threads: int) -> None:
        """`arguments`: files and settings of `shoal coordinate`. `threads`: number of workers that share the cores."""
        self.folder, self.run, self.arguments = folder, folder / "run", list(arguments)
        self.log = folder / "coordinator.log"
        self.environ = {**os.environ, **shared_cores(threads)}
        self.coordinator: forkserver.ChildProcess | None = None
        self.workers: dict[str, forkserver.ChildProcess] = {}
        self.invitation: Invitation | None = None
        make_folder(folder)

    def __enter__(self) -> DemoProcesses:
        forkserver.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.workers.values(), self.coordinator]:
            if process is not None:
                self._end(process)

    def open(self, resume: bool = False) -> None:
        """Start the coordinator, and wait until it prints how to join. Raises ShoalError. `resume`: it was killed and continues."""
        spoken, arguments = self.log.stat().st_size if self.log.exists() else 0, ["--resume"] if resume else self.arguments
        command = ["-m", ENDS_WITH_PARENT, "coordinate", *arguments, "--run-dir", str(self.run), "--host", "127.0.0.1"]
        with open_file(self.log, "ab", private=True) as log:
            self.coordinator = forkserver.start(command, stdout=log, stderr=log, env=self.environ)
        words = shlex.split(self._printed_line(spoken, "  shoal join "))
        if is_address(words[2]):
            token = (self.run / "class_token").read_text(encoding="utf-8").strip()
            self.invitation = Invitation(parse_database(words[2])._replace(password=token).address, "", None)
        else:
            self.invitation = Invitation(words[2], words[words.index("--token") + 1], None)

    def _printed_line(self, spoken: int, beginning: str) -> str:
        """Wait until the coordinator prints a line that begins like this."""
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            text = self.log.read_bytes()[spoken:].decode(errors="replace")
            for line in text.splitlines(keepends=True):
                if line.startswith(beginning) and line.endswith("\n"):
                    return line
            assert self.coordinator is not None
            if self.coordinator.poll() is not None:
                raise ShoalError(f"the coordinator does not start: {last_line(self.log)} (see {self.log})")
            time.sleep(_POLL_INTERVAL_S)
        raise ShoalError(f"the coordinator does not listen after {_START_S:.0f} s (see {self.log})")

    def join(self, name: str, more: Sequence[str] = ()) -> None:
        """Start a worker, which leaves when this process ends, however it ends."""
        assert self.invitation is not None
        kept = self.run / "workers"
        make_folder(kept)
        command = ["-m", "shoal", "join", "--stdin", "--name", name, "--receipts", str(kept / f"{name}.jsonl"), "--state", str(kept / name)]
        with open_file(kept / f"{name}.log", "ab", private=True) as log:
            process = forkserver.start([*command, *more], stdout=log, stderr=log, env=self.environ)
        forkserver.write_line(process, json.dumps(self.invitation._asdict()))
        self.workers[name] = process

    def kill(self, name: str) -> None:
        """`kill -9` for a worker."""
        self._end(self.workers[name])

    def takes_part(self, name: str) -> bool:
        """Whether something of a worker has counted; of one that has ended nothing more is to come."""
        receipts = self.run / "workers" / f"{name}.jsonl"
        return self.workers[name].poll() is not None or (receipts.exists() and receipts.stat().st_size > 0)

    def crash(self) -> None:
        """`kill -9` for the coordinator."""
        assert self.coordinator is not None
        self._end(self.coordinator)

    def _end(self, process: forkserver.ChildProcess) -> None:
        process.kill()
        process.wait()

    def seen(self) -> DemoProgress:
        found, path = DemoProgress(), self.run / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        figures: dict[str, float] = {}
        for record in _whole_records(lines):
            figures |= {name: record[name] for name in ("loss", "accuracy", "perplexity") if record["split"] == "eval" and name in record}
            found = DemoProgress(max(found.version, record["step"]), max(found.samples, record["samples"]), figures)
        return found

    def ended(self) -> bool:
        """Whether the coordinator has ended by itself. Raises ShoalError where it failed."""
        assert self.coordinator is not None
        code = self.coordinator.poll()
        if code not in (None, 0):
            raise ShoalError(f"the coordinator ended: {last_line(self.log)} (see {self.log})")
        return code == 0

    def stop(self) -> None:
        """Ask the coordinator to save and end, and the workers to leave."""
        assert self.coordinator is not None
        if self.coordinator.poll() is None:
            self.coordinator.send_signal(signal.SIGINT)
        wait_or_kill(self.coordinator, _STOP_S)
        for process in self.workers.values():
            process.stdin.close()
        for process in self.workers.values():
            wait_or_kill(process, _STOP_S)


def _whole_records(lines: list[str]) -> Iterator[dict[str, Any]]:
    """Records that are whole: the last line may just be written."""
    for line in lines:
        with suppress(ValueError):
            yield json.loads(line)
