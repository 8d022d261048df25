"""Rotary positions against complex multiplication, and their precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.models.layers import rotary
from shoal.models.layers.rotary import Rotary, rotate


@pytest.mark.parametrize("with_complex", [True, False])
def test_pairs_turn_like_complex_numbers(monkeypatch, with_complex):
    monkeypatch.setattr(rotary, "_has_complex", lambda x: with_complex)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, Rotary(16, 8).double()(7, 5))
    pairs = x.numpy()[..., 0::2] + 1j * x.numpy()[..., 1::2]
    angles = np.arange(7, 12)[:, None] * 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    expected = pairs * np.exp(1j * angles)[:, None, :]
    np.testing.assert_allclose(turned.numpy()[..., 0::2], expected.real, atol=1e-14)
    np.testing.assert_allclose(turned.numpy()[..., 1::2], expected.imag, atol=1e-14)


def test_angles_keep_their_precision():
    exact = Rotary(4096, 8).double().turns_SP2
    low = Rotary(4096, 8).to(torch.bfloat16)
    assert low.turns_SP2.dtype == torch.float32
    assert (low.turns_SP2 - exact).abs().max() < 1e-7
    assert rotate(torch.ones(1, 4, 1, 8, dtype=torch.bfloat16), low(0, 4)).dtype == torch.bfloat16


def test_angles_survive_an_empty_start():
    with torch.device("meta"):
        empty = Rotary(16, 8)
    assert torch.equal(empty.to_empty(device="cpu").turns_SP2, Rotary(16, 8).turns_SP2)


def test_angles_are_not_saved():
    assert not Rotary(16, 8).state_dict()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("queries", "keys", "size"), [(12, 12, 64), (8, 2, 128), (40, 40, 64), (3, 1, 16)])
def test_heads_that_a_gpu_turns_in_one_pass_are_turned_the_same(queries: int, keys: int, size: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    heads, turns_LP2 = [queries, keys, keys], Rotary(32, size).cuda()(5, 7)
    given = torch.randn(3, 7, sum(heads), size, device="cuda", generator=generator).bfloat16().requires_grad_()
    assert rotary.turns_in_one_pass(given, turns_LP2)
    from shoal.models.kernels.rotary import turned_heads

    found = turned_heads(given, turns_LP2, queries, keys)
    exact = given.detach().double().requires_grad_()
    turning, value = torch.split(exact, [queries + keys, keys], dim=2)
    expected = [*torch.split(rotate(turning, turns_LP2.double()), heads[:2], dim=2), value]
    slopes = [torch.randn(one.shape, device="cuda", generator=generator) for one in found]
    torch.autograd.backward(found, [slope.bfloat16() for slope in slopes])
    torch.autograd.backward(expected, [slope.bfloat16().double() for slope in slopes])
    assert given.grad is not None
    assert exact.grad is not None
    for one, other in zip([*found, given.grad], [*expected, exact.grad], strict=True):
        assert torch.allclose(one.double(), other, rtol=2**-8, atol=1e-6)


def test_only_half_precision_on_a_gpu_is_turned_in_one_pass() -> None:
    assert not rotary.turns_in_one_pass(torch.zeros(1, 4, 3, 8, dtype=torch.bfloat16), Rotary(16, 8)(0, 4))
