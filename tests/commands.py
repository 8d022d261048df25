"""Commands of ours as processes, that end with the test."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shoal.cli.main import main

HANG_S = 600
"""A command that takes longer hangs. This measures nothing: a busy machine takes many times as long as a quiet one."""


class Processes:
    """Commands that end with the test, whatever happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=HANG_S)
        return process.returncode, output

    def here(self, *arguments: str) -> None:
        """A command in this process, where a process of its own is not the point. Workers that it starts are processes all the same."""
        with contextlib.chdir(self.folder):
            assert main(list(arguments)) == 0  # what it printed is shown with the test

    def audit(self, run: str) -> None:
        self.here("audit", run)

    def coordinate(self, *arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
        """A coordinator, and the command that it tells workers to join with."""
        process = self.start("coordinate", "config.yaml", "--run-dir", "run", *arguments)
        return process, wait_for(process, r"shoal (join .*)").split()


def wait_for(process: subprocess.Popen[str], pattern: str) -> str:
    """Read until a line matches; what its first group holds."""
    output: IO[str] | None = process.stdout
    assert output is not None
    seen = []
    for line in output:
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
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
