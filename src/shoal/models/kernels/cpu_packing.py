"""Prepacked weight matrices for faster decoding on a CPU, kept beside the originals.

A product with 2 to 32 rows, as in batched decoding, spends much of its time on repacking the matrix: on a Neoverse-N1 [8 × 576] ·
[576 × 1536] takes 0.74 ms, and 0.50 ms with a prepacked matrix; with 2 rows 0.50 and 0.25.

Shapes: N outputs, D inputs, V vocabulary, W the same or a few more.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SMALLEST = 100_000
"""Least number of elements for which a packed copy is worth it."""
_ROWS, _TIMES, _WORTH = 8, 8, 0.9
_SHARE_OF_ROOM = 0.5
_MOST_ROWS = 64
_MOST_NUMBERS = 1 << 27
"""Most elements, over all matrices, that are packed during sampling: half a GiB in float32."""


class PackedProduct:
    """A product with a matrix that is kept plain and packed. It has no gradient."""

    def __init__(self, weight_ND: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_ND, self.bias_N = weight_ND, bias_N
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_ND.detach().contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() == self.weight_ND.shape[1]:
            return F.linear(x, self.weight_ND, self.bias_N)
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._packed, self.bias_N, "none", [], "")


@torch.inference_mode()
def pack_matrices(model: nn.Module, room_bytes: float) -> int:
    """Pack those matrices that it makes faster here, if the copies take less than half of the free memory. Returns their
    bytes."""
    output: Any = getattr(model, "output_weight", None) if hasattr(model, "packed_output") else None  # a stage has no output matrix
    linear = [module for module in model.modules() if type(module) is nn.Linear and module.weight is not output]
    weights = [*(module.weight for module in linear), *([output] if output is not None else [])]
    quicker = {shape: _is_quicker(weight) for shape, weight in {weight.shape: weight for weight in weights if _can(weight)}.items()}
    chosen = [weight for weight in weights if _can(weight) and quicker[weight.shape]]
    size = sum(weight.nbytes for weight in chosen)
    if size > _SHARE_OF_ROOM * room_bytes:
        return 0
    ids = set(map(id, chosen))
    for module in linear:
        if id(module.weight) in ids:
            module.forward = PackedProduct(module.weight, module.bias)  # type: ignore[method-assign, assignment]
    if id(output) in ids:
        model.packed_output = PackedProduct(output)  # type: ignore[assignment]
    return size


@contextmanager
def packed_for(model: nn.Module, rows: int) -> Iterator[None]:
    """Context: pack a model's matrices while `rows` answers are sampled. The weights must not change meanwhile. Which matrices are packed
    is not measured, since a resumed run must give the same answers; so only processors where packing is known to be faster do it."""
    output: Any = model.output_weight if hasattr(model, "packed_output") else None
    if output is not None and output.is_cuda and len(output) % 8 and type(output.data) is Tensor:
        with _widened(model, output):
            yield
        return
    if platform.machine() != "aarch64" or not 1 < rows <= _MOST_ROWS or torch.is_autocast_enabled("cpu"):
        yield
        return
    linear = [module for module in model.modules() if type(module) is nn.Linear and module.weight is not output and _can(module.weight)]
    if sum(module.weight.numel() for module in linear) + (0 if output is None else output.numel()) > _MOST_NUMBERS:
        yield
        return
    try:
        for module in linear:
            module.forward = PackedProduct(module.weight, module.bias)  # type: ignore[method-assign, assignment]
        if output is not None and _can(output):
            model.packed_output = PackedProduct(output)  # type: ignore[assignment]
        yield
    finally:
        for module in linear:
            module.__dict__.pop("forward", None)
        if output is not None:
            model.packed_output = None  # type: ignore[assignment]


@contextmanager
def _widened(model: Any, output_VD: Tensor) -> Iterator[None]:
    """Pad the output matrix: GPUs take five times as long if its rows are not a multiple of 8, such as GPT-2's 50,257."""
    wide_WD = F.pad(output_VD.detach(), (0, 0, 0, -len(output_VD) % 8))
    if torch.is_autocast_enabled("cuda"):
        wide_WD = wide_WD.to(torch.get_autocast_dtype("cuda"))
    try:
        model.packed_output = lambda x: F.linear(x, wide_WD)[..., : len(output_VD)]
        yield
    finally:
        model.packed_output = None


def _can(weight: Tensor) -> bool:
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and type(weight.data) is Tensor  # not sharded
    return is_plain and weight.numel() >= _SMALLEST and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _is_quicker(weight_ND: Tensor) -> bool:
    """Time both products alternately; the shortest CPU time of this thread counts, since other processes may be running."""
    x_RD, packed = torch.ones(_ROWS, weight_ND.shape[1]), PackedProduct(weight_ND)
    taken = [(_seconds(lambda: packed(x_RD)), _seconds(lambda: F.linear(x_RD, weight_ND))) for _ in range(_TIMES)]
    return min(ours for ours, _ in taken) < _WORTH * min(plain for _, plain in taken)


def _seconds(work: Callable[[], Any]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start
