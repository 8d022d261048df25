"""The Ray actor: runs a worker as a process of its node, and returns the worker's output."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shoal.files import open_file
from shoal.launch.forkserver import OpenedProcess, write_line


class RayWorkerActor:
    """One worker on a node of Ray's. The worker ends with the actor."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-ray-"))
        self.log, self.read = self.folder / "log", 0
        self.receipts = self.folder / "receipts.jsonl"
        kept = ["--receipts", str(self.receipts), "--state", str(self.folder / "state")]
        command = [sys.executable, "-m", "shoal", "join", "--stdin", "--name", name, *kept, *arguments]
        with open_file(self.log, "ab", private=True) as log:
            self.process = OpenedProcess(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def work(self, invitation: str) -> tuple[int, str]:
        """Work until the end; the exit code, and what was said since it was last asked for."""
        write_line(self.process, invitation)
        return self.process.wait(), self.said()

    def said(self) -> str:
        """What the worker has printed since this was last asked."""
        text = self.log.read_bytes()[self.read :]
        self.read += len(text)
        return text.decode(errors="replace")

    def stop(self) -> None:
        """Ask the worker to leave."""
        self.process.stdin.close()

    def end(self) -> str:
        """End the worker where it has not left by itself, and leave nothing on the node. Return its receipts."""
        self.process.kill()
        self.process.wait()
        receipts = self.receipts.read_text(encoding="utf-8") if self.receipts.exists() else ""
        shutil.rmtree(self.folder, ignore_errors=True)
        return receipts
