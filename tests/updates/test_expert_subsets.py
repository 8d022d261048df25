"""Workers that hold some of a mixture's experts: an expert is the mean over its holders, the trunk over all."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.updates.expert_subsets import HolderVector, format_expert_ids, mean_of_reports, mean_over_holders, part_of, size_of, why_not_held
from shoal.updates.experts import ExpertBlocks, capped_shares

LAYERS, EXPERTS, WIDTH, TRUNK = 2, 4, 3, 5


def blocks_of(cap: float | None = None) -> ExpertBlocks:
    """Two layers, each with a stretch of the trunk before two stacked tensors of four experts."""
    spans, at = [], 0
    for _ in range(LAYERS):
        at += TRUNK
        stacks = [
            [(at + stack * EXPERTS * WIDTH + i * WIDTH, at + stack * EXPERTS * WIDTH + (i + 1) * WIDTH) for i in range(EXPERTS)]
            for stack in (0, 1)
        ]
        spans += [(stacks[0][i], stacks[1][i]) for i in range(EXPERTS)]
        at += 2 * EXPERTS * WIDTH
    return ExpertBlocks(tuple(spans), LAYERS, per_token=1, cap=cap, size=at + 1)


BLOCKS = blocks_of()


def columns(number: int) -> list[int]:
    """The places of an expert, in all layers."""
    return [at for layer in range(LAYERS) for start, end in BLOCKS.spans_X[layer * EXPERTS + number] for at in range(start, end)]


def mask_of(experts: tuple[int, ...]) -> torch.Tensor:
    """True where a holder has a number, found column by column."""
    mask = torch.ones(BLOCKS.size, dtype=torch.bool)
    for number in range(EXPERTS):
        if experts and number not in experts:
            mask[columns(number)] = False
    return mask


held_experts = st.sets(st.integers(0, EXPERTS - 1), max_size=EXPERTS).map(lambda found: tuple(sorted(found)))


@given(st.lists(held_experts, min_size=1, max_size=5), st.integers(0, 2**31))
def test_each_number_is_the_mean_over_those_who_have_it(held: list[tuple[int, ...]], seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    whole = torch.randn(len(held), BLOCKS.size, generator=drawn)
    weights, unmoved = torch.rand(len(held), generator=drawn) + 0.1, torch.randn(BLOCKS.size, generator=drawn)
    parts = [HolderVector(part_of(BLOCKS, row, experts), experts) for row, experts in zip(whole, held, strict=True)]
    found = mean_over_holders(BLOCKS, parts, weights, unmoved.clone())
    has = torch.stack([mask_of(experts) for experts in held])
    shares = weights.double()[:, None] * has
    expected = torch.where(has.any(0), (shares * whole.double()).sum(0) / shares.sum(0).clamp(min=1e-300), unmoved.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@given(held_experts)
def test_a_part_is_the_vector_without_the_other_experts(experts: tuple[int, ...]) -> None:
    vector = torch.arange(float(BLOCKS.size))
    part = part_of(BLOCKS, vector, experts)
    assert torch.equal(part, vector[mask_of(experts)])
    assert len(part) == size_of(BLOCKS, experts)
    assert all(before < after for before, after in pairwise(part.tolist()))


def test_holders_are_weighed_by_tokens_among_themselves() -> None:
    blocks, drawn = blocks_of(cap=2.0), torch.Generator().manual_seed(0)
    held: list[tuple[int, ...]] = [(0, 1), (1, 2), ()]
    whole, weights = torch.randn(3, blocks.size, generator=drawn), torch.tensor([1.0, 2.0, 1.0])
    loads = torch.rand(3, LAYERS * EXPERTS, generator=drawn)
    parts = [HolderVector(part_of(blocks, row, experts), experts) for row, experts in zip(whole, held, strict=True)]
    found = mean_over_holders(blocks, parts, weights, torch.zeros(blocks.size), loads)
    for number in range(LAYERS * EXPERTS):
        rows = [i for i, experts in enumerate(held) if not experts or number % EXPERTS in experts]
        shares = capped_shares(loads[rows, number : number + 1], weights[rows], 2.0)[:, 0]
        for start, end in blocks.spans_X[number]:
            torch.testing.assert_close(found[start:end].double(), shares @ whole[rows, start:end].double(), rtol=1e-5, atol=1e-6)


def test_a_bias_moves_by_the_mean_of_its_experts_holders() -> None:
    blocks = BLOCKS._replace(biases_at=(1,))
    reports = torch.tensor([[9.0, 1.0, 1.0, 0.0, 0.0], [3.0, 0.0, -2.0, 1.0, 0.0]])
    found = mean_of_reports(blocks, reports, torch.tensor([1.0, 2.0]), [(0, 1), (1, 2)])
    torch.testing.assert_close(found, torch.tensor([5.0, 1.0, -1.0, 1.0, 0.0]))


@pytest.mark.parametrize(("experts", "word"), [((0, 0), "once"), ((1, 0), "ascending"), ((0, 4), "0 to 3"), ((), "ascending"), ((2,), "")])
def test_experts_that_are_not_there_cannot_be_held(experts: tuple[int, ...], word: str) -> None:
    problem = why_not_held(BLOCKS, experts)
    assert word in problem
    assert bool(problem) == bool(word)


def test_a_token_needs_as_many_experts_as_it_visits() -> None:
    assert "2 experts" in why_not_held(BLOCKS._replace(per_token=2), (1,))


def test_people_read_runs_of_numbers() -> None:
    assert format_expert_ids((0, 1, 2, 3, 8)) == "0–3, 8"
