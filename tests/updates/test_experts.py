"""The experts of a mixture over many workers: weighed by the tokens that they saw, whatever a worker claims."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shoal.config.schema.updates import Bulyan, CenteredClipping, GeometricMedian, Krum, Median, MultiKrum, NearestNeighbours, NoMixing
from shoal.updates.experts import ExpertBlocks, believable, capped_shares, combine_apart, mean_by_experts
from shoal.updates.rules import aggregation
from tests.support.rules import krum

PARTS = ([0, 5, 8], [1, 2, 6], [3, 4, 7])
BLOCKS = ExpertBlocks(spans_X=(((1, 3), (6, 7)), ((3, 5), (7, 8))), layers=1, per_token=1, cap=2.0, size=9)
"""Two experts in a vector of nine numbers: each has a stretch in two stacked tensors, and the rest is the trunk's."""


def test_an_expert_is_weighed_by_the_tokens_that_it_saw() -> None:
    loads = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    shares = capped_shares(loads, torch.tensor([100.0, 300.0]), cap=10.0)
    expected = torch.tensor([[75 / (75 + 75), 25 / (25 + 225)], [75 / 150, 225 / 250]], dtype=torch.float64)
    torch.testing.assert_close(shares, expected)


def test_a_cap_of_one_is_the_plain_mean() -> None:
    weights = torch.tensor([1.0, 2.0, 5.0])
    shares = capped_shares(torch.rand(3, 6, generator=torch.Generator().manual_seed(0)), weights, cap=1.0)
    torch.testing.assert_close(shares, (weights.double() / 8)[:, None].expand(3, 6))


def test_an_expert_that_nobody_used_is_the_plain_mean() -> None:
    weights = torch.tensor([1.0, 3.0])
    torch.testing.assert_close(capped_shares(torch.zeros(2, 4), weights, cap=2.0), (weights.double() / 4)[:, None].expand(2, 4))


def test_what_the_cap_leaves_over_goes_to_the_others_by_their_tokens() -> None:
    loads = torch.tensor([[1.0], [0.1], [0.3], [0.0]])
    shares = capped_shares(loads, torch.ones(4), cap=2.0)
    torch.testing.assert_close(shares[:, 0], torch.tensor([0.5, 0.125, 0.375, 0.0], dtype=torch.float64))


def test_what_nobody_else_has_seen_is_not_one_workers_alone() -> None:
    shares = capped_shares(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.ones(4), cap=2.0)
    torch.testing.assert_close(shares[:, 0], torch.tensor([0.5, 1 / 6, 1 / 6, 1 / 6], dtype=torch.float64))


@pytest.mark.parametrize("cap", [1.0, 1.5, 3.0, 100.0])
def test_no_claim_counts_more_than_the_cap_allows(cap: float) -> None:
    drawn = torch.Generator().manual_seed(1)
    for count in (1, 2, 3, 5, 9):
        loads = torch.rand(count, 64, generator=drawn) * (torch.rand(count, 64, generator=drawn) < 0.6)
        loads[0] = 1e6  # who lies, lies as much as it can
        weights = torch.rand(count, generator=drawn) + 0.1
        shares, plain = capped_shares(loads, weights, cap), weights.double() / weights.double().sum()
        torch.testing.assert_close(shares.sum(0), torch.ones(64, dtype=torch.float64))
        assert bool((shares >= 0).all())
        assert bool((shares <= cap * plain[:, None] + 1e-12).all())


def test_loads_are_believed_as_far_as_a_workers_tokens_can_have_made_them() -> None:
    honest = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    torch.testing.assert_close(believable(honest, per_token=2), honest.double())
    claimed = torch.tensor([[1e30, math.inf, -1.0, math.nan], [1.0, 1.0, 1.0, 1.0]])
    found = believable(claimed, per_token=2)
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64))


def test_the_trunk_goes_by_weights_and_each_expert_by_its_tokens() -> None:
    drawn = torch.Generator().manual_seed(2)
    vectors = [torch.randn(9, generator=drawn) for _ in range(3)]
    weights, loads = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])
    shares = capped_shares(loads, weights, 2.0)
    columns = [weights / 4 if number is None else shares[:, number] for number in (None, 0, 0, 1, 1, None, 0, 1, None)]
    expected = torch.stack([torch.stack(vectors)[:, at].double() @ own.double() for at, own in enumerate(columns)])
    found = mean_by_experts(BLOCKS, vectors, weights, loads, torch.empty(9))
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_stretches_are_the_whole_vector_once() -> None:
    found = list(BLOCKS.stretches())
    assert [at for (start, end), _ in found for at in range(start, end)] == list(range(9))
    assert [number for _, number in found] == [None, 0, 1, None, 0, 1, None]


def test_a_fragment_of_the_weights_has_the_experts_that_lie_in_it() -> None:
    assert BLOCKS.within((5, 9)).spans_X == (((1, 2),), ((2, 3),))
    assert BLOCKS.within((5, 9)).size == 4
    assert BLOCKS.within(None) is BLOCKS


def test_loads_lie_behind_other_things_in_a_report() -> None:
    blocks = BLOCKS._replace(loads_at=2)
    torch.testing.assert_close(blocks.loads_of(torch.tensor([9.0, 9.0, 0.25, 0.75])), torch.tensor([0.25, 0.75], dtype=torch.float64))


# --- rules that look at each expert by itself -----------------------------------------------------------


@pytest.mark.parametrize("mixing", [NoMixing(), NearestNeighbours(byzantine=1)], ids=["none", "nearest"])
@pytest.mark.parametrize(
    "rule", [Krum(byzantine=1), MultiKrum(byzantine=1), Bulyan(byzantine=1), GeometricMedian(), CenteredClipping(radius=0.5), Median()]
)
def test_a_rule_looks_at_each_expert_as_if_there_were_nothing_else(rule: Any, mixing: Any) -> None:
    stack, weights = torch.randn(7, 9, generator=torch.Generator().manual_seed(3)), torch.ones(7)
    state = torch.randn(9, generator=torch.Generator().manual_seed(4))
    found, after = combine_apart(BLOCKS, rule, mixing, stack, weights, state, 0)
    for columns in PARTS:
        expected, kept = aggregation.combine(rule, mixing, stack[:, columns].contiguous(), weights, state[columns], 0)
        torch.testing.assert_close(found[columns], expected)
        assert after is not None
        assert kept is not None
        torch.testing.assert_close(after[columns], kept)


def test_a_rule_without_a_memory_leaves_none() -> None:
    assert combine_apart(BLOCKS, Krum(byzantine=1), NoMixing(), torch.randn(7, 9), torch.ones(7), None, 0)[1] is None


def test_what_is_false_in_one_expert_only_is_found_there() -> None:
    """It hides in the middle of all the others everywhere else, so that Krum takes it as a whole."""
    stack = 1 + torch.randn(7, 9, generator=torch.Generator().manual_seed(5)) * torch.tensor([9.0, 0.1, 0.1, 9, 9, 9, 0.1, 9, 9])
    stack[0] = stack[1:].mean(0)
    stack[0, PARTS[1]] = -3.0
    whole = krum(stack, 1)
    assert torch.equal(whole, stack[0])
    apart, _ = combine_apart(BLOCKS, Krum(byzantine=1), NoMixing(), stack, torch.ones(7), None, 0)
    assert float((apart[PARTS[1]] - 1).abs().max()) < 0.5
    assert torch.equal(apart[PARTS[2]], stack[0, PARTS[2]])
