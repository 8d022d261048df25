"""DiLoCo on one GPU: a GPT of 6M parameters, eight workers as processes that share it, equal tokens; validation loss and bytes.

The text is Python's own: the sources of the packages that are installed here, of which each run reads 98 MB and no byte twice, since on a
small text a larger batch overfits sooner. The peer is synchronous data parallelism: one process that takes the eight workers' batches at
once, with the numbers of DDP, and the bytes that eight DDP workers would send and receive (each its gradient and the mean of all, in
float32, at every step). The learning rate of both sides, and the outer rate and momentum of ours, are the best of a few after 30 rounds.
`make bench BENCH=gpu-diloco` begins afresh, `BENCH=gpu-diloco:on` goes on where an earlier one was cut off: what every run came to is kept
in results/gpu-diloco.json as soon as it ends. `nvidia-cuda-mps-control -d` lets processes share a GPU better. SHOAL_BENCH_ROUNDS sets
how many rounds of 30 steps there are.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from diloco import CHUNKS, PLAIN_MEAN, SPARSE, parameters_in
from run import Row

WORKERS, INNER, TUNING = 8, 30, 30
ROUNDS = int(os.environ.get("SHOAL_BENCH_ROUNDS", "100"))
BYTES = 130_000_000
KEPT = Path(__file__).parents[1] / "results" / "gpu-diloco.json"
WRITING = threading.Lock()
CONFIG = """\
dialect: shoal
model: {kind: gpt, hidden_size: 256, num_layers: 6, num_heads: 4, max_seq_len: 256, dropout: 0.0,
        positions: rotary, feed_forward: swiglu, norm: rms, bias: false}
data: {source: {kind: text, path: TEXT}, tokenizer: bytes, sequence_length: 256, loader: {drop_last: true}}
training:
  device: cuda
  precision: {kind: bf16}
  cuda_graph: true
  clipping: {max_norm: 1.0}
  optimizer: {name: AdamW, learning_rate: 0.001, beta2: 0.95, weight_decay: 0.1}
  schedule: {kind: cosine}
evaluation: {strategy: steps, batches: 200}
checkpoint: {strategy: never}
logging: {every_steps: 100}
"""
RATES = [[f"training.optimizer.learning_rate={rate}"] for rate in (0.0014, 0.0028, 0.0056)]
OUTER = [[f"strategy.outer.learning_rate={rate}", f"strategy.outer.momentum={momentum}"] for rate, momentum in ((0.7, 0.9), (0.8, 0.6))]
DILOCO = ["strategy.kind=diloco", f"strategy.inner_steps={INNER}", "training.batch_size=16"]
SYNCHRONOUS = [f"training.batch_size={16 * WORKERS}"]
WAYS: tuple[tuple[str, list[str], str], ...] = (
    ("H = 30", [], "≤ 1.05"),
    ("H = 30, Muon", ["training.optimizer.name=Muon", "training.optimizer.beta2=null"], "≤ 1.03"),
    ("H = 30, 4-bit", ["updates.codec.kind=int4"], "≤ 1.06"),
    ("H = 30, sparse 18 %", SPARSE, "≤ 1.06"),
    ("H = 30, 3 % in chunks", [*PLAIN_MEAN, *CHUNKS, "updates.codec.ratio=0.03"], "≤ 1.02"),
)


def text_in(folder: Path) -> Path:
    """The sources of installed packages in one file."""
    path, left = folder / "python.txt", BYTES
    with path.open("wb") as file:
        for source in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            written = source.read_bytes()[:left].decode("utf-8", "ignore").encode()
            left -= file.write(written)
            if left <= 0:
                break
    return path


class Outcome(NamedTuple):
    """What a run came to."""

    loss: float
    sent: int
    """Bytes, both ways."""
    parameters: int


def outcome(text: Path, settings: list[str], workers: int, rounds: int = ROUNDS) -> Outcome:
    """What a run comes to, or came to before this bench was cut off."""
    key = f"{workers} workers, {rounds} rounds: {' '.join(settings)}"
    known = kept()
    if key not in known:
        found = trained(text, settings, workers, rounds)
        with WRITING:
            KEPT.write_text(json.dumps(kept() | {key: found}, indent=1))
        return found
    return Outcome(*known[key])


def kept() -> dict[str, list[float]]:
    known: dict[str, list[float]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return known


def trained(text: Path, settings: list[str], workers: int, rounds: int) -> Outcome:
    """A whole run, as a user starts it."""
    started, steps = time.monotonic(), rounds * INNER
    common = [f"training.max_steps={steps}", f"training.schedule.warmup_steps={steps // 20}", f"evaluation.every_steps={steps}"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.replace("TEXT", str(text)))
        chosen = [word for setting in [*common, *settings] for word in ("--set", setting)]
        command = [sys.executable, "-m", "shoal", "train", str(config), "--run-dir", f"{folder}/run", *chosen]
        result = subprocess.run(
            [*command, *(["--workers", str(workers)] if workers > 1 else [])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode:
            raise SystemExit(f"the run failed:\n{result.stdout}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    size = parameters_in(result.stdout)
    loss, sent = summary["metrics"]["eval"]["loss"], summary.get("received_bytes", 0) + summary.get("sent_bytes", 0)
    print(f"  {loss:.4f}  {sent / 1e6:,.0f} MB  {time.monotonic() - started:.0f} s  {' '.join(settings)}", file=sys.stderr, flush=True)
    return Outcome(loss, sent, size)


def best(text: Path, candidates: list[list[str]], workers: int) -> list[str]:
    """The settings with the least loss after a few rounds. Runs of one process are taken side by side."""
    with ThreadPoolExecutor(len(candidates) if workers == 1 else 1) as pool:
        losses = list(pool.map(lambda settings: outcome(text, settings, workers, TUNING).loss, candidates))
    return candidates[losses.index(min(losses))]


def climbed(text: Path, candidates: list[list[str]], workers: int) -> list[str]:
    """The same for runs that take long: from the first of them on, as long as the loss falls."""
    last = math.inf
    for settings, before in zip(candidates, [None, *candidates], strict=False):
        loss = outcome(text, settings, workers, TUNING).loss
        if loss > last and before is not None:
            return before
        last = loss
    return candidates[-1]


def measure(part: str = "") -> Iterator[Row]:
    import torch

    if not torch.cuda.is_available():
        print("gpu-diloco: skipped, there is no GPU here")
        return
    KEPT.parent.mkdir(exist_ok=True)
    if not part:
        KEPT.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        text = text_in(Path(folder))
        peer = outcome(text, best(text, [SYNCHRONOUS + rate for rate in RATES], 1), 1)
        chosen = climbed(text, [DILOCO + rate + OUTER[1] for rate in RATES], WORKERS)
        chosen = best(text, [chosen, chosen + OUTER[0]], WORKERS)
        sent = ROUNDS * INNER * WORKERS * 2 * 4 * peer.parameters
        for name, settings, target in WAYS:
            ours = outcome(text, [*chosen, *settings], WORKERS)
            yield Row(f"gpu-diloco, {name}: loss", ours.loss, peer.loss, "nats/byte", ours.loss / peer.loss, target)
            yield Row(f"gpu-diloco, {name}: bytes", ours.sent, sent, "both ways", sent / ours.sent, "")
            yield Row(f"gpu-diloco, {name}: bytes a round", ours.sent, sent / INNER, "both ways", sent / INNER / ours.sent, "")
