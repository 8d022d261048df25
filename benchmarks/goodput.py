"""Islands that die: four workers under DiLoCo, of which one is killed (`kill -9`) every 20 s, against the same run left in peace.

Goodput is samples per second that went into the weights, from the fifth round on. Afterwards `shoal audit` must be content.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import Row

EVERY_S, KILLS = 20.0, 6
CONFIG = """\
dialect: shoal
model: {kind: gpt, hidden_size: 64, num_layers: 2, num_heads: 4, max_seq_len: 64, dropout: 0.0}
data: {source: {kind: builtin, name: python-source}, tokenizer: bytes, sequence_length: 64}
training: {batch_size: 8, max_steps: 10000000, epochs: 100000, device: cpu, optimizer: {name: AdamW, learning_rate: 0.001}}
strategy: {kind: diloco, inner_steps: 20, quorum: 3, grace_s: 0.5}
engine: {kind: ddp}
launch: {devices_per_node: 1}
evaluation: {strategy: never}
checkpoint: {strategy: steps, every_steps: 200}
logging: {every_steps: 1}
coordinator: {heartbeat_interval_s: 1.0}
"""


def goodput(folder: Path, disturb: bool) -> tuple[float, bool]:
    """Samples per second, and whether nothing was lost or counted twice."""
    (folder / "config.yaml").write_text(CONFIG)
    run = folder / "run"
    command = [sys.executable, "-m", "shoal", "train", str(folder / "config.yaml"), "--workers", "4", "--run-dir", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        while len(_records(run)) < 5:
            time.sleep(0.5)
        (before, begun), deaths = _mark(run), 0
        while deaths < KILLS:
            time.sleep(EVERY_S)
            if disturb:
                os.kill(_island(run, f"w{deaths % 4 + 1}"), signal.SIGKILL)
            deaths += 1
        time.sleep(EVERY_S)
        after, ended = _mark(run)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    audit = subprocess.run([sys.executable, "-m", "shoal", "audit", str(run)], capture_output=True)
    return (after - before) / (ended - begun), audit.returncode == 0


def _records(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def _mark(run: Path) -> tuple[float, float]:
    last = _records(run)[-1]
    return last["samples"], last["wall_s"]


def _island(run: Path, name: str) -> int:
    """The process that computes for a worker."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (path / "cmdline").read_text().split("\0"), (path / "environ").read_text()
        except OSError:
            continue
        if "join" in command and re.search(r"\bRANK=0\b", environ) and str(run / "workers" / name) in command:
            return int(path.name)
    raise SystemExit(f"{name} is not running")


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        peace, _ = goodput(Path(one), disturb=False)
        ours, clean = goodput(Path(other), disturb=True)
    note = "audit clean" if clean else "AUDIT FAILED"
    return [Row("goodput, one island of four killed every 20 s", ours, peace, "samples/s", ours / peace, "≥ 0.9", note)]
