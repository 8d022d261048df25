"""How much work a bound on staleness throws away: four equal workers, and four of very different speeds. Real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from run import Row

CONFIG = """\
dialect: shoal
model: {kind: mlp, hidden_sizes: [256]}
training: {batch_size: 64, max_steps: 3000, optimizer: {name: SGD, learning_rate: 0.05}}
strategy: {kind: async, max_staleness: 5, adaptive: ADAPTIVE}
evaluation: {strategy: never}
"""


def rejected(adaptive: bool, *slowdowns: str) -> tuple[int, int]:
    """Contributions that were rejected, and all of them."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.replace("ADAPTIVE", str(adaptive).lower()))
        slow = [word for one in slowdowns for word in ("--slowdown", one)]
        command = [sys.executable, "-m", "shoal", "train", str(config), "--workers", "4", "--run-dir", f"{folder}/run", *slow]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            raise SystemExit(f"the run failed:\n{result.stdout}")
        counts = json.loads((Path(folder) / "run" / "summary.json").read_text())["contributions"]
    stale = counts.get("stale", 0)
    return stale, stale + counts["accepted"]


def measure() -> list[Row]:
    rows = []
    for name, target, adaptive, slowdowns in (
        ("rejected, 4 equal workers, max_staleness 5", "< 0.01", False, ()),
        ("rejected, speeds 1, 2, 4, 8, adaptive from 5", "< 0.05", True, ("w2=2", "w3=4", "w4=8")),
    ):
        stale, every = rejected(adaptive, *slowdowns)
        rows.append(Row(name, stale, every, "contributions", stale / every, target))
    return rows
