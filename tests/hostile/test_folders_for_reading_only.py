"""Folders for reading only: what has to write says in a line which file it cannot write, and what reads only works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import HANG_S, processes_in
from tests.support.small_runs import DIGITS

pytestmark = pytest.mark.long

MORE = """\
training: {max_steps: 20, batch_size: 16}
strategy: {kind: async}
transport: {kind: zmq, port: 0}
"""
AS_OTHERS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
"""Root may write everywhere, unless it gives up that right."""
WRITES = {
    "train config.yaml --workers 1 --run-dir new": "new",
    "train --resume --run-dir run": "run/",
    "coordinate --resume --run-dir run --host 127.0.0.1": "run/",
    "repair run": "run/coordinator/",
    "export run exported": "exported",
}
READS = ("eval run", "audit run", "status run", "runs .")


def modes(folder: Path, writable: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222 | (0o200 if writable else 0))


@pytest.mark.skipif(bool(AS_OTHERS) and shutil.which("setpriv") is None, reason="needs setpriv (util-linux), or a user other than root")
def test_each_command_works_or_names_what_it_cannot_write(tmp_path: Path) -> None:
    folder, state = tmp_path / "work", tmp_path / "state"
    state.mkdir()
    folder.mkdir()
    (folder / "config.yaml").write_text(DIGITS + MORE)
    with processes_in(folder) as processes:
        processes.here("train", "config.yaml", "--workers", "1", "--run-dir", "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    modes(folder, writable=False)
    try:
        for words in (*WRITES, *READS):
            command = [*AS_OTHERS, sys.executable, "-m", "shoal", *words.split()]
            environment = os.environ | {"HOME": str(state), "XDG_STATE_HOME": str(state)}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S)
            assert "Traceback" not in done.stderr, done.stderr
            assert done.returncode == (2 if words in WRITES else 0), (words, done.stdout, done.stderr)
            if words in WRITES:
                said = " ".join(done.stderr.split())
                assert re.search(r"error: cannot (make|write|open) .*: Permission denied$", said), (words, said)
                assert WRITES[words] in said, (words, said)
    finally:
        modes(folder, writable=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
