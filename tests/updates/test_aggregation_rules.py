"""Aggregation rules against plain double-precision references, and what they withstand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.errors import ShoalError
from shoal.updates import rules
from shoal.updates.columns import network, sorted_rows

Doubles = NDArray[np.float64]


def stack(count: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def reference_distances(values: Doubles) -> Doubles:
    return np.array([[((a - b) ** 2).sum() for b in values] for a in values])


def reference_krum(values: Doubles, byzantine: int) -> int:
    distances = reference_distances(values)
    scores = [np.sort(np.delete(row, i))[: len(values) - byzantine - 2].sum() for i, row in enumerate(distances)]
    return int(np.argmin(scores))


def reference_bulyan(values: Doubles, byzantine: int) -> Doubles:
    left, chosen = list(range(len(values))), []
    while len(chosen) < len(values) - 2 * byzantine:
        distances = reference_distances(values[left])
        near = max(1, len(left) - byzantine - 2)
        scores = [np.sort(np.delete(row, i))[:near].sum() for i, row in enumerate(distances)]
        chosen.append(left.pop(int(np.argmin(scores))))
    picked = values[chosen]
    kept = len(chosen) - 2 * byzantine
    middle = np.median(picked, axis=0)
    order = np.argsort(np.abs(picked - middle), axis=0, kind="stable")[:kept]
    return np.take_along_axis(picked, order, axis=0).mean(0)


@given(st.integers(1, 40))
def test_the_network_sorts(count: int) -> None:
    """By the 0-1 principle a network that sorts all zeros and ones sorts everything; random floats stand in for all of them."""
    values = np.random.default_rng(count).standard_normal((count, 64)).astype(np.float32)
    assert np.array_equal(np.stack(sorted_rows(values.copy())), np.sort(values, axis=0))


@pytest.mark.parametrize("count", range(1, 11))
def test_the_network_sorts_every_zero_one_input(count: int) -> None:
    inputs = ((np.arange(2**count)[None, :] >> np.arange(count)[:, None]) & 1).astype(np.float32)
    assert np.array_equal(np.stack(sorted_rows(inputs.copy())), np.sort(inputs, axis=0))
    assert all(low < high < count for low, high in network(count))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 700), st.floats(0, 1), st.integers(0, 99))
def test_column_rules_equal_numpy(count: int, size: int, ratio: float, seed: int) -> None:
    values = stack(count, size, seed)
    exact = values.double().numpy()
    dropped = rules.trimmed_at_each_end(count, ratio)
    expected = np.sort(exact, axis=0)[dropped : count - dropped].mean(0)
    assert np.allclose(rules.trimmed_mean(values, ratio).numpy(), expected, atol=1e-5)
    assert np.allclose(rules.median(values).numpy(), np.median(exact, axis=0), atol=1e-6)
    assert np.allclose(rules.mean(values).numpy(), exact.mean(0), atol=1e-5)


def test_a_trim_of_0_3_drops_15_percent_at_each_end() -> None:
    assert rules.trimmed_at_each_end(20, 0.3) == 3
    assert rules.trimmed_at_each_end(10, 0.2) == 1
    assert rules.trimmed_at_each_end(3, 1.0) == 1


def test_a_weighted_mean_weighs_by_samples() -> None:
    values = stack(3, 10)
    weights = torch.tensor([1, 2, 5])
    expected = (values.double() * weights[:, None] / 8).sum(0)
    assert torch.allclose(rules.mean(values, weights).double(), expected, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2), st.integers(0, 4), st.integers(1, 50), st.integers(0, 99))
def test_krum_and_bulyan_equal_the_reference(byzantine: int, more: int, size: int, seed: int) -> None:
    values = stack(4 * byzantine + 3 + more, size, seed)
    exact = values.double().numpy()
    assert torch.equal(rules.krum(values, byzantine), values[reference_krum(exact, byzantine)])
    assert np.allclose(rules.bulyan(values, byzantine).numpy(), reference_bulyan(exact, byzantine), atol=1e-5)


def test_distances_survive_a_large_common_part() -> None:
    """What a plain Gram matrix would lose: vectors that differ little against their length."""
    values = torch.full((5, 1000), 1000.0) + stack(5, 1000)
    expected = torch.from_numpy(reference_distances(values.double().numpy()))
    assert torch.allclose(rules.squared_distances(values), expected, rtol=1e-5)


def test_too_few_contributions_are_refused() -> None:
    with pytest.raises(ShoalError, match="needs 7 contributions, there are 6"):
        rules.krum(stack(6, 3), 2)
    with pytest.raises(ShoalError, match="needs 11 contributions"):
        rules.bulyan(stack(10, 3), 2)


@pytest.mark.parametrize("rule", ["krum", "bulyan", "trimmed", "median"])
def test_two_attackers_of_eleven_do_not_move_it_far_and_the_mean_they_do(rule: str) -> None:
    honest = torch.ones(11, 200) + 0.1 * stack(11, 200)
    attacked = honest.clone()
    attacked[[2, 7]] = -50.0 * torch.ones(200)
    robust = {
        "krum": lambda s: rules.krum(s, 2),
        "bulyan": lambda s: rules.bulyan(s, 2),
        "trimmed": lambda s: rules.trimmed_mean(s, 0.4),
        "median": rules.median,
    }[rule]
    assert (robust(attacked) - 1).abs().mean() < 0.2
    assert (rules.mean(attacked) - 1).abs().mean() > 5
