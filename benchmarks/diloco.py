"""DiLoCo against synchronous data parallelism: a small GPT on text, four workers, equal tokens; validation loss and bytes. Real processes.

Bytes are those that the coordinator's transport counted, in both directions, the first weights of each worker among them. The fewer rounds
there are, the larger is the gap: 160 of 50 steps are enough for the outer optimizer to catch up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from run import Row

TEXT = Path(__file__).parents[2] / "shared" / "data" / "text" / "tinyshakespeare.txt"
STEPS = 8000
CONFIG = f"""\
dialect: shoal
model: {{kind: gpt, hidden_size: 48, num_layers: 2, num_heads: 4, max_seq_len: 32, dropout: 0.0,
        positions: rotary, feed_forward: swiglu, norm: rms, bias: false}}
data: {{source: {{kind: text, path: {TEXT}}}, tokenizer: characters}}
training:
  batch_size: 8
  max_steps: {STEPS}
  clipping: {{max_norm: 1.0}}
  optimizer: {{name: AdamW, learning_rate: 0.004, beta2: 0.99, weight_decay: 0.1}}
  schedule: {{kind: cosine, warmup_steps: 50, end_learning_rate: 0.0002}}
evaluation: {{strategy: steps, every_steps: {STEPS}}}
checkpoint: {{strategy: never}}
"""
SYNCHRONOUS = ["strategy.kind=syncps"]
DILOCO = ["strategy.kind=diloco", "strategy.inner_steps=50", "strategy.outer.learning_rate=0.5"]
SPARSE = ["updates.codec.kind=topk", "updates.codec.ratio=0.18", "updates.codec.values=ternary"]
MILDER = ["strategy.outer.learning_rate=0.8", "strategy.outer.momentum=0.6"]
"""What top-k left out comes a few rounds later: momentum 0.9 would carry it too far."""
WAYS = (
    ("8-bit", ["updates.codec.kind=int8"], "≥ 100", "≤ 1.01"),
    ("4-bit", ["updates.codec.kind=int4"], "≥ 350", "≤ 1.02"),
    ("ternary", ["updates.codec.kind=ternary"], "≥ 800", "≤ 1.02"),
    ("sparse, 18 %", SPARSE + MILDER, "≥ 800", "≤ 1.02"),
)


class Outcome(NamedTuple):
    """What a run came to."""

    loss: float
    sent: int
    """Bytes, both ways."""


def trained(settings: list[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        chosen = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "shoal", "train", str(config), "--workers", "4", "--run-dir", f"{folder}/run", *chosen]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            raise SystemExit(f"the run failed:\n{result.stdout}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    assert summary["samples"] == STEPS * 4 * 8  # equal tokens
    return Outcome(summary["metrics"]["eval"]["loss"], summary["received_bytes"] + summary["sent_bytes"])


def measure() -> list[Row]:
    if not TEXT.exists():
        print("diloco: skipped, there is no text in ../shared/data")
        return []
    peer = trained(SYNCHRONOUS)
    rows = []
    for name, settings, less, worse in WAYS:
        ours = trained(DILOCO + settings)
        rows.append(Row(f"diloco, {name}: validation loss", ours.loss, peer.loss, "nats/character", ours.loss / peer.loss, worse))
        rows.append(Row(f"diloco, {name}: bytes", ours.sent, peer.sent, "both ways", peer.sent / ours.sent, less))
    return rows
