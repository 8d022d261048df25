"""DiLoCo over slow links: a GPT of 10M parameters, two workers behind 10, 50 and 100 Mbit/s, and how much of their time they compute.

Fragments take turns (Streaming DiLoCo), each is sent while the worker goes on, and differences are 8-bit in both directions. A worker
itself counts the time that it waits for answers, from its first step to its last. The peer is plain DiLoCo: all weights at once, in
float32, and everybody waits for them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from run import Row

RATES = (10, 50, 100)
CONFIG = """\
dialect: shoal
model: {kind: gpt, hidden_size: 320, num_layers: 8, num_heads: 5, max_seq_len: 64, dropout: 0.0}
data: {source: {kind: builtin, name: python-source}, tokenizer: bytes, sequence_length: 64}
training: {batch_size: 4, max_steps: 96, device: cpu, optimizer: {name: AdamW, learning_rate: 0.001}}
strategy: {kind: diloco, inner_steps: 32}
evaluation: {strategy: never}
checkpoint: {strategy: never}
"""
STREAMING = ["strategy.fragments=4", "strategy.overlap_steps=4", "updates.codec.kind=int8"]


def busy(rate: int, settings: list[str]) -> float:
    """The smaller of the two workers' shares."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        chosen = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "shoal", "train", str(config), "--workers", "2", "--netem", f"{rate}mbit"]
        result = subprocess.run(
            [*command, "--run-dir", f"{folder}/run", *chosen], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode:
            raise SystemExit(f"the run failed:\n{result.stdout}")
        said = [path.read_text() for path in (Path(folder) / "run" / "workers").glob("*.log")]
    return min(int(re.findall(r"computing (\d+)% of the time", log)[-1]) for log in said) / 100


def measure() -> list[Row]:
    rows = []
    for rate in RATES:
        ours, peer = busy(rate, STREAMING), busy(rate, [])
        target = "≥ 0.95" if rate == 50 else ""
        rows.append(Row(f"slow-link, {rate} Mbit/s: computing", ours, peer, "of the time; peer: everything at once", ours, target))
    return rows
