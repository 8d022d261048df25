"""Rounds of workers that mostly work alone: quorum and grace, late contributions, speeds, fragments. A clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.config.schema.strategy import DiLoCo
from shoal.config.schema.updates import Codec, Int4Codec, Int8Codec, NoCodec, TopKCodec, Updates
from shoal.coordinator import Coordinator
from shoal.coordinator.events import WorkerExited
from shoal.protocol.messages import Gone
from shoal.strategies import Policies
from shoal.updates import codecs
from shoal.updates.fragments import spans
from tests.support.small_cluster import Cluster, FakeWorker, Numbers, believing, strategy_of


def policy(expected: int, **settings: Any) -> Policies:
    return strategy_of(DiLoCo(**{"inner_steps": 8, "rounds": 100} | settings), expected)


def cluster_of(count: int, **settings: Any) -> tuple[Cluster, list[FakeWorker]]:
    cluster = Cluster(policy(count, **settings), count)
    return cluster, [cluster.join(f"w{number}") for number in range(count)]


# --- quorum and grace -----------------------------------------------------------------------------------


def test_without_a_quorum_a_round_waits_for_all() -> None:
    cluster, (one, two, three) = cluster_of(3)
    calls = [cluster.contribute(one), cluster.contribute(two)]
    cluster.pass_time(4.0)
    assert cluster.coordinator.state.version == 0
    calls.append(cluster.contribute(three))
    assert [cluster.status(call) for call in calls] == ["accepted"] * 3


def test_a_round_with_its_quorum_closes_after_the_grace_window() -> None:
    cluster, (one, two, _) = cluster_of(3, quorum=2, grace_s=3.0)
    cluster.contribute(one)
    cluster.pass_time(4.0)
    assert cluster.coordinator.state.version == 0
    cluster.contribute(two)
    cluster.pass_time(2.0)
    assert cluster.coordinator.state.version == 0
    cluster.pass_time(1.5)
    assert cluster.coordinator.state.version == 1


def test_who_missed_a_round_is_waited_for_again_when_there_is_a_sign_of_it() -> None:
    cluster, (one, two, three) = cluster_of(3, quorum=2, grace_s=3.0)

    def round_of(*workers: FakeWorker) -> None:
        for worker in workers:
            worker.round = cluster.coordinator.state.version
            cluster.contribute(worker)

    round_of(one, two)
    cluster.pass_time(3.5)
    assert cluster.coordinator.state.version == 1
    round_of(one, two)
    assert cluster.coordinator.state.version == 2, "it may be dead: nobody waits for it a second time"
    cluster.beat(three)
    round_of(one, two)
    assert cluster.coordinator.state.version == 2, "it lives"
    round_of(three)
    assert cluster.coordinator.state.version == 3
    assert [line[0] for line in cluster.ledger[-1]["from"]] == ["w0", "w1", "w2"]


def test_a_worker_that_comes_back_is_in_the_round_that_it_was_in() -> None:
    """It may have kept half of it. Whoever waits for its contribution goes on waiting while it gets ready."""
    cluster, (one, _) = cluster_of(2, round_timeout_s=60.0)
    waiting = cluster.contribute(one)
    back = cluster.join("w1", pull=False, instance="another process")
    cluster.pass_time(2.0)
    assert cluster.coordinator.state.version == 0
    cluster.pull(back)
    assert cluster.step(back) == cluster.status(waiting) == "accepted"
    assert [line[0] for line in cluster.ledger[0]["from"]] == ["w0", "w1"]


def test_only_the_round_that_it_was_in_waits_for_a_worker_that_gets_ready_again() -> None:
    cluster, (one, _) = cluster_of(2, round_timeout_s=60.0)
    call = cluster.contribute(one)
    back = cluster.join("w1", pull=False, instance="another process")
    for _ in range(20):
        cluster.pass_time(4.0)
        cluster.beat(back)
        cluster.beat(one)
    assert cluster.coordinator.state.version == 1, "its time was up"
    cluster.hear(one, call)
    assert cluster.step(one) == "accepted"
    assert cluster.coordinator.state.version == 2


def test_a_worker_that_comes_back_having_sent_is_not_waited_for() -> None:
    cluster, (one, two) = cluster_of(2)
    cluster.contribute(two)
    cluster.join("w1", pull=False, instance="another process")
    assert cluster.step(one) == "accepted"
    assert cluster.coordinator.state.version == 1


def test_whoever_comes_within_the_grace_window_is_in_the_round() -> None:
    cluster, workers = cluster_of(3, quorum=2, grace_s=3.0)
    for worker in workers[:2]:
        cluster.contribute(worker)
    cluster.pass_time(1.0)
    cluster.contribute(workers[2])
    assert cluster.coordinator.state.version == 1
    assert [line[0] for line in cluster.ledger[0]["from"]] == ["w0", "w1", "w2"]


def test_the_quorum_is_no_more_than_the_workers_that_are_here() -> None:
    cluster, (one, two, three) = cluster_of(3, quorum=2)
    call = cluster.contribute(one)
    cluster.contribute(two)
    cluster.hear(one, call)
    cluster.leave(two)
    cluster.leave(three)
    assert cluster.step(one) == "accepted"
    assert cluster.coordinator.state.version == 2


def test_a_worker_that_joins_in_mid_run_learns_the_round_and_is_waited_for() -> None:
    cluster, (one,) = cluster_of(1)
    for _ in range(3):
        assert cluster.step(one) == "accepted"
    call = cluster.contribute(one)
    assert cluster.coordinator.state.version == 4
    cluster.hear(one, call)
    two = cluster.join("late", pull=False)
    answer = cluster.pull(two)
    assert (answer["version"], answer["step"], answer["inner_steps"]) == (4, 4, 8)
    waiting = cluster.contribute(one)
    assert cluster.status(waiting) is None
    assert cluster.step(two) == "accepted"
    assert cluster.status(waiting) == "accepted"


# --- late ones ------------------------------------------------------------------------------------------


def test_who_joins_in_mid_round_is_asked_to_end_with_the_others() -> None:
    cluster, workers = cluster_of(3, quorum=2, grace_s=1.0)
    assert [cluster.answers[call]["inner_steps"] for call in cluster.answers if "inner_steps" in cluster.answers[call]] == [8] * 3
    for _ in range(2):
        cluster.pass_time(4.0)
        calls = [cluster.contribute(worker) for worker in workers]
        for worker, call in zip(workers, calls, strict=True):
            cluster.hear(worker, call)
    cluster.pass_time(3.0)
    assert cluster.pull(cluster.join("w3", pull=False))["inner_steps"] == 2, "they have a quarter of the round before them"
    for worker in workers:
        cluster.contribute(worker)
    assert cluster.pull(cluster.join("w4", pull=False))["inner_steps"] == 1, "they wait for it"


def test_who_is_known_to_be_gone_is_not_waited_for() -> None:
    cluster, (one, two, three) = cluster_of(3)
    cluster.contribute(one)
    cluster.contribute(two)
    assert cluster.coordinator.state.version == 0
    cluster.carry_out(cluster.coordinator.handle(WorkerExited("w2"), cluster.now))
    assert cluster.coordinator.state.version == 1
    assert cluster.status(cluster.contribute(three)) == "unknown-session", "it has to come back"
    assert not cluster.coordinator.handle(WorkerExited("stranger"), cluster.now)
    one, two, three = (cluster.join(name) for name in ("w0", "w1", "w2"))
    cluster.contribute(one)
    cluster.contribute(two)
    for key, kind in (("ab" * 32, "refused"), (three.protocol.identity.key, "goodbye")):
        gone = Gone("w2", key)
        nonce = cluster.answers[cluster.ask(gone)]["nonce"]
        told = cluster.ask(gone._replace(nonce=nonce, proof="0" * 128))
        assert cluster.answers[told]["kind"] == kind
    assert cluster.coordinator.state.version == 2
    assert "w2" not in cluster.coordinator.members.by_name


def test_a_late_contribution_is_dropped_and_its_worker_gets_the_new_weights() -> None:
    cluster, (one, two, three) = cluster_of(3, quorum=2)
    cluster.contribute(one)
    cluster.contribute(two)
    call = cluster.contribute(three)
    assert cluster.status(call) == "late"
    assert cluster.answers[call]["version"] == 1
    assert cluster.answers[call]["weights"] == "full"


def test_a_late_contribution_is_weighed_into_the_next_round_beside_the_workers_own() -> None:
    cluster, (one, two, three) = cluster_of(3, quorum=2, late="weigh", grace_s=1.0)
    for worker in (one, two):
        worker.seq_call = cluster.contribute(worker)  # type: ignore[attr-defined]
    cluster.pass_time(1.5)
    assert cluster.coordinator.state.version == 1
    before = cluster.learner.vector.clone()
    late = cluster.contribute(three, 4.0)
    assert cluster.status(late) == "accepted"
    cluster.hear(three, late)
    cluster.contribute(three, 1.0)
    for worker in (one, two):
        cluster.hear(worker, worker.seq_call)  # type: ignore[attr-defined]
        cluster.contribute(worker, 1.0)
    cluster.pass_time(1.5)
    assert cluster.coordinator.state.version == 2
    shares = {(line[0], line[1]): line[3] for line in cluster.ledger[1]["from"]}
    assert shares == {("w0", 1): 1.0, ("w1", 1): 1.0, ("w2", 0): 0.5, ("w2", 1): 1.0}
    moved = (before - cluster.learner.vector) / 0.25
    assert torch.allclose(moved, torch.full((4,), (1 + 1 + 0.5 * 4 + 1) / 4))


def test_a_quorum_of_one_with_late_ones_weighed_is_asynchronous() -> None:
    cluster, workers = cluster_of(4, quorum=1, late="weigh")
    for _ in range(3):
        for worker in workers:
            assert cluster.step(worker) == "accepted"
    assert cluster.coordinator.state.version == 12
    lags = [line["version"] - 1 - line["from"][0][2] for line in cluster.ledger]
    assert lags == [0, 1, 2, 3] + [3] * 8
    assert [line["from"][0][3] for line in cluster.ledger] == [1 / (1 + lag) for lag in lags]


def test_late_contributions_survive_a_crash() -> None:
    cluster, (one, two, three) = cluster_of(3, quorum=2, late="weigh")
    cluster.contribute(one)
    cluster.contribute(two)
    cluster.contribute(three, 3.0)
    again = cluster.recovered()
    assert torch.equal(again.learner.vector, cluster.learner.vector)
    assert [key for there in again.coordinator.rounds.open.values() for key in there.held] == [("w2", 0)]


# --- speeds ---------------------------------------------------------------------------------------------


def test_a_slower_worker_is_asked_for_fewer_steps() -> None:
    cluster, (fast, slow, slowest) = cluster_of(3, balance_speeds=True)
    calls: list[int] = []
    for _ in range(4):
        calls = []
        for worker, wait in ((fast, 0.5), (slow, 0.5), (slowest, 10.0)):
            cluster.now += wait
            calls.append(cluster.contribute(worker))
        for worker, call in zip((fast, slow, slowest), calls, strict=True):
            cluster.hear(worker, call)
    asked = [cluster.answers[call]["inner_steps"] for call in calls]
    assert asked == [8, 4, 1]


def test_equal_workers_all_take_the_full_number() -> None:
    cluster, workers = cluster_of(2, balance_speeds=True)
    calls: list[int] = []
    for _ in range(3):
        cluster.now += 5.0
        calls = [cluster.contribute(worker, batches=1) for worker in workers]
        for worker, call in zip(workers, calls, strict=True):
            cluster.hear(worker, call)
    assert [cluster.answers[call]["inner_steps"] for call in calls] == [8, 8]


# --- fragments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([4, 4, 4, 4], 2, ((0, 8), (8, 16))),
        ([10, 1, 1], 3, ((0, 10), (10, 11), (11, 12))),
        ([1, 1, 10], 2, ((0, 2), (2, 12))),
        ([5], 1, ((0, 5),)),
    ],
)
def test_fragments_are_whole_tensors_of_about_equal_size(sizes: list[int], count: int, expected: Any) -> None:
    assert spans(sizes, count) == expected


class InTurn(Numbers):
    """Plain descent on one fragment after the other."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts[-1][1])
        self.parts, self.steps = parts, 0

    def apply(self, update: torch.Tensor, buffers: torch.Tensor, step: float, share: float) -> dict[str, float]:
        start, end = self.parts[self.steps % len(self.parts)]
        self.vector[start:end] -= update * share
        self.steps += 1
        return {}


@pytest.mark.parametrize("codec", [NoCodec(), Int8Codec(), Int4Codec(), TopKCodec(ratio=0.1)], ids=lambda codec: codec.kind)
def test_only_a_fragment_travels_in_either_direction(codec: Codec) -> None:
    parts = spans([600, 300, 300], 2)
    updates = Updates(codec=codec)
    cluster = Cluster(policy(1, fragments=2), 1, updates=updates, learner=InTurn(parts))
    cluster.coordinator = believing(Coordinator(cluster.plan._replace(spans=parts), cluster.strategy, cluster.learner))
    worker = cluster.join("w")
    base = torch.zeros(1200)
    for number in range(6):
        start, end = parts[number % 2]
        sent = torch.linspace(-1, 1, end - start) * (number + 1)
        call = cluster.contribute(worker, frames=codecs.encode(codec, sent, None))
        answer, frames = cluster.answers[call], cluster.frames[call]
        assert answer["span"] == [start, end]
        assert sum(memoryview(frame).nbytes for frame in frames) <= 4 * (end - start)
        part = base[start:end]
        if answer["weights"] == "full":
            codecs.decode(NoCodec(), end - start, frames, out=part)
        elif answer["weights"] == "changes":
            codecs.apply_changes(part, frames)
        else:
            codecs.decode_into(codec, end - start, frames, part, 1.0)
        cluster.hear(worker, call)
        near = 0.2 if codec.kind == "int4" else 0.02
        assert torch.allclose(base, cluster.learner.vector, atol=near * (number + 1))
    assert float(base.abs().sum()) > 0


def test_a_contribution_of_the_wrong_fragment_is_malformed() -> None:
    parts = spans([600, 300], 2)
    cluster = Cluster(policy(1, fragments=2), 1, learner=InTurn(parts))
    cluster.coordinator = believing(Coordinator(cluster.plan._replace(spans=parts), cluster.strategy, cluster.learner))
    worker = cluster.join("w")
    assert cluster.status(cluster.contribute(worker, frames=codecs.encode(NoCodec(), torch.ones(300), None))) == "malformed"
