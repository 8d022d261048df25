"""The rules that weigh whole contributions, mixing before them, and the one way from settings to a rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.config.schema.updates import (
    Aggregation,
    Bucketing,
    Bulyan,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    Mixing,
    MultiKrum,
    NearestNeighbours,
    NoMixing,
    TrimmedMean,
)
from shoal.errors import ShoalError
from shoal.updates.parallel_blocks import BLOCK
from shoal.updates.rules import aggregation as rules
from tests.support.rules import bucketing, bulyan, geometric_median, krum, multi_krum, nearest_neighbour_mixing

Doubles = NDArray[np.float64]


def contributions(count: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def total_distance(point: Doubles, values: Doubles) -> float:
    return float(np.sqrt(((values - point) ** 2).sum(1)).sum())


def descend(values: Doubles, steps: int = 4000) -> Doubles:
    """The geometric median by plain gradient descent on the sum of distances."""
    point = values.mean(0)
    for step in range(steps):
        away = point - values
        point = point - 2.0 / (1 + step) * (away / np.linalg.norm(away, axis=1, keepdims=True)).mean(0)
    return point


@settings(max_examples=15)
@given(st.integers(3, 15), st.integers(2, 40), st.integers(0, 99))
def test_the_geometric_median_has_the_least_sum_of_distances(count: int, size: int, seed: int) -> None:
    values = contributions(count, size, seed) + 3
    exact = values.double().numpy()
    ours = geometric_median(values, iterations=1000).double().numpy()
    assert total_distance(ours, exact) <= total_distance(descend(exact), exact) * (1 + 1e-5)


def test_the_geometric_median_of_points_on_a_line_is_their_median() -> None:
    values = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [50.0, 50.0], [3.0, 3.0]])
    assert torch.allclose(geometric_median(values, iterations=1000), torch.tensor([2.0, 2.0]), atol=1e-2)


def test_the_geometric_median_of_equal_contributions_is_that_one() -> None:
    assert torch.allclose(geometric_median(torch.ones(5, 7)), torch.ones(7))
    assert torch.allclose(geometric_median(torch.zeros(5, 7)), torch.zeros(7))


@pytest.mark.parametrize("large", [1e3, 1e9, 1e18, 1e30])
def test_the_geometric_median_is_moved_no_further_by_longer_attacks(large: float) -> None:
    values = 1 + 0.1 * contributions(11, 300)
    values[[2, 5, 8]] = -large
    assert (geometric_median(values) - 1).abs().mean() < 0.2


@settings(max_examples=25)
@given(st.integers(0, 3), st.integers(0, 5), st.integers(1, 50), st.integers(0, 99))
def test_multi_krum_is_the_mean_of_the_best(byzantine: int, more: int, size: int, seed: int) -> None:
    values = contributions(2 * byzantine + 3 + more, size, seed)
    exact = values.double().numpy()
    scores = []
    for row in exact:
        away = sorted(float(((row - other) ** 2).sum()) for other in exact)
        scores.append(sum(away[1 : len(exact) - byzantine - 1]))
    best = np.argsort(scores, kind="stable")
    for select in (None, 1, 2):
        kept = best[: len(exact) - byzantine if select is None else select]
        assert np.allclose(multi_krum(values, byzantine, select).numpy(), exact[kept].mean(0), atol=1e-5)


def reference_clipping(values: Doubles, centre: Doubles, radius: float, iterations: int) -> Doubles:
    for _ in range(iterations):
        steps = []
        for row in values:
            away = row - centre
            steps.append(away * min(1.0, radius / max(float(np.linalg.norm(away)), 1e-300)))
        centre = centre + np.mean(steps, axis=0)
    return centre


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 3000), st.floats(0.1, 100), st.integers(1, 4), st.integers(0, 99))
def test_centered_clipping_equals_the_reference(count: int, size: int, radius: float, iterations: int, seed: int) -> None:
    values, centre = contributions(count, size, seed), contributions(1, size, seed + 1)[0]
    expected = reference_clipping(values.double().numpy(), centre.double().numpy(), radius, iterations)
    assert np.allclose(rules.centered_clipping(values, centre, radius, iterations).numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("large", [1e10, 1e20, 1e30])
def test_a_false_contribution_moves_centered_clipping_by_its_share_of_the_radius(large: float) -> None:
    values = torch.zeros(10, 500)
    values[3] = large
    assert float(rules.centered_clipping(values, torch.zeros(500), 5.0, 1).norm()) == pytest.approx(0.5, rel=1e-4)


@settings(max_examples=25)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 99))
def test_buckets_hold_every_contribution_once(count: int, size: int, seed: int) -> None:
    """Contributions that are unit vectors show where each went."""
    mixed = bucketing(torch.eye(count), size, seed)
    assert mixed.shape == (-(-count // size), count)
    assert torch.allclose(mixed.sum(1), torch.ones(len(mixed)))
    assert ((mixed > 0).sum(0) == 1).all()
    assert (mixed > 0).sum(1)[:-1].tolist() == [size] * (len(mixed) - 1)
    assert torch.equal(mixed, bucketing(torch.eye(count), size, seed))


def test_buckets_differ_from_seed_to_seed() -> None:
    assert not torch.equal(bucketing(torch.eye(12), 3, 0), bucketing(torch.eye(12), 3, 1))


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(1, 60), st.integers(0, 99))
def test_neighbours_are_averaged(count: int, size: int, seed: int) -> None:
    values = contributions(count, size, seed)
    byzantine = (count - 1) // 2
    exact = values.double().numpy()
    expected = []
    for row in exact:
        order = sorted(range(count), key=lambda i: float(((exact[i] - row) ** 2).sum()))
        expected.append(exact[order[: count - byzantine]].mean(0))
    assert np.allclose(nearest_neighbour_mixing(values, byzantine).numpy(), np.stack(expected), atol=1e-5)


MIXINGS: list[Mixing] = [NoMixing(), Bucketing(size=2), NearestNeighbours(byzantine=8)]
RULES: list[Aggregation] = [
    TrimmedMean(trim_ratio=0.4),
    Median(),
    GeometricMedian(),
    Krum(byzantine=2),
    MultiKrum(byzantine=2),
    MultiKrum(byzantine=2, select=3),
    Bulyan(byzantine=2),
    CenteredClipping(radius=3.0),
]


def plainly(aggregation: Aggregation, rows: torch.Tensor) -> torch.Tensor:
    match aggregation:
        case TrimmedMean():
            return rules.trimmed_mean(rows, aggregation.trim_ratio)
        case Median():
            return rules.median(rows)
        case GeometricMedian():
            return geometric_median(rows)
        case Krum():
            return krum(rows, 2)
        case MultiKrum():
            return multi_krum(rows, 2, aggregation.select)
        case Bulyan():
            return bulyan(rows, 2)
        case _:
            return rules.centered_clipping(rows, None, 3.0, 3)


@pytest.mark.parametrize("mixing", MIXINGS, ids=lambda section: section.kind)
@pytest.mark.parametrize("aggregation", RULES, ids=lambda section: section.kind)
def test_settings_lead_to_the_rule_on_the_mixed_contributions(aggregation: Aggregation, mixing: Mixing) -> None:
    """Without ever making the mixed vectors, where the rule needs only distances."""
    values = contributions(24, 500)
    mixed = {
        "none": lambda: values,
        "bucketing": lambda: bucketing(values, 2, 7),
        "nearest-neighbours": lambda: nearest_neighbour_mixing(values, 8),
    }[mixing.kind]()
    result, state = rules.combine(aggregation, mixing, values, torch.arange(24) + 1, None, 7)
    assert torch.allclose(result, plainly(aggregation, mixed), atol=1e-5)
    assert (state is not None) == isinstance(aggregation, CenteredClipping)


@pytest.mark.parametrize("mixing", MIXINGS, ids=lambda section: section.kind)
def test_the_mean_is_weighted(mixing: Mixing) -> None:
    values = contributions(10, 50)
    equal, _ = rules.combine(Mean(), mixing, values, torch.full((10,), 3.0), None, 0)
    if not isinstance(mixing, NearestNeighbours):
        assert torch.allclose(equal, values.mean(0), atol=1e-6)
    heavy, _ = rules.combine(Mean(), mixing, values, torch.eye(10)[0], None, 0)
    assert not torch.allclose(heavy, equal, atol=1e-2)
    if isinstance(mixing, NoMixing):
        assert torch.allclose(heavy, values[0])


def test_centered_clipping_goes_on_from_its_state() -> None:
    aggregation, values = CenteredClipping(radius=1.0, iterations=1), contributions(5, 20) + 10
    first, state = rules.combine(aggregation, NoMixing(), values, torch.ones(5), None, 0)
    assert state is not None
    first.zero_()
    second, _ = rules.combine(aggregation, NoMixing(), values, torch.ones(5), state, 1)
    assert float(second.norm()) == pytest.approx(2.0, rel=0.05)
    assert torch.allclose(second, rules.centered_clipping(values, None, 1.0, 2), atol=1e-6)


@pytest.mark.parametrize("aggregation", [Krum(), MultiKrum(), Bulyan()], ids=lambda section: section.kind)
@pytest.mark.parametrize("mixing", [NoMixing(), Bucketing(), NearestNeighbours()], ids=lambda section: section.kind)
def test_what_is_left_open_follows_from_the_number_of_contributions(aggregation: Aggregation, mixing: Mixing) -> None:
    for count in (6, 9, 23):
        result, _ = rules.combine(aggregation, mixing, contributions(count, 30), torch.ones(count), None, 0)
        assert result.isfinite().all()


def test_too_few_buckets_are_refused() -> None:
    with pytest.raises(ShoalError, match="needs 5 contributions, there are 4"):
        rules.combine(Krum(byzantine=1), Bucketing(size=2), contributions(8, 3), torch.ones(8), None, 0)


def test_mixing_helps_the_median_where_honest_contributions_differ() -> None:
    """Each honest one has its own few large coordinates; a median alone sees mostly zeros."""
    values = torch.zeros(12, 120)
    for number in range(12):
        values[number, 10 * number : 10 * number + 10] = 12.0
    values[[3, 9]] = -100.0
    honest = values[[i for i in range(12) if i not in (3, 9)]].mean(0)
    plain, _ = rules.combine(Median(), NoMixing(), values, torch.ones(12), None, 0)
    mixed, _ = rules.combine(Median(), NearestNeighbours(byzantine=2), values, torch.ones(12), None, 0)
    assert (mixed - honest).norm() < 0.5 * (plain - honest).norm()


@pytest.mark.parametrize("size", [1, 1000, BLOCK + 7])
def test_the_mean_of_vectors_needs_no_stack(size: int) -> None:
    vectors = [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    out = torch.full((size,), torch.nan)
    assert rules.mean_of_vectors(vectors, weights, out) is out
    exact = sum(weight * vector.double() for weight, vector in zip(weights, vectors, strict=True)) / weights.sum()
    assert torch.allclose(out.double(), exact, atol=1e-6)
