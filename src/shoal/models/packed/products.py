"""Products with packed matrices. For each shape the fastest of those that compute right on this machine is chosen by measurement.

fp16 and bf16 round the inputs and the outputs of a product to half precision. int8 and int4 compute with integers, which no order of sums
changes, where `compiled.py` finds a C compiler: each row of the input is rounded to 16 bits. Without one torch computes int8 in the same
way, with two rows of 8 bits, and int4 with inputs and outputs rounded to bf16. Other machines unpack a block of rows at a time.

Holds: a row's result does not depend on the other rows, up to the order of sums in float32.

Shapes: M rows of the input, N outputs, D inputs, X bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.packed.compiled import arranged_int4, can_multiply, multiply_compiled
from shoal.models.packed.formats import GROUP, HALF, PackedShape, codes_and_scales, packed, unpacked

_ROWS, _TIMES = (1, 8), 3
"""Rows of the inputs that ways are measured with, and how often."""
_MOST_MEASURED = 1 << 21
"""Numbers of the part of a matrix that is measured."""
_TOLERANCE = 0.02
"""Most by which a way may differ from the unpacked product, of its largest output; more is a wrong result and no rounding."""
_LOW = 254
"""Second eight bits of an input: in units of 1 / 254 of those of the first."""
_MOST_COMPILED = 8
"""Rows up to which products in int8 by `products.c` are faster than torch's."""
_KERNEL_ROWS, _BLOCK = 16, 64
"""torch's product in 4 bits takes multiples of 16 outputs, and stores them in blocks of at most 64."""


class ProductWay(NamedTuple):
    """A way to compute a product."""

    arranged: Callable[[Tensor, PackedShape], Tensor]
    """The packed bytes in the order in which this way reads them; as many bytes."""
    multiply: Callable[[Tensor, Tensor, PackedShape], Tensor]
    """The product of an input [M, D] with arranged bytes [X], transposed: [M, N]."""


def _as_packed(raw_X: Tensor, shape: PackedShape) -> Tensor:
    return raw_X


def _multiply_unpacked(x_MD: Tensor, raw_X: Tensor, shape: PackedShape) -> Tensor:
    rounding = HALF.get(shape.kind, torch.bfloat16 if shape.kind == "int4" else x_MD.dtype)
    compute = torch.float32 if x_MD.device.type == "cpu" else rounding
    x_MD = x_MD.to(rounding).to(compute)
    return torch.cat([F.linear(x_MD, block_ND.to(compute)) for block_ND in unpacked(raw_X, shape)], -1).to(rounding)


def _multiply_half(x_MD: Tensor, raw_X: Tensor, shape: PackedShape) -> Tensor:
    return F.linear(x_MD.to(HALF[shape.kind]), codes_and_scales(raw_X, shape)[0])


def _multiply_integers(x_MD: Tensor, raw_X: Tensor, shape: PackedShape) -> Tensor:
    """The input as 127 · 254 steps of a scale per row: high and low eight bits are rows of one product of integers."""
    (codes_ND, scales_N1), x_MD = codes_and_scales(raw_X, shape), x_MD.float()
    assert scales_N1 is not None
    scale_M1 = torch.linalg.vector_norm(x_MD, torch.inf, -1, keepdim=True).clamp_min_(1e-30).div_(127)
    steps_MD = x_MD / scale_M1
    high_MD = steps_MD.round()
    both_2MD = torch.cat([high_MD, steps_MD.sub_(high_MD).mul_(_LOW).round_()]).to(torch.int8)
    high_MN, low_MN = torch._int_mm(both_2MD, codes_ND.t()).float().chunk(2)
    return high_MN.add_(low_MN, alpha=1 / _LOW).mul_(scale_M1).mul_(scales_N1.t())


def _arranged_int4(raw_X: Tensor, shape: PackedShape) -> Tensor:
    """The codes in the order of torch's kernel; the scales stay."""
    codes, _ = codes_and_scales(raw_X, shape)
    made_X, at = raw_X.clone(), 0
    step = _BLOCK * max(1, _MOST_MEASURED // (_BLOCK * shape.columns))
    for start in range(0, shape.rows, step):
        part = codes[start : start + step]
        numbers = torch.stack([part & 15, part >> 4], dim=-1).flatten(1).to(torch.int32)
        kernel = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1).flatten()
        made_X[at : at + len(kernel)] = kernel
        at += len(kernel)
    return made_X


def _multiply_int4(x_MD: Tensor, raw_X: Tensor, shape: PackedShape) -> Tensor:
    codes, scales = codes_and_scales(raw_X, shape)
    product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_MD.to(torch.bfloat16), codes, GROUP, scales)
    return product


def _multiply_int8(x_MD: Tensor, raw_X: Tensor, shape: PackedShape) -> Tensor:
    return (multiply_compiled if len(x_MD) <= _MOST_COMPILED else _multiply_integers)(x_MD, raw_X, shape)


UNPACKED = ProductWay(_as_packed, _multiply_unpacked)
_HALF = ProductWay(_as_packed, _multiply_half)
_INTEGERS = ProductWay(_as_packed, _multiply_integers)
_INT4 = ProductWay(_arranged_int4, _multiply_int4)
_COMPILED_INT8 = ProductWay(_as_packed, _multiply_int8)
_COMPILED_INT4 = ProductWay(arranged_int4, multiply_compiled)


def way_for(shape: PackedShape, device: torch.device) -> ProductWay:
    """The fastest way for a shape on a device."""
    if device.type != "cpu":
        return _HALF if shape.kind in HALF else UNPACKED
    return _fastest(shape, torch.get_num_threads())


def is_compiled(shape: PackedShape, device: torch.device) -> bool:
    """Whether the way for a shape computes by the library of `compiled.py`."""
    return way_for(shape, device) in (_COMPILED_INT8, _COMPILED_INT4)


@cache
def _fastest(shape: PackedShape, threads: int) -> ProductWay:
    """`threads`: another number of threads is measured anew."""
    ways = _ways(shape)
    part = shape._replace(rows=min(shape.rows, max(_BLOCK, _MOST_MEASURED // shape.columns // _BLOCK * _BLOCK)))
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        raw_X = packed(torch.randn(part.rows, part.columns), shape.kind)
        inputs = [torch.randn(rows, shape.columns) for rows in _ROWS]
        right = [way for way in ways if _is_right(way, inputs[-1], raw_X, part)]
        return min([*right, UNPACKED], key=lambda way: _seconds(way, inputs, raw_X, part)) if right else UNPACKED


def _ways(shape: PackedShape) -> list[ProductWay]:
    """Ways that may be faster than to unpack the matrix."""
    if shape.kind in HALF:
        return [_HALF]
    if shape.kind == "int8":
        return [_INTEGERS, _COMPILED_INT8]
    return [*([_INT4] if shape.rows % _KERNEL_ROWS == 0 else []), *([_COMPILED_INT4] if can_multiply(shape) else [])]


def _is_right(way: ProductWay, x_MD: Tensor, raw_X: Tensor, shape: PackedShape) -> bool:
    """Whether a way computes the product here. Processors without the instructions for it saturate sums, or have no kernel."""
    wanted_MN = _multiply_unpacked(x_MD, raw_X, shape).float()
    try:
        found_MN = way.multiply(x_MD, way.arranged(raw_X, shape), shape).float()
    except (RuntimeError, NotImplementedError):
        return False
    return bool((found_MN - wanted_MN).abs().max() <= _TOLERANCE * wanted_MN.abs().max())


def _seconds(way: ProductWay, inputs: list[Tensor], raw_X: Tensor, shape: PackedShape) -> float:
    """The least processor time of this thread, since other processes may be running."""
    arranged_X, taken = way.arranged(raw_X, shape), []
    for _ in range(_TIMES):
        start = time.thread_time()
        for x_MD in inputs:
            way.multiply(x_MD, arranged_X, shape)
        taken.append(time.thread_time() - start)
    return min(taken)
