"""Aggregation rules against plain double-precision references, and what they withstand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.errors import ShoalError
from shoal.updates.rules import aggregation
from shoal.updates.rules.gram_matrix import gram, squared_distances
from tests.support.rules import bulyan, geometric_median, krum, multi_krum

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


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 700), st.floats(0, 1), st.integers(0, 99))
def test_column_rules_equal_numpy(count: int, size: int, ratio: float, seed: int) -> None:
    values = stack(count, size, seed)
    exact = values.double().numpy()
    dropped = aggregation.trimmed_at_each_end(count, ratio)
    expected = np.sort(exact, axis=0)[dropped : count - dropped].mean(0)
    assert np.allclose(aggregation.trimmed_mean(values, ratio).numpy(), expected, atol=1e-5)
    assert np.allclose(aggregation.median(values).numpy(), np.median(exact, axis=0), atol=1e-6)
    assert np.allclose(aggregation.mean(values).numpy(), exact.mean(0), atol=1e-5)


def test_a_trim_of_0_3_drops_15_percent_at_each_end() -> None:
    assert aggregation.trimmed_at_each_end(20, 0.3) == 3
    assert aggregation.trimmed_at_each_end(10, 0.2) == 1
    assert aggregation.trimmed_at_each_end(3, 1.0) == 1


def test_a_trim_drops_at_least_one_at_each_end_from_three_contributions_on() -> None:
    """Else every documented example, of three to six contributions, would be the plain mean."""
    assert [aggregation.trimmed_at_each_end(count, 0.3) for count in (1, 2, 3, 4, 5, 6, 13, 14)] == [0, 0, 1, 1, 1, 1, 1, 2]
    assert aggregation.trimmed_at_each_end(5, 0.0) == 0, "who asks for none gets none"
    values = torch.tensor([[0.0], [1.0], [1e9]])
    assert aggregation.trimmed_mean(values, 0.3).tolist() == [1.0]


def test_a_weighted_mean_weighs_by_samples() -> None:
    values = stack(3, 10)
    weights = torch.tensor([1, 2, 5])
    expected = (values.double() * weights[:, None] / 8).sum(0)
    assert torch.allclose(aggregation.mean(values, weights).double(), expected, atol=1e-6)


@settings(max_examples=25)
@given(st.integers(0, 2), st.integers(0, 4), st.integers(1, 50), st.integers(0, 99))
def test_krum_and_bulyan_equal_the_reference(byzantine: int, more: int, size: int, seed: int) -> None:
    values = stack(4 * byzantine + 3 + more, size, seed)
    exact = values.double().numpy()
    assert torch.equal(krum(values, byzantine), values[reference_krum(exact, byzantine)])
    assert np.allclose(bulyan(values, byzantine).numpy(), reference_bulyan(exact, byzantine), atol=1e-5)


def test_distances_survive_a_large_common_part() -> None:
    """What a plain Gram matrix would lose: vectors that differ little against their length."""
    values = torch.full((5, 1000), 1000.0) + stack(5, 1000)
    expected = torch.from_numpy(reference_distances(values.double().numpy()))
    assert torch.allclose(squared_distances(gram(values)), expected, rtol=1e-5)


@pytest.mark.parametrize("count", [2, 16, 17, 35])
@pytest.mark.parametrize("size", [1, 8191, 8192, 17_000])
def test_distances_equal_a_double_precision_reference_at_every_size(count: int, size: int) -> None:
    values = stack(count, size)
    exact = values.double()
    expected = torch.stack([(exact - row).square().sum(1) for row in exact])
    assert torch.allclose(squared_distances(gram(values)), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("large", [1e6, 1e15, 1e25, 3e38])
def test_distances_among_the_honest_survive_an_attacker_of_any_length(large: float) -> None:
    values = stack(7, 3000)
    values[[1, 4]] = large * stack(2, 3000, 5).sign()
    distances = squared_distances(gram(values))
    honest = [0, 2, 3, 5, 6]
    expected = torch.from_numpy(reference_distances(values[honest].double().numpy()))
    assert torch.allclose(distances[honest][:, honest], expected, rtol=1e-4)
    assert distances[[1, 4]][:, honest].min() > 100 * expected.max()
    assert torch.equal(krum(values, 2), values[honest][reference_choice(values[honest], 3)])


def reference_choice(values: torch.Tensor, neighbours: int) -> int:
    distances = reference_distances(values.double().numpy())
    return int(np.argmin([np.sort(row)[1 : neighbours + 1].sum() for row in distances]))


def test_a_rule_leaves_the_contributions_as_they_were() -> None:
    for size in (1, 2000):
        values = stack(7, size)
        before = values.clone()
        for rule in (
            aggregation.median,
            lambda s: aggregation.trimmed_mean(s, 0.5),
            lambda s: bulyan(s, 1),
            lambda s: krum(s, 1),
        ):
            rule(values)
            assert torch.equal(values, before)


def test_bulyan_survives_a_value_that_would_swallow_a_running_sum() -> None:
    values = 1 + 0.01 * stack(11, 500)
    values[0, 7], values[1, 9] = 1e30, -1e30
    assert (bulyan(values, 2) - 1).abs().max() < 0.1


def test_too_few_contributions_are_refused() -> None:
    with pytest.raises(ShoalError, match="needs 7 contributions, there are 6"):
        krum(stack(6, 3), 2)
    with pytest.raises(ShoalError, match="needs 11 contributions"):
        bulyan(stack(10, 3), 2)


@pytest.mark.parametrize("rule", ["krum", "multi-krum", "bulyan", "trimmed", "median", "geometric", "clipping"])
def test_two_attackers_of_eleven_do_not_move_it_far_and_the_mean_they_do(rule: str) -> None:
    honest = torch.ones(11, 200) + 0.1 * stack(11, 200)
    attacked = honest.clone()
    attacked[[2, 7]] = -50.0 * torch.ones(200)
    robust = {
        "krum": lambda s: krum(s, 2),
        "bulyan": lambda s: bulyan(s, 2),
        "trimmed": lambda s: aggregation.trimmed_mean(s, 0.4),
        "median": aggregation.median,
        "multi-krum": lambda s: multi_krum(s, 2),
        "geometric": geometric_median,
        "clipping": lambda s: aggregation.centered_clipping(s, torch.ones(200), 2.0, 3),
    }[rule]
    assert (robust(attacked) - 1).abs().mean() < 0.2
    assert (aggregation.mean(attacked) - 1).abs().mean() > 5
