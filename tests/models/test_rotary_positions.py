"""Rotary positions against complex multiplication, and their precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.models import rotary
from shoal.models.rotary import Rotary, rotate


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
