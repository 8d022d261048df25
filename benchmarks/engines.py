"""Engines of two processes on this machine, over gloo.

Speed: `shoal train` with the engine ddp, after start-up (feed, engine, records), against PyTorch's DistributedDataParallel as a careful
person uses it: data as tensors in memory, gradients as views of the buckets, fused AdamW, clipping. Both in the same processes, in turn.

Memory: the most bytes in tensors that a process holds for each parameter after the backward passes of a step of two batches: weights,
gradients, optimizer state, and what an engine adds. The peer is the engine ddp, which holds 20: while it accumulates, gradients stand
beside the vector that they are sent in.

Experts: a mixture under fsdp whose ranks share the experts (engine.expert_parallel), against the same one that gathers all of them, step by
step in the same processes.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shoal.config.data_shapes import DataShapes
from shoal.config.load import ConfigFile, Override, resolve
from shoal.config.ranks import RankPlace, rank_environment
from shoal.engines import build, enter
from shoal.models import build as build_models
from shoal.runs.training.train_alone import prepare
from shoal.tasks.language import LanguageModelling

ROUNDS, STEPS, BATCH = 9, 10, 8
TARGETS = {1: "≥ 1.5", 16: "≥ 1.0"}
"""Speed of shared experts against gathered ones, by rows in a batch."""
MEMORY = {"deepspeed-1": "≤ 0.95", "deepspeed-2": "≤ 0.85", "deepspeed-3": "≤ 0.75", "fsdp": "≤ 0.75"}


def loaded(settings: dict[str, str], preset: str = "demo-gpt") -> Any:
    return resolve([ConfigFile(preset)], [Override(path, value, path) for path, value in settings.items()], environ={})


# --- in a rank -----------------------------------------------------------------------------------------


def speed(here: RankPlace, folder: str) -> list[list[float]]:
    """Samples/s of ours and of the peer, round by round."""
    quiet = {"evaluation.strategy": "never", "checkpoint.strategy": "never", "training.max_steps": "100000000"}
    quiet |= {"engine.kind": "ddp", "launch.devices_per_node": "2", "training.batch_size": str(BATCH), "training.device": "cpu"}
    loop = prepare(loaded(quiet), run_dir=os.path.join(folder, "run"), resume=False, reporters=[], here=here)
    loop.save = lambda: None  # type: ignore[method-assign]
    peer = Peer(here)

    def ours(steps: int) -> None:
        loop.engine.total_steps = loop.step + steps
        loop._steps()

    rates: list[list[float]] = [[], []]
    for turn in range(ROUNDS + 1):
        for side, work in enumerate((ours, peer.run)):
            dist.barrier()
            start = time.perf_counter()
            work(STEPS)
            dist.barrier()
            if turn:
                rates[side].append(STEPS * BATCH * here.size / (time.perf_counter() - start))
    return rates


class Peer:
    """DistributedDataParallel and a plain loop, over the model and data of the preset."""

    def __init__(self, here: RankPlace) -> None:
        from shoal.runs.build_run import assemble

        parts = assemble(loaded({"training.device": "cpu"}).run)
        model = parts.engine.task.players["model"]
        for parameter in model.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        self.model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
        samples = parts.data.train
        everything = samples.batch(range(len(samples)))  # type: ignore[union-attr, arg-type]
        self.inputs, self.labels = everything["input_ids"][here.rank :: here.size], everything["labels"][here.rank :: here.size]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            index = torch.randint(len(self.inputs), (BATCH,))
            self.optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(self.model(self.inputs[index]).flatten(0, 1), self.labels[index].flatten()).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()


def memory(here: RankPlace, engine: str) -> float:
    """Bytes in tensors for each parameter."""
    kind, _, stage = engine.partition("-")
    model = {"kind": "gpt", "hidden_size": "256", "num_layers": "8", "num_heads": "8", "max_seq_len": "32"}
    settings = {f"model.{name}": value for name, value in model.items()} | {"engine.kind": kind, "training.batch_size": "2"}
    settings["training.gradient_accumulation_steps"] = "2"
    if stage:  # buckets for racks are larger than this model
        small = ("allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters")
        settings |= {f"engine.{name}": "100000" for name in small} | {"engine.zero_stage": stage}
    run = loaded(settings | {"training.device": "cpu"}).run
    built = build(
        run, LanguageModelling(build_models(run, DataShapes(vocab_size=256))), torch.device("cpu"), 10, enter(here, torch.device("cpu"))
    )
    ids = torch.randint(256, (2, 33))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    held: list[int] = []
    backward = built._backward

    def look(value: torch.Tensor, player: str, last: bool) -> None:
        backward(value, player, last)
        held.append(_held())

    built.step([batch, batch])  # before it there is no optimizer state
    built._backward = look  # type: ignore[method-assign]
    built.step([batch, batch])
    return max(held) / built.size


def experts(here: RankPlace, rows: int) -> list[list[float]]:
    """Tokens/s of a mixture whose ranks share its experts, and of one that gathers them. `rows`: of 128 tokens, in a rank's batch."""
    world, device = enter(here, torch.device("cpu")), torch.device("cpu")
    model = {"kind": "moe", "hidden_size": "256", "num_layers": "2", "num_heads": "4", "max_seq_len": "128", "intermediate_size": "512"}
    settings = {f"model.{name}": value for name, value in model.items()} | {"model.experts.count": "16", "engine.kind": "fsdp"}
    built = []
    for sharing in ("2", "1"):
        run = loaded(settings | {"engine.expert_parallel": sharing, "training.batch_size": str(rows), "training.device": "cpu"}).run
        built.append(build(run, LanguageModelling(build_models(run, DataShapes(vocab_size=256))), device, 100, world))
    rates: list[list[float]] = [[], []]
    for turn in range(ROUNDS + 1):
        ids = torch.randint(256, (rows, 129))
        for side, engine in enumerate(built):
            dist.barrier()
            start = time.perf_counter()
            engine.step([{"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}])
            dist.barrier()
            if turn:
                rates[side].append(rows * 128 * here.size / (time.perf_counter() - start))
    return rates


def _held() -> int:
    """Bytes in the storages of all tensors that are alive."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects mind being looked at
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        tensors += [gradient for tensor in tensors if tensor.is_leaf and (gradient := tensor.grad) is not None]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local if not tensor.is_meta}
    return sum(storages.values())


# --- from outside ----------------------------------------------------------------------------------------


def both(role: str, **given: Any) -> list[Any]:
    """What two ranks found."""
    from processes import Helper

    with tempfile.TemporaryDirectory() as folder:
        helpers = [Helper(__file__, role, threads=1, rank=rank, meeting=f"{folder}/meeting", **given) for rank in range(2)]
        try:
            return [helper.hear() for helper in helpers]
        finally:
            for helper in helpers:
                helper.close()


def measure() -> list[Any]:
    from run import Row

    with tempfile.TemporaryDirectory() as folder:
        ours, peer = both("speed", folder=folder)[0]
    ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
    rows = [Row("ddp, small GPT, 2 processes", statistics.median(ours), statistics.median(peer), "samples/s", ratio, "≥ 0.98", "bare DDP")]
    whole = max(both("memory", engine="ddp"))
    for engine, target in MEMORY.items():
        found = max(both("memory", engine=engine))
        rows.append(Row(f"memory of a rank, {engine}", found, whole, "bytes/parameter", found / whole, target, "ddp"))
    for batch in (1, 16):
        ours, peer = both("experts", rows=batch)[0]
        ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
        name = f"mixture, 2 processes share 16 experts, {128 * batch} tokens each"
        rows.append(Row(name, statistics.median(ours), statistics.median(peer), "tokens/s", ratio, TARGETS[batch], "fsdp"))
    return rows


if __name__ == "__main__":
    role, given = sys.argv[1], json.loads(sys.argv[2])
    place = RankPlace(given.pop("rank"), 2, 0, 2, file=given.pop("meeting"))
    os.environ.update(rank_environment(place))  # DeepSpeed looks there
    found = globals()[role](place, **given)
    print(json.dumps(found), flush=True)
    os._exit(0)  # nobody waits for anybody any more
