"""Bytes on the wire, as the coordinator's transport counts them, for a whole run with each codec against the same run with none.

A real run: two worker processes, syncps, the MLP of overhead.py on MNIST (118,794 parameters), a fixed number of steps. Everything counts:
headers, joining, heartbeats, the first pull. Up is what workers send; both ways adds the weights that come back, as differences where a
codec is on. After topk those are sparse only if the optimizer leaves a weight alone whose gradient is zero: SGD does, AdamW does not.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import processes
from run import Row

STEPS = 200
TOPK = {"updates.codec.kind": "topk", "updates.codec.ratio": "0.01"}
SGD = {"training.optimizer.name": "SGD", "training.optimizer.learning_rate": "0.1"}
CODECS = {
    "none": {"updates.codec.kind": "none"},
    "fp16": {"updates.codec.kind": "fp16"},
    "int8": {"updates.codec.kind": "int8"},
    "topk 1 %": TOPK,
    "topk 1 %, SGD": TOPK | SGD,
}
TARGETS = {"fp16": "≥ 1.99", "int8": "≥ 3.9", "topk 1 %": "≥ 60", "topk 1 %, SGD": "≥ 60"}


def measure() -> list[Row]:
    if not processes.MNIST.is_dir():
        print("wire: skipped, ../shared/data/mnist is not here", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: _run(Path(folder) / f"{number}", codec) for number, (name, codec) in enumerate(CODECS.items())}
    return [row for name in TARGETS for row in _rows(name, runs["none"], runs[name])]


def _run(run_dir: Path, codec: dict[str, str]) -> dict[str, Any]:
    settings = processes.QUIET | processes.MLP | {"training.max_steps": str(STEPS), "strategy.kind": "syncps"} | codec
    return processes.whole(run_dir, processes.command(run_dir, settings, workers=2), threads=1)


def _rows(name: str, none: dict[str, Any], coded: dict[str, Any]) -> list[Row]:
    up, plain_up = coded["received_bytes"], none["received_bytes"]
    both, plain_both = up + coded["sent_bytes"], plain_up + none["sent_bytes"]
    loss, plain_loss = (run["metrics"]["train"]["loss"] for run in (coded, none))
    note = f"loss after {STEPS} steps {loss:.3f}, without a codec {plain_loss:.3f}"
    return [
        Row(f"wire, {name}, up", up / 1e6, plain_up / 1e6, "MB", plain_up / up, TARGETS[name], note),
        Row(f"wire, {name}, both ways", both / 1e6, plain_both / 1e6, "MB", plain_both / both, "told"),
    ]
