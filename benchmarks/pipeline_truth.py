"""Does a simulation foretell a pipeline? Real processes over gloo, and the simulation of the same settings from what a step takes alone
with the same micro-batches.

`BENCH=pipeline-truth` lets every layer sleep for a known time in place of its computing, so that other programs on the machine count for
little: it judges schedule, links and agreement. `BENCH=pipeline-truth:computing` lets the layers compute, for a machine with nothing else
to do.
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
from typing import Any, NamedTuple

import torch
from engines import loaded
from run import Row

from shoal.config.ranks import RankPlace, rank_environment, rank_place
from shoal.models.partial_model import PartialModel, layers_in
from shoal.models.split_model import layer_count, make_stage
from shoal.runs.training.train_alone import prepare
from shoal.simulate.pipeline_simulation import pipelined
from shoal.simulate.simulation import SimulationOptions

STEPS, BATCH, LAYERS, LAYER_S = 3, 8, 8, 0.3
QUIET = {"evaluation.strategy": "never", "checkpoint.strategy": "never", "training.max_steps": "100000000", "training.device": "cpu"}
MODEL = {"model.num_layers": str(LAYERS), "training.batch_size": str(BATCH)}
WIDTH = {"sleeping": {"model.hidden_size": "32", "model.num_heads": "2"}, "computing": {"model.hidden_size": "256"}}


class Case(NamedTuple):
    """A pipeline."""

    shares: tuple[float, ...]
    micro_batches: int
    schedule: str = "1f1b"

    def settings(self) -> dict[str, str]:
        tasks = ", ".join(f"{{id: s{number}, model_share: {share}}}" for number, share in enumerate(self.shares))
        engine = {"engine.micro_batches": str(self.micro_batches), "engine.schedule": self.schedule}
        return {"engine.kind": "pipeline", "scheduler.tasks": f"[{tasks}]"} | engine

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.0%}" for share in self.shares)
        return f"{shares}, {self.micro_batches} micro-batches, {self.schedule}"


CASES = [Case((0.5, 0.5), 4), Case((0.5, 0.5), 8), Case((0.3, 0.7), 8), Case((0.7, 0.3), 4, "gpipe"), Case((0.25, 0.25, 0.5), 8)]


def asleep(model: Any) -> None:
    """Let layers sleep before they compute: forward for a time, backward for twice as long, for each sample."""
    stage = model.stage if isinstance(model, PartialModel) else make_stage(model, 0, layer_count(model))
    for layer in layers_in(stage).values():
        layer.register_forward_pre_hook(lambda module, given: time.sleep(LAYER_S * len(given[0]) / BATCH))
        layer.register_full_backward_pre_hook(lambda module, slopes: time.sleep(2 * LAYER_S * len(slopes[0]) / BATCH))


def step_s(folder: str, settings: dict[str, str], way: str, here: RankPlace | None) -> float:
    """What a step takes, after a first one."""
    torch.set_num_threads(1)
    loop = prepare(loaded(settings), run_dir=folder, resume=False, reporters=[], here=here)
    loop.save = lambda: None  # type: ignore[method-assign]
    if way == "sleeping":
        asleep(loop.engine.task.players["model"])
    found = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        loop.engine.total_steps = loop.step + 1
        loop._steps()
        found.append(time.perf_counter() - start)
    loop.engine.world.close()
    return statistics.median(found[1:])


def started(settings: dict[str, str], way: str, count: int) -> float:
    """What a step takes, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(count):
            here = rank_environment(RankPlace(rank, count, rank, count, file=f"{folder}/meeting")) if count > 1 else {}
            command = [sys.executable, __file__, f"{folder}/run", json.dumps(settings), way]
            environ = os.environ | here | {"OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        first, *_ = [process.communicate()[0] for process in processes]
        return float(first.splitlines()[-1])


def measure(way: str = "sleeping") -> Iterator[Row]:
    common = QUIET | MODEL | WIDTH[way]
    alone = {parts: started(common | _in_parts(parts), way, 1) for parts in {case.micro_batches for case in CASES}}
    for case in CASES:
        settings, alone_s = common | case.settings(), alone[case.micro_batches]
        foretold = pipelined(loaded(settings).run, SimulationOptions(step_s=alone_s)).step.seconds
        real = started(settings, way, len(case.shares))
        yield Row(f"pipeline-truth, {case}", foretold, real, "s a step", foretold / real, "1 ± 0.1", f"{alone_s:.3g} s alone")


def _in_parts(parts: int) -> dict[str, str]:
    """The same batch in so many pieces."""
    return {"training.batch_size": str(BATCH // parts), "training.gradient_accumulation_steps": str(parts)}


if __name__ == "__main__":
    print(step_s(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], rank_place()), flush=True)
