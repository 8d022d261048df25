"""A pipeline of two processes with a thread each, against one process with one thread that accumulates the same micro-batches.

Both sides are `shoal train` after start-up (feed, engine, records), over the preset demo-gpt, a little wider. With M micro-batches and two
stages the best ratio is 2 M / (M + 1).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
from engines import loaded
from run import Row

from shoal.config.ranks import RankPlace, rank_environment, rank_place
from shoal.runs.training.train_alone import prepare

ROUNDS, STEPS, BATCH, PARTS = 5, 2, 32, 8
QUIET = {"evaluation.strategy": "never", "checkpoint.strategy": "never", "training.max_steps": "100000000", "training.device": "cpu"}
WIDER = {"model.hidden_size": "256", "model.num_layers": "6"}
SIDES = {
    "pipeline": {"engine.kind": "pipeline", "engine.micro_batches": str(PARTS), "training.batch_size": str(BATCH)},
    "single": {"engine.kind": "single", "training.batch_size": str(BATCH // PARTS), "training.gradient_accumulation_steps": str(PARTS)},
}


def speed(folder: str, side: str, here: RankPlace | None) -> list[float]:
    """Samples/s, round by round."""
    torch.set_num_threads(1)
    loop = prepare(loaded(QUIET | WIDER | SIDES[side]), run_dir=os.path.join(folder, side), resume=False, reporters=[], here=here)
    loop.save = lambda: None  # type: ignore[method-assign]
    rates = []
    for turn in range(ROUNDS + 1):
        start = time.perf_counter()
        loop.engine.total_steps = loop.step + STEPS
        loop._steps()
        if turn:
            rates.append(STEPS * BATCH / (time.perf_counter() - start))
    loop.engine.world.close()
    return rates


def started(folder: str, side: str, count: int) -> list[float]:
    """The rates of one side, in processes of their own."""
    processes = []
    for rank in range(count):
        place_of = rank_environment(RankPlace(rank, count, rank, count, file=f"{folder}/meeting")) if count > 1 else {}
        environ = os.environ | place_of | {"OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen([sys.executable, __file__, folder, side], env=environ, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    found: list[float] = json.loads(outputs[0].splitlines()[-1])
    return found


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        peer, ours = (statistics.median(started(folder, side, count)) for side, count in (("single", 1), ("pipeline", 2)))
    yield Row("pipeline, 2 stages × 1 thread", ours, peer, "samples/s", ours / peer, "≥ 1.4", f"of {2 * PARTS / (PARTS + 1):.2f} at best")


if __name__ == "__main__":
    print(json.dumps(speed(sys.argv[1], sys.argv[2], rank_place())), flush=True)
