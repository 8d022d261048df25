"""What real products in fp8 are made of, with plain torch in the place of the GPU's kernels: against emulation, and against exact ones."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.config.load import resolve_data
from shoal.config.schema.training import Fp8
from shoal.engines.precision import emulation, fp8
from shoal.engines.precision.fp8 import LARGEST, ScaleHistory, codes_of
from shoal.errors import ShoalError
from shoal.runs.coordinator_setup import _warn_of_gaps, agree
from shoal.runs.live_objects import NO_LIVE_OBJECTS

CPU = torch.device("cpu")
SIZES = [40, 12, 44]


def rows(x: Tensor, factors: Tensor | None, owners: Tensor | None, head_room: float) -> tuple[Tensor, Tensor]:
    wide = x.float() if factors is None else x.float() * (factors if owners is None else factors[owners])
    scales = wide.abs().amax(1) * head_room / LARGEST
    return codes_of(wide, scales), scales


def weight(x: Tensor, kept: Tensor | None, renews: Tensor | None, head_room: float) -> tuple[Tensor, Tensor, Tensor]:
    scales = x.float().abs().amax(-1) * head_room / LARGEST
    if kept is not None and renews is not None:
        scales = torch.where((renews != 0) | (kept == 0), scales, kept)
    codes = codes_of(x.float().flatten(0, -2), scales.flatten()).view(x.shape)
    return codes, codes.transpose(-2, -1).contiguous(), scales


def product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor | None, ends: Tensor | None) -> Tensor:
    x, matrices = codes.float() * scales[:, None], weight.float() * (1.0 if weight_scales is None else weight_scales[..., None])
    if ends is None:
        return (x @ matrices.T).bfloat16()
    parts = torch.split(x, torch.diff(ends, prepend=torch.zeros(1)).long().tolist())
    return torch.cat([F.linear(own, matrix) for own, matrix in zip(parts, matrices, strict=True)]).bfloat16()


def swiglu(inner: Tensor, gates: Tensor, total: Tensor, head_room: float) -> tuple[Tensor, Tensor, Tensor]:
    gate, content = inner.float().chunk(2, -1)
    found = F.silu(gate) * content * gates[:, None]
    return found.bfloat16(), *rows(found, None, None, head_room)


def swiglu_backward(
    inner: Tensor, gates: Tensor, total: Tensor, slope: Tensor, factors: Tensor, owners: Tensor, head_room: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        own, weights = inner.float().requires_grad_(), gates.clone().requires_grad_()
        gate, content = own.chunk(2, -1)
        for_inner, for_gates = torch.autograd.grad(F.silu(gate) * content * weights[:, None], (own, weights), slope.float())
    return for_inner.bfloat16(), for_gates, *rows(for_inner, factors, owners, head_room)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made: Any = ModuleType("fp8_kernels")
    made.rows, made.weight, made.product, made.swiglu, made.swiglu_backward = rows, weight, product, swiglu, swiglu_backward
    monkeypatch.setitem(sys.modules, "shoal.engines.precision.fp8_kernels", made)
    monkeypatch.setattr("shoal.engines.precision.fp8_kernels", made, raising=False)
    fp8.check_kernels.cache_clear()
    return made


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("sizes", [None, SIZES])
def test_real_products_are_those_of_the_emulation(sizes: list[int] | None, interval: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(64, 32) if sizes is None else torch.randn(3, 64, 32) * torch.rand(3, 64, 1)
    x, matrix, slope = torch.randn(96, 32).bfloat16(), matrix.bfloat16(), torch.randn(96, 64).bfloat16()
    found = []
    for real in (True, False):
        scales = ScaleHistory(Fp8(margin=1, interval=interval), CPU)
        scales.keep("one", matrix)
        own, weights = x.clone().requires_grad_(), matrix.clone().requires_grad_()
        if sizes is None:
            y = fp8.product(scales, "one", own, weights, None) if real else emulation.rounded_product(own, weights, scales, "one")
        else:
            made = fp8.grouped(scales, "one", weights) if real else emulation.grouped(scales, "one", weights)
            y = made(own, weights, torch.tensor(sizes), None)
        found.append([y.detach(), *torch.autograd.grad(y, (own, weights), slope), *scales.kept.values()])
    for one, other in zip(*found, strict=True):
        assert float((one.float() - other.float()).norm()) < 0.01 * float(other.float().norm())


def test_right_kernels_are_taken_and_those_that_mix_bytes_up_are_refused(kernels: Any) -> None:
    fp8.check_kernels(CPU)
    fp8.check_kernels.cache_clear()
    kernels.weight = lambda *given: (weight(*given)[0], weight(*given)[1].float().roll(1, -1), weight(*given)[2])
    with pytest.raises(ShoalError, match="products in fp8 are wrong on this machine"):
        fp8.check_kernels(CPU)


@pytest.mark.parametrize(("emulated", "told"), [(False, 1), (True, 0)])
def test_a_coordinator_says_so_when_it_evaluates_in_another_precision(emulated: bool, told: int) -> None:
    training = {"precision": {"kind": "fp8"}, "allow_emulation": emulated}
    model = {"kind": "gpt", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 8}
    tree = {"strategy": {"kind": "diloco"}, "training": training, "model": model, "data": {"max_samples": 100}}
    run, said = resolve_data(tree, name="test", dialect="shoal", environ={}).run, list[str]()
    _warn_of_gaps(run.transport, (), run, agree(run, 2, None, None, NO_LIVE_OBJECTS), said.append)
    assert len([one for one in said if "evaluations are done in bf16" in one]) == told
