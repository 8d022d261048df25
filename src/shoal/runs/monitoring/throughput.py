"""How fast a run learns: samples and tokens a second, model FLOP utilisation, memory, and seconds of each phase of a step."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from shoal.config import Run
from shoal.engines import Engine, StepResult
from shoal.engines.pipeline.split import numbers_used
from shoal.runs.folder.run_reader import SECONDS

_PASSES, _WEIGHT_GRADIENT = 4, 2
"""Operations per weight and token: two forward, two for the gradient of the input, and two more for the gradient of a trained weight."""
_ATTENTION = 12
"""Operations of attention per layer, width, position and token, as the authors of PaLM count them."""
_PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "Tesla T4": 65.0,
}
"""TFLOP/s of dense products in 16 bits, by a part of the GPU's name, from the makers' data sheets; the first that fits counts."""
_HALF = ("bf16", "fp16")
_STOPS = ("evaluation", "checkpoint")
"""Phases in which nothing is learned: rates leave them out."""


_REPORTED = {"data": "data_s", "forward_backward": "forward_backward_s", "communication": "communication_s", "optimizer": "optimizer_s"} | {
    "sending": "sending_s",
    "waiting": "idle_s",
}
"""Phases of a worker, and the figures of its heartbeats that say how long they took so far."""


class WorkerReports:
    """What the workers of a run report of their speed, added up for the run's records."""

    def __init__(self, figures: Callable[[], Mapping[str, Mapping[str, Any]]], threads: bool) -> None:
        """`figures`: those of the last heartbeat of each worker, by name. `threads`: whether they are threads of this process."""
        self._figures, self._threads = figures, threads
        self._began, self._before = time.monotonic(), dict[str, dict[str, float]]()

    def take_seconds(self) -> dict[str, float]:
        """Seconds of each phase since the last call, of all workers together. A worker that joins again counts from 0."""
        now, most = {name: _numbers(figures) for name, figures in self._figures().items()}, time.monotonic() - self._began
        sums: dict[str, float] = {}
        for name, figures in now.items():
            before = self._before.get(name, {})
            for phase, key in _REPORTED.items():
                if key in figures:
                    gained = figures[key] - before.get(key, 0.0)
                    sums[phase] = sums.get(phase, 0.0) + min(most, gained if gained >= 0 else figures[key])
        self._before = now
        return sums

    @property
    def memory_bytes(self) -> int:
        """The peak memory of all workers together, without what they share with this process."""
        return 0 if self._threads else int(sum(_numbers(figures).get("memory_bytes", 0.0) for figures in self._figures().values()))

    @property
    def peak(self) -> float | None:
        """Operations a second that the devices of all workers could do; None: some worker does not know."""
        peaks = [_numbers(figures).get("peak_tflops") for figures in self._figures().values()]
        known = [peak for peak in peaks if peak]
        return 1e12 * sum(known) if known and len(known) == len(peaks) else None


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if isinstance(value, int | float) and 0 <= value < math.inf}


class Throughput:
    """Counts what a run learns from, between its records."""

    def __init__(self, run: Run, engine: Engine) -> None:
        self.run, self.engine = run, engine
        self.workers: WorkerReports | None = None
        """Those of a run with workers."""
        self.restart()

    def restart(self) -> None:
        """Measure from now on."""
        self._since, self._samples, self._weight, self._steps = time.monotonic(), 0, 0, 0

    def count(self, result: StepResult) -> None:
        self._samples += result.samples
        self._weight += result.weight
        self._steps += 1

    def take(self) -> dict[str, float]:
        """The figures since the last call; those that are not known are left out."""
        seconds = self.engine.phases.take()
        if self.workers is not None:
            seconds |= self.workers.take_seconds()
        whole = time.monotonic() - self._since - sum(seconds.get(name, 0.0) for name in _STOPS)
        figures = {"samples_per_s": round(self._samples / whole, 2) if whole > 0 else 0.0}
        if self.engine.task.counts_tokens and whole > 0:
            rate = self._weight / whole
            figures["tokens_per_s"] = round(rate, 2)
            peak = peak_operations(self.run, self.engine) if self.workers is None else self.workers.peak
            if peak and (operations := self._operations):
                figures["mfu"] = round(rate * operations / peak, 4)
        if (memory := peak_memory(self.engine.device)) is not None:
            figures["memory_bytes"] = memory + (0 if self.workers is None else self.workers.memory_bytes)
        figures |= {f"{SECONDS}{name}": round(value / max(1, self._steps), 6) for name, value in seconds.items()}
        self.restart()
        return figures

    @cached_property
    def _operations(self) -> float:
        return _operations_of(self.run, self.engine)


class WorkerSpeed:
    """A worker's own speed, for its heartbeats."""

    def __init__(self, run: Run, engine: Engine) -> None:
        """`engine`: of one process of the worker."""
        self.engine, peak = engine, peak_operations(run, engine)
        self._peak = peak or 0.0
        self._operations = _operations_of(run, engine) if engine.task.counts_tokens else 0.0

    def figures(self, weight_per_s: float) -> dict[str, float]:
        """`weight_per_s`: what counts of the accepted contributions, in a second."""
        found = {"peak_tflops": self._peak / 1e12} if self._peak else {}
        if (memory := peak_memory(self.engine.device)) is not None:
            found["memory_bytes"] = memory
        if self.engine.task.counts_tokens:
            found["tokens_per_s"] = weight_per_s
            if self._peak and self._operations:
                found["mfu"] = weight_per_s * self._operations / self._peak
        return found


def peak_operations(run: Run, engine: Engine) -> float | None:
    """Operations a second that the devices of an engine's processes could do; None: unknown."""
    each = run.logging.peak_tflops
    if each is None and engine.device.type == "cuda" and run.training.precision.kind in _HALF:
        name = torch.cuda.get_device_name(engine.device)
        each = next((peak for part, peak in _PEAKS.items() if part in name), None)
    return None if each is None else 1e12 * each * engine.worker_world.size


def _operations_of(run: Run, engine: Engine) -> float:
    """Operations that a token takes in theory, forward and backward, whatever is computed twice; 0: unknown."""
    model: Any = engine.task.players["model"]
    whole = sum(one.numel() for one in model.parameters() if one.requires_grad) == engine.size
    return operations_per_token(run, model) if whole else 0.0  # else an engine has cut the model


def operations_per_token(run: Run, model: Any) -> float:
    """Operations of a token's forward and backward pass through a model. Embeddings count only where they are the output matrix."""
    products = sum((_PASSES + _WEIGHT_GRADIENT * weight.requires_grad) * used for weight, used in numbers_used(model))
    tables = {id(one.weight): one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding) and one.weight is not None}
    for weight in _output_weights(model):
        tables.pop(id(weight), None)
    products -= sum((_PASSES + _WEIGHT_GRADIENT * weight.requires_grad) * weight.numel() for weight in tables.values())
    layers, width = _shape(run, model)
    return products + _ATTENTION * layers * width * (run.data.sequence_length or 0)


def _output_weights(model: Any) -> list[Any]:
    """The output matrix, as the modules that may hold it store it."""
    inner = getattr(getattr(model, "inner", None), "get_output_embeddings", lambda: None)()
    tied = model.token_embedding if getattr(model, "output", model) is None else None
    stored = [getattr(one, name, None) for one in (inner, tied) for name in ("codes", "weight")]
    return [getattr(model, "output_weight", None), *stored]


def _shape(run: Run, model: Any) -> tuple[int, int]:
    """Layers with attention, and the width of their heads together; zeros for other models."""
    config = getattr(getattr(model, "inner", None), "config", None)
    if config is not None:
        heads = getattr(config, "num_attention_heads", 0)
        return getattr(config, "num_hidden_layers", 0), heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
    if getattr(model, "conversion", None) is not None:  # Shoal's layers of a Hugging Face shape
        attention = model.blocks[0].attention
        return len(model.blocks), attention.query_heads * attention.head_size
    attends = hasattr(run.model, "num_heads")
    return (run.model.num_layers, run.model.hidden_size) if attends else (0, 0)  # type: ignore[attr-defined]


def peak_memory(device: torch.device) -> int | None:
    """Peak memory of this process in bytes: on the GPU if it uses one, else in main memory (None on Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
