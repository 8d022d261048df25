"""Each way of decoding against its distribution, worked out in numpy one token at a time, and against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.schema.serving import Decoding, Greedy, Sampling, TopK, TopKTopP, TopP
from shoal.models.generation.decoding import LogitPenalties, TokenDraws, Warp, apply_penalties, candidates, choose, row_draws, warp_of

WAYS = {
    "sampling": [Sampling(), Sampling(temperature=0.5), Sampling(temperature=3.0)],
    "top_k": [TopK(k=1), TopK(k=4, temperature=0.7), TopK(k=1000)],
    "top_p": [TopP(p=0.9), TopP(p=0.3, temperature=1.5), TopP(p=1e-6), TopP(p=1.0)],
    "top_k_top_p": [TopKTopP(k=5, p=0.8), TopKTopP(k=3, p=1.0), TopKTopP(k=1000, p=0.5, temperature=2.0)],
}
CASES = [(name, way) for name, ways in WAYS.items() for way in ways]


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2


def distribution(row: np.ndarray, way: object) -> np.ndarray:
    """Probability of every token, by the definition of each way."""
    weights = np.exp(row / way.temperature)
    order = sorted(range(len(row)), key=lambda token: -row[token])[: getattr(way, "k", len(row))]
    total, kept, reached = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if reached < getattr(way, "p", 1.0) or getattr(way, "p", 1.0) == 1.0:
            kept.append(token)
        reached += weights[token] / total
    probabilities = np.zeros(len(row))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def every_probability(scores: torch.Tensor, warp: Warp) -> torch.Tensor:
    found, ids = candidates(scores, warp)
    return found if ids is None else torch.zeros_like(scores).scatter(1, ids, found)


def drawn(scores: torch.Tensor, decoding: Decoding, seed: int = 7) -> list[int]:
    draws = TokenDraws(seed, [1, 2])
    return choose(scores, [warp_of(decoding)] * len(scores), [draws.at(i) for i in range(len(scores))]).tolist()


@pytest.mark.parametrize(("name", "way"), CASES)
def test_probabilities(name, way):
    scores = logits(6)
    found = every_probability(scores, warp_of(Decoding(active=name, **{name: way})))
    expected = np.stack([distribution(row, way) for row in scores.numpy()])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.none() | st.floats(0.01, 1),
    min_p=st.none() | st.floats(0, 1),
    repetition=st.sampled_from([1.0, 0.7, 1.3]),
)
def test_probabilities_are_those_of_transformers(seed, temperature, top_k, top_p, min_p, repetition):
    process = pytest.importorskip("transformers.generation.logits_process")
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, 50, dtype=torch.float64, generator=random) * 3
    seen = torch.randint(0, 50, (1, 8), generator=random)
    theirs = process.RepetitionPenaltyLogitsProcessor(repetition)(seen, scores.clone())
    theirs = process.TemperatureLogitsWarper(temperature)(seen, theirs)
    theirs = theirs if top_k is None else process.TopKLogitsWarper(top_k)(seen, theirs)
    theirs = theirs if top_p is None else process.TopPLogitsWarper(top_p)(seen, theirs)
    theirs = theirs if min_p is None else process.MinPLogitsWarper(min_p)(seen, theirs)
    penalties = LogitPenalties(repetition=repetition)
    ours = apply_penalties(scores[0], penalties, seen[0, :5].tolist(), seen[0, 5:].tolist())[None]
    torch.testing.assert_close(every_probability(ours, Warp(temperature, top_k, top_p, min_p)), theirs.softmax(-1), atol=1e-9, rtol=0)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_drawn_tokens_follow_the_probabilities(name, way):
    count, scores = 20_000, logits(1, seed=3)
    tokens = drawn(scores.expand(count, -1), Decoding(active=name, **{name: way}))
    expected = distribution(scores[0].numpy(), way)
    found = np.bincount(tokens, minlength=23) / count
    assert (found[expected == 0] == 0).all()
    np.testing.assert_array_less(np.abs(found - expected), 4.5 * np.sqrt(expected * (1 - expected) / count) + 1e-9)


def test_fifty_thousand_draws_pass_a_chi_square_test():
    count, scores = 50_000, logits(1, seed=5) / 2
    expected = scores[0].softmax(-1).numpy() * count
    found = np.bincount(drawn(scores.expand(count, -1), Decoding(active="sampling"), seed=-3), minlength=23)
    assert ((found - expected) ** 2 / expected).sum() < 48.3  # 22 degrees of freedom: exceeded once in a thousand times


def test_a_draw_depends_on_seed_prompt_choice_and_position_and_on_nothing_else():
    def numbers(*key) -> list[float]:
        return [TokenDraws(*key).at(position) for position in (0, 1, 2)]

    first = numbers(1, [5, 6], 0)
    assert first == numbers(1, [5, 6], 0)
    assert len({*first, *numbers(2, [5, 6], 0), *numbers(1, [5, 7], 0), *numbers(1, [5, 6], 1)}) == 12
    assert numbers(None, [5, 6], 0) != numbers(None, [5, 6], 0)
    assert all(0 <= number < 1 for number in first)


def test_rows_are_drawn_as_if_they_were_alone_and_equal_prompts_are_choices_of_one():
    together = row_draws(4, [[1], [2], [1]])
    assert [row.at(0) for row in together] == [TokenDraws(4, [1], 0).at(0), TokenDraws(4, [2], 0).at(0), TokenDraws(4, [1], 1).at(0)]


def test_each_row_is_chosen_in_its_own_way():
    warps = [Warp(0.0), Warp(1.0, top_k=3), Warp(2.0), Warp(1.0, top_k=3)]
    scores = logits(4)
    numbers = [0.1, 0.7, 0.3, 0.9]
    alone = [int(choose(scores[i : i + 1], [warps[i]], [numbers[i]])) for i in range(4)]
    assert choose(scores, warps, numbers).tolist() == alone


def test_penalties_and_biases_are_those_of_the_chat_completions_api():
    scores = torch.zeros(5)
    found = apply_penalties(scores, LogitPenalties(presence=0.5, frequency=0.25, bias={4: 3.0}), [0], [1, 2, 2])
    assert found.tolist() == [0.0, -0.75, -1.0, 0.0, 3.0]
    assert scores.tolist() == [0.0] * 5


@pytest.mark.parametrize("name", list(WAYS))
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-300])
def test_no_temperature_is_greedy(name, temperature):
    way = getattr(Decoding(), name).replace(temperature=temperature)
    scores = logits(50).float()
    assert drawn(scores, Decoding(active=name, **{name: way})) == scores.numpy().argmax(1).tolist()


def test_greedy_takes_the_best_at_any_temperature():
    assert drawn(logits(50), Decoding(active="greedy", greedy=Greedy(temperature=5.0))) == logits(50).numpy().argmax(1).tolist()


def test_only_the_active_way_counts():
    decoding = Decoding(active="sampling", top_k=TopK(k=1), top_p=TopP(p=1e-6), sampling=Sampling(temperature=10.0))
    assert len(set(drawn(logits(1).expand(500, -1), decoding))) > 10


def test_low_precision_logits_are_drawn_in_float32():
    found, _ = candidates(logits(2).bfloat16(), Warp())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(-1), torch.ones(2))


def test_a_token_that_is_ruled_out_is_never_drawn():
    scores = torch.tensor([[0.0, float("-inf"), 0.0]]).expand(2000, -1)
    assert set(drawn(scores, Decoding(active="sampling"))) == {0, 2}
