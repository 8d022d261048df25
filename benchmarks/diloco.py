"""DiLoCo against synchronous data parallelism: a small GPT on text, four workers, equal tokens; validation loss and bytes. Real processes.

Bytes are those that the coordinator's transport counted, in both directions, the first weights of each worker among them. The fewer rounds
there are, the larger is the gap: 160 of 50 steps are enough for the outer optimizer to catch up.

With chunks of top-k, bytes of a round are compared with the model's in float32, in each direction: those of messages and heartbeats are
among them, the first weights are not. Each such run has three seeds, and the mean loss counts; so has the synchronous run they are
compared with. Steps and bytes of a round multiply: 10 steps of a round and 100 times fewer bytes are 1,000 times fewer bytes in all.

With 3 % in chunks and 10 steps a round three seeds came to 1.036 times the loss of synchronous training (1.029 to 1.040), with 1.5 %
to 1.044, and one seed with 6 % to 1.023. On another machine one seed came to 1.022 with 3 % (5 steps a round 1.027, 50 steps 1.066).
Outer momentum is worse: 0.6 with learning rate 0.8 came to 1.039 (10 steps) and 1.147 (50 steps).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from run import Row

TEXT = Path(__file__).parents[2] / "shared" / "data" / "text" / "tinyshakespeare.txt"
STEPS = 8000
WORKERS, SEEDS, OFTEN_STEPS = 4, (0, 1, 2), 10
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
CHUNKS = ["updates.codec.kind=topk", "updates.codec.chunk=4096", "updates.codec.values=2-bit", "updates.codec.error_decay=0.95"]
PLAIN_MEAN = ["strategy.outer.learning_rate=1", "strategy.outer.momentum=0", "strategy.outer.nesterov=false"]
"""Error feedback takes the place of momentum, as in SparseLoCo."""
OFTEN = ["strategy.kind=diloco", f"strategy.inner_steps={OFTEN_STEPS}", *PLAIN_MEAN, *CHUNKS]
DENSITIES = (0.015, 0.03, 0.06)
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
    up: float = 0.0
    """Bytes of a worker's contribution, of all that workers sent."""
    down: float = 0.0
    """Bytes of a version for a worker, of all but the first weights."""
    model: int = 0
    """Bytes of the model in float32."""


def parameters_in(output: str) -> int:
    """The number of parameters that a run reports at its start."""
    found = re.search(r"([\d,]+) trained parameters, in ", output)
    assert found is not None, output
    return int(found[1].replace(",", ""))


def trained(settings: list[str], seed: int = 0) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        chosen = [word for setting in [*settings, f"seed={seed}"] for word in ("--set", setting)]
        command = [sys.executable, "-m", "shoal", "train", str(config), "--workers", str(WORKERS), "--run-dir", f"{folder}/run", *chosen]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            raise SystemExit(f"the run failed:\n{result.stdout}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    assert summary["samples"] == STEPS * WORKERS * 8  # equal tokens
    up, down, contributions = summary["received_bytes"], summary["sent_bytes"], summary["contributions"]["accepted"]
    model = 4 * parameters_in(result.stdout)
    return Outcome(summary["metrics"]["eval"]["loss"], up + down, up / contributions, (down - WORKERS * model) / contributions, model)


def measure() -> list[Row]:
    if not TEXT.exists():
        print("diloco: skipped, there is no text in ../shared/data")
        return []
    peers = [trained(SYNCHRONOUS, seed) for seed in SEEDS]
    peer, rows = peers[0], []
    for name, settings, less, worse in WAYS:
        ours = trained(DILOCO + settings)
        rows.append(Row(f"diloco, {name}: validation loss", ours.loss, peer.loss, "nats/character", ours.loss / peer.loss, worse))
        rows.append(Row(f"diloco, {name}: bytes", ours.sent, peer.sent, "both ways", peer.sent / ours.sent, less))
    return rows + [row for density in DENSITIES for row in in_chunks(density, fmean(one.loss for one in peers))]


def in_chunks(density: float, peer: float) -> list[Row]:
    """Chunks of top-k: the loss, and bytes of a round in each direction against the model in float32."""
    runs = [trained([*OFTEN, f"updates.codec.ratio={density}"], seed) for seed in SEEDS]
    loss, name = fmean(one.loss for one in runs), f"diloco, {density:.1%} in chunks, {OFTEN_STEPS} steps a round"
    loss_target, target = ("≤ 1.02", "≥ 100") if density == 0.03 else ("(for comparison)", "(for comparison)")
    rows = [Row(f"{name}: validation loss, 3 seeds", loss, peer, "nats/character", loss / peer, loss_target)]
    for way, each in (("up", [one.up for one in runs]), ("down", [one.down for one in runs])):
        rows.append(Row(f"{name}: bytes a round {way}", fmean(each), runs[0].model, "of float32", runs[0].model / fmean(each), target))
    return rows
