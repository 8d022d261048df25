"""Each way of decoding against its distribution, worked out in numpy one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.config.schema.serving import Decoding, Greedy, Sampling, TopK, TopKTopP, TopP
from shoal.models.decoding import candidates, choose

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


@pytest.mark.parametrize(("name", "way"), CASES)
def test_probabilities(name, way):
    scores = logits(6)
    found, ids = candidates(scores / way.temperature, way)
    if ids is not None:
        found = torch.zeros_like(scores).scatter(1, ids, found)
    expected = np.stack([distribution(row, way) for row in scores.numpy()])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_drawn_tokens_follow_the_probabilities(name, way):
    count, scores = 20_000, logits(1, seed=3)
    decoding = Decoding(active=name, **{name: way})
    drawn = choose(scores.expand(count, -1), decoding, torch.Generator().manual_seed(7))
    expected = distribution(scores[0].numpy(), way)
    found = np.bincount(drawn.numpy(), minlength=23) / count
    assert (found[expected == 0] == 0).all()
    np.testing.assert_array_less(np.abs(found - expected), 4.5 * np.sqrt(expected * (1 - expected) / count) + 1e-9)


@pytest.mark.parametrize("name", list(WAYS))
@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_no_temperature_is_greedy(name, temperature):
    way = getattr(Decoding(), name).replace(temperature=temperature)
    found = choose(logits(50), Decoding(active=name, **{name: way}), torch.Generator().manual_seed(0))
    assert found.tolist() == logits(50).numpy().argmax(1).tolist()


def test_greedy_takes_the_best_at_any_temperature():
    found = choose(logits(50), Decoding(active="greedy", greedy=Greedy(temperature=5.0)))
    assert found.tolist() == logits(50).numpy().argmax(1).tolist()


def test_only_the_active_way_counts():
    decoding = Decoding(active="sampling", top_k=TopK(k=1), top_p=TopP(p=1e-6), sampling=Sampling(temperature=10.0))
    assert len(set(choose(logits(1).expand(500, -1), decoding).tolist())) > 10


def test_low_precision_logits_are_drawn_in_float32():
    found, _ = candidates(logits(2).bfloat16(), Sampling())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(-1), torch.ones(2))


def test_a_token_that_is_ruled_out_is_never_drawn():
    scores = torch.tensor([[0.0, float("-inf"), 0.0]]).expand(2000, -1)
    assert set(choose(scores, Decoding(active="sampling")).tolist()) == {0, 2}
