"""Scores of contributions: what lowers the loss on held-out data counts, and a replay and an audit come to the same factors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config.schema.strategy import DiLoCo, SyncPs
from shoal.config.schema.updates import Krum, Scorer, TopKCodec, Updates
from shoal.coordinator.audit.scores import ScoreAudit
from shoal.coordinator.run_plan import ContributionScorer
from shoal.updates import codecs
from shoal.updates.rules.scores import HeldOutLosses, Score, copies, factors, improvements, renewed
from tests.support.small_cluster import Cluster, FakeWorker, Numbers, strategy_of

SIZE = 40
TARGET = torch.linspace(1, 2, SIZE)
SCORER = Scorer(enabled=True, share=0.5, memory=0.5)


class Bowl(ContributionScorer):
    """The loss is the squared distance from the target. It measures every other round."""

    def __init__(self) -> None:
        self.asked = 0

    def chooses(self) -> bool:
        self.asked += 1
        return self.asked % 2 == 0

    def draw(self) -> list[int]:
        return [self.asked]

    def loss(self, weights: Tensor, buffers: Tensor, batches: Sequence[int]) -> float:
        return float((weights - TARGET).double().square().sum())


class Never(Bowl):
    """A replay measures nothing."""

    def loss(self, weights: Tensor, buffers: Tensor, batches: Sequence[int]) -> float:
        raise AssertionError


def cluster_of(count: int, updates: Updates | None = None, needed: int = 1) -> tuple[Cluster, list[FakeWorker]]:
    chosen = updates or Updates(scorer=SCORER)
    cluster = Cluster(
        strategy_of(DiLoCo(inner_steps=2, rounds=100), count), count, updates=chosen, needed=needed, learner=Numbers(SIZE), scorer=Bowl()
    )
    return cluster, [cluster.join(f"w{number}") for number in range(count)]


def play(cluster: Cluster, workers: Sequence[FakeWorker], vectors: Sequence[Tensor]) -> dict[str, Any]:
    """A round; the line of its version in the ledger."""
    for worker, vector in zip(workers, vectors, strict=True):
        worker.round = worker.version = cluster.coordinator.state.version
        cluster.contribute(worker, frames=codecs.encode(cluster.updates.codec, vector, None))
    return cluster.ledger[-1]


def honest(cluster: Cluster, count: int, seed: int) -> list[Tensor]:
    """Pseudo-gradients towards the target, with noise of their own."""
    generator = torch.Generator().manual_seed(seed)
    away = cluster.learner.vector - TARGET
    return [0.5 * away + 0.1 * torch.randn(SIZE, generator=generator) for _ in range(count)]


def test_what_does_not_lower_the_loss_does_not_count() -> None:
    cluster, workers = cluster_of(5)
    start, good = cluster.learner.vector.clone(), honest(cluster, 3, 0)
    line = play(cluster, workers, [*good, torch.zeros(SIZE), -good[0]])
    assert line["factors"]["w3"] == line["factors"]["w4"] == 0
    weights = [line["factors"].get(f"w{number}", 1.0) for number in range(3)]
    assert min(weights) > 0.5
    mean = sum(weight * vector for weight, vector in zip(weights, good, strict=True)) / sum(weights)
    assert torch.allclose(cluster.learner.vector, start - 0.25 * mean, atol=1e-6)


def test_a_copy_counts_as_a_part_of_what_it_copies() -> None:
    cluster, workers = cluster_of(6)
    good = honest(cluster, 4, 1)
    line = play(cluster, workers, [*good, good[0], good[0] * 1.01])
    assert line["scores"][3] == [[0, 4, 5]]
    alone = [line["factors"].get(f"w{number}", 1.0) for number in (1, 2, 3)]
    shared = [line["factors"][f"w{number}"] for number in (0, 4, 5)]
    assert max(shared) < 0.5 < min(alone)


def test_scores_hold_for_the_rounds_between_measurements() -> None:
    cluster, workers = cluster_of(4)
    lines = [play(cluster, workers, [*honest(cluster, 3, number), torch.zeros(SIZE)]) for number in range(6)]
    measured = ["scores" in line for line in lines]
    assert measured == [True, False, True, False, True, False]
    assert all(line["factors"]["w3"] == 0 for line in lines)


def test_a_worker_that_contributes_for_the_first_time_is_measured() -> None:
    cluster, workers = cluster_of(2)
    play(cluster, workers, honest(cluster, 2, 0))
    workers.append(cluster.join("late"))
    line = play(cluster, workers, [*honest(cluster, 2, 1), torch.zeros(SIZE)])
    assert line["factors"]["late"] == 0


def test_a_round_in_which_nothing_lowers_the_loss_counts_in_full() -> None:
    cluster, workers = cluster_of(3)
    line = play(cluster, workers, [-vector for vector in honest(cluster, 3, 0)])
    assert "scores" in line
    assert "factors" not in line
    assert cluster.coordinator.state.scores == {}


def test_a_rule_that_compares_keeps_as_many_as_it_needs() -> None:
    cluster, workers = cluster_of(6, Updates(scorer=SCORER, aggregation=Krum(byzantine=1)), needed=5)
    start, good = cluster.learner.vector.clone(), honest(cluster, 4, 0)
    line = play(cluster, workers, [*good, torch.zeros(SIZE), torch.zeros(SIZE)])
    assert line["factors"]["w4"] == line["factors"]["w5"] == 0
    moved = (start - cluster.learner.vector) / 0.25
    assert any(torch.allclose(moved, vector, atol=1e-5) for vector in good), "Krum chose an honest one"


def test_a_replay_comes_to_the_same_weights_and_scores_without_measuring() -> None:
    cluster, workers = cluster_of(5)
    for number in range(7):
        good = honest(cluster, 3, number)
        play(cluster, workers, [*good, torch.zeros(SIZE), good[0]])
    other = Cluster(cluster.strategy, 5, updates=cluster.updates, learner=Numbers(SIZE), scorer=Never())
    for record, frames in cluster.records:
        other.carry_out(other.coordinator.replayed.apply(record, frames))
    assert torch.equal(other.learner.vector, cluster.learner.vector)
    assert other.coordinator.state.scores == cluster.coordinator.state.scores
    assert other.ledger == cluster.ledger
    restored = Cluster(cluster.strategy, 5, updates=cluster.updates, learner=Numbers(SIZE), scorer=Never())
    restored.coordinator.load_state_dict(copy.deepcopy(cluster.coordinator.replayed.state_dict()))
    assert restored.coordinator.state.scores == cluster.coordinator.state.scores


def test_an_audit_comes_to_the_factors_in_the_ledger() -> None:
    cluster, workers = cluster_of(5)
    for number in range(8):
        good = honest(cluster, 3, number)
        play(cluster, workers, [*good, torch.zeros(SIZE), good[0]])
    lines = [(f"ledger.jsonl:{number}", line) for number, line in enumerate(cluster.ledger, 1)]
    audit = ScoreAudit(SCORER.memory)
    assert [*audit.violations(lines)] == []
    assert "w3 0.00" in audit.summary()[0]
    for change in ("factor", "loss", "missing"):
        changed = copy.deepcopy(lines)
        line = changed[2][1]
        if change == "factor":
            line["factors"]["w3"] = 0.5
        elif change == "loss":
            line["scores"][2][0] *= 0.9
        else:
            del line["factors"]["w3"]
        assert [*ScoreAudit(SCORER.memory).violations(changed)], change
    assert "cannot be read" in next(ScoreAudit(0.5).violations([("here", {"version": 1, "from": [["w"]], "scores": [[], "x", [1.0], []]})]))


def test_gradients_are_measured_with_a_small_step_of_the_same_factor_for_all() -> None:
    learner = Numbers(SIZE)
    learner.vector = torch.full((SIZE,), 0.5)
    cluster = Cluster(strategy_of(SyncPs(), 3), 3, updates=Updates(scorer=SCORER), learner=learner, scorer=Bowl())
    workers = [cluster.join(f"w{number}") for number in range(3)]
    slope = 1000 * (learner.vector - TARGET)
    line = play(cluster, workers, [slope, 0.5 * slope, -slope])
    assert line["factors"] == {"w1": pytest.approx(2 / 3, rel=0.01), "w2": 0.0}


def test_a_measurement_that_is_not_finite_is_a_bad_one() -> None:
    cluster, workers = cluster_of(3)
    line = play(cluster, workers, [*honest(cluster, 2, 0), torch.full((SIZE,), 3e38)])
    assert line["scores"][2][2] == 1e9
    assert line["factors"]["w2"] == 0


# --- the arithmetic -----------------------------------------------------------------------------------


def test_copies_are_near_one_another_and_far_from_the_rest() -> None:
    stack = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    stack[4] = stack[1] + 0.01 * stack[2]
    assert copies(stack) == [[1, 4]]
    assert copies(stack[:4]) == []
    assert copies(torch.ones(5, 500)) == [], "where all are the same, none is copied"
    assert copies(stack[[1, 4]]) == [], "of two nobody knows what is usual"


def test_a_worker_that_sends_the_same_twice_copies_nobody() -> None:
    measured = HeldOutLosses([0], 2.0, [1.0, 1.0, 1.0], [[0, 1]])
    assert improvements(measured, ["a", "a", "b"]) == {"a": 1.0, "b": 1.0}
    assert improvements(measured, ["a", "c", "b"]) == {"a": 0.5, "c": 0.5, "b": 1.0}


def test_the_first_measurements_count_alike_and_later_ones_fade() -> None:
    scores: dict[str, Score] = {}
    for value in (1.0, 0.0, 0.5):
        scores = renewed(scores, {"a": value}, 0.8)
    assert scores["a"] == Score(pytest.approx(0.5), 3)
    for _ in range(40):
        scores = renewed(scores, {"a": 1.0}, 0.8)
    assert scores["a"].value == pytest.approx(1, abs=1e-3)
    assert factors({"a": Score(0.05, 1), "b": Score(2.0, 1)}, ["a", "b", "new"]) == {"a": 0.0}
    assert factors({"a": Score(-1.0, 1)}, ["a"]) == {}


def test_with_sparse_differences_a_restarted_coordinator_has_the_same_weights() -> None:
    """What its replicas lacked is in no record: a worker that comes back is sent the weights themselves, once."""
    codec = TopKCodec(ratio=0.25, chunk=64, values="2-bit")
    cluster, workers = cluster_of(3, Updates(scorer=SCORER, codec=codec))
    for number in range(5):
        play(cluster, workers, honest(cluster, 3, number))
    other = Cluster(cluster.strategy, 3, updates=cluster.updates, learner=Numbers(SIZE), scorer=Never())
    for record, frames in cluster.records:
        other.carry_out(other.coordinator.replayed.apply(record, frames))
    assert torch.equal(other.learner.vector, cluster.learner.vector)
    back = other.join("w0", pull=False)
    fields, frames = other.coordinator.publisher.since(back.session, 4)
    assert fields["weights"] == "full"
    assert torch.equal(codecs.decode(codecs.PLAIN, SIZE, frames), cluster.learner.vector)
