"""The norm is right at every magnitude, and tells of any number that is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.updates.clipping import clip_, norm


@settings(max_examples=60)
@given(st.integers(0, 300_000), st.floats(-37, 37), st.integers(0, 99))
def test_the_norm_equals_one_in_double_precision(size: int, exponent: float, seed: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 10**exponent
    assert norm(values) == pytest.approx(float(values.double().norm()), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 131_071, 131_072, 299_999])
def test_one_number_that_is_not_finite_shows_in_the_norm_and_nothing_is_changed(bad: float, place: int) -> None:
    values = torch.ones(300_000)
    values[place] = bad
    before = values.clone()
    assert not math.isfinite(clip_(values, 1.0))
    assert torch.equal(values.nan_to_num(7.0), before.nan_to_num(7.0))


def test_a_finite_vector_has_a_finite_norm_however_large() -> None:
    assert math.isfinite(norm(torch.full((1000,), torch.finfo(torch.float32).max)))


@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_a_vector_is_shortened_to_the_limit_and_never_lengthened(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(1))
    length = float(values.double().norm())
    direction = values.double() / length
    assert clip_(values, length * 2) == pytest.approx(length)
    assert float(values.double().norm()) == pytest.approx(length)
    assert clip_(values, length / 4) == pytest.approx(length)
    assert float(values.double().norm()) == pytest.approx(length / 4, rel=1e-5)
    assert torch.allclose(values.double() * 4 / length, direction, atol=1e-6)
