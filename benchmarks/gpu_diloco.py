"""DiLoCo on one GPU: a GPT of 29M parameters, eight workers as processes that share it, equal tokens; validation loss and bytes.

The peer is synchronous data parallelism: one process that takes the eight workers' batches at once, with the numbers of DDP, and the
bytes that eight DDP workers would send and receive (each its gradient and the mean of all, in float32, at every step). The outer optimizer
has less momentum than in a long run: with few rounds it would not catch up.
`make bench BENCH=gpu-diloco` on a machine with a GPU takes twenty minutes, where `nvidia-cuda-mps-control -d` lets processes share it well;
SHOAL_BENCH_STEPS sets how many steps each worker takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from diloco import MILDER, SPARSE
from run import Row

WORKERS = 8
STEPS = int(os.environ.get("SHOAL_BENCH_STEPS", "1000"))
CONFIG = """\
dialect: shoal
model: {kind: gpt, hidden_size: 512, num_layers: 7, num_heads: 8, max_seq_len: 256, dropout: 0.0,
        positions: rotary, feed_forward: swiglu, norm: rms, bias: false}
data: {source: {kind: builtin, name: python-source}, tokenizer: bytes, sequence_length: 256}
training:
  device: cuda
  precision: {kind: bf16}
  clipping: {max_norm: 1.0}
  optimizer: {name: AdamW, learning_rate: 0.001, beta2: 0.95, weight_decay: 0.1}
  schedule: {kind: cosine}
checkpoint: {strategy: never}
logging: {every_steps: 50}
"""
MUON = ["training.optimizer.name=Muon", "training.optimizer.beta2=null"]
WAYS: tuple[tuple[str, int, list[str]], ...] = (
    ("H = 10", 10, ["strategy.outer.learning_rate=0.3"]),
    ("H = 30", 30, MILDER),
    ("H = 100", 100, MILDER),
    ("H = 30, streaming in 3 fragments", 30, [*MILDER, "strategy.fragments=3", "strategy.overlap_steps=2"]),
    ("H = 30, 4-bit", 30, [*MILDER, "updates.codec.kind=int4"]),
    ("H = 30, sparse 18 %", 30, [*MILDER, *SPARSE]),
    ("H = 30, Muon", 30, [*MILDER, *MUON]),
)


class Outcome(NamedTuple):
    """What a run came to."""

    loss: float
    sent: int
    """Bytes, both ways."""
    parameters: int


def trained(settings: list[str], workers: int) -> Outcome:
    """A whole run, as a user starts it."""
    started = time.monotonic()
    common = [f"training.max_steps={STEPS}", f"training.schedule.warmup_steps={STEPS // 20}", "evaluation.strategy=steps"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        chosen = [word for setting in [*common, f"evaluation.every_steps={STEPS}", *settings] for word in ("--set", setting)]
        command = [sys.executable, "-m", "shoal", "train", str(config), "--run-dir", f"{folder}/run", *chosen]
        result = subprocess.run(
            [*command, *(["--workers", str(workers)] if workers > 1 else [])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode:
            raise SystemExit(f"the run failed:\n{result.stdout}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    size = int(
        next(line for line in result.stdout.splitlines() if " parameters, in " in line).split(" parameters")[0].split()[-1].replace(",", "")
    )
    loss, sent = summary["metrics"]["eval"]["loss"], summary.get("received_bytes", 0) + summary.get("sent_bytes", 0)
    print(f"  {loss:.4f}  {sent / 1e6:,.0f} MB  {time.monotonic() - started:.0f} s  {' '.join(settings)}", file=sys.stderr, flush=True)
    return Outcome(loss, sent, size)


def measure() -> list[Row]:
    import torch

    if not torch.cuda.is_available():
        print("gpu-diloco: skipped, there is no GPU here")
        return []
    peer = trained([f"training.batch_size={8 * WORKERS}"], 1)
    synchronous = STEPS * WORKERS * 2 * 4 * peer.parameters
    rows = []
    for name, inner, settings in WAYS:
        ours = trained(["training.batch_size=8", "strategy.kind=diloco", f"strategy.inner_steps={inner}", *settings], WORKERS)
        rows.append(Row(f"gpu-diloco, {name}: loss", ours.loss, peer.loss, "nats/byte", ours.loss / peer.loss, ""))
        rows.append(Row(f"gpu-diloco, {name}: bytes", ours.sent, synchronous, "both ways", synchronous / ours.sent, ""))
    return rows
