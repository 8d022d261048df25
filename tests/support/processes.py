"""Shoal commands as processes that end with the test. All are started by the fork server, which is quick."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from shoal.cli.main import main
from shoal.launch import forkserver
from tests.support.eventually import HANG_S

LOADED_ONCE = (
    "shoal.cli.train",
    "shoal.cli.coordinate",
    "shoal.launch.run_database",
    "shoal.reporters.sinks",
    "shoal.runs.export",
    "shoal.transports.postgres",
    "PIL.ImageDraw",
    "PIL.PngImagePlugin",
)
"""What many processes of tests need: the fork server loads it for all of them."""


class Command:
    """A Python process as `subprocess.Popen` would start it, with pipes to read from. The fork server starts it."""

    def __init__(
        self, arguments: list[str], folder: Path | None = None, env: Mapping[str, str] | None = None, *, errors: bool = False
    ) -> None:
        """`errors`: give standard error a pipe of its own."""
        reading, writing = os.pipe()
        other, second = os.pipe() if errors else (-1, writing)
        self.process = forkserver.start(arguments, stdout=writing, stderr=second, cwd=folder, env=env, loads=LOADED_ONCE)
        for descriptor in {writing, second}:
            os.close(descriptor)
        self.stdout: IO[str] = os.fdopen(reading, encoding="utf-8", errors="replace")
        self.stderr: IO[str] | None = os.fdopen(other, encoding="utf-8", errors="replace") if errors else None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Everything that it still says, and its end. A process that takes longer is killed."""
        late = threading.Timer(timeout or HANG_S, self.kill)
        late.start()
        said: list[str] = []
        beside = threading.Thread(target=lambda: said.append(self.stderr.read() if self.stderr is not None else ""))
        beside.start()
        try:
            output = self.stdout.read()
            beside.join()
            self.wait()
        finally:
            late.cancel()
        return output, said[0]

    def close(self) -> None:
        """End it, if it has not ended."""
        self.kill()
        self.wait()
        for stream in (self.stdout, self.stderr, self.process.stdin):
            if stream is not None:
                stream.close()


class Done(NamedTuple):
    """How a command ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def run_python(arguments: list[str], folder: Path | None = None, env: Mapping[str, str] | None = None) -> Done:
    """Run a Python process to its end."""
    command = Command(arguments, folder, env, errors=True)
    try:
        output, errors = command.communicate(HANG_S)
        return Done(command.wait(), output, errors)
    finally:
        command.close()


class Processes:
    """Commands that end with the test, whatever happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[Command] = []

    def start(self, *arguments: str) -> Command:
        process = Command(["-m", "shoal", *arguments], self.folder)
        self.running.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=HANG_S)
        return process.wait(), output

    def here(self, *arguments: str) -> None:
        """A command in this process, where a process of its own is not the point. Workers that it starts are processes all the same."""
        with contextlib.chdir(self.folder):
            assert main(list(arguments)) == 0  # what it printed is shown with the test

    def audit(self, run: str) -> None:
        self.here("audit", run)

    def coordinate(self, *arguments: str) -> tuple[Command, list[str]]:
        """A coordinator, and the command that it tells workers to join with."""
        process = self.start("coordinate", "config.yaml", "--run-dir", "run", *arguments)
        return process, wait_for_line(process, r"shoal (join .*)").split()


def wait_for_line(process: Command, pattern: str) -> str:
    """Read until a line matches; what its first group holds."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(pattern, line):
            return found.group(1) if found.groups() else line
    raise AssertionError(f"{pattern} never came:\n{''.join(seen)}")


@contextlib.contextmanager
def processes_in(folder: Path) -> Iterator[Processes]:
    made = Processes(folder)
    try:
        yield made
    finally:
        for process in made.running:
            process.close()
