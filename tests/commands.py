"""Commands of ours as processes, that end with the test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


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
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.running.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=100)
        return process.returncode, output

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


@contextmanager
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
