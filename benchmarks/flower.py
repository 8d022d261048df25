"""Flower 1.41.0, in an environment of its own, with peer_apps/flower_app.py as its app."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import peers
from processes import MNIST, environment

APPS = Path(__file__).parent / "peer_apps"
NAME = "flower-training"
peers.INSTALL.setdefault(NAME, [["torch==2.13.0"], ["torch==2.13.0", "flwr[simulation]==1.41.0"]])
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(APPS)}


def run(threads: int | None = 1, **spec: Any) -> dict[str, list[float]]:
    """`times`: seconds from the start of the first round to the end of each; `accuracies`: on the test set, after each."""
    given = json.dumps({"mnist": str(MNIST)} | spec)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        own = environment(threads) | _QUIET | {"FLWR_HOME": home, "RAY_TMPDIR": home}
        command = [str(peers.python(NAME)), "-c", "import flower_app; flower_app.main()", given]
        done = subprocess.run(command, capture_output=True, text=True, env=own, cwd=home)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"times"')]
    if not lines:
        raise RuntimeError(f"Flower told nothing: {done.stderr[-3000:]}")
    return json.loads(lines[-1])
