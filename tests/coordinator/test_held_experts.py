"""A worker that holds some of the experts is a stranger like any other: what it says is checked, and what it sends must fit that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.config.schema.strategy import SyncPs
from shoal.config.schema.updates import Krum, NearestNeighbours, Updates
from shoal.coordinator import Coordinator
from shoal.coordinator.rounds import weights_publisher as publisher
from shoal.coordinator.run_plan import RelayPlace
from shoal.errors import ShoalError
from shoal.runs.worker_run import JoinedWorker
from shoal.updates.experts import ExpertBlocks
from tests.support.small_cluster import Cluster, FakeWorker, encoded, strategy_of

BLOCKS = ExpertBlocks((((1, 2),), ((2, 3),)), layers=1, per_token=1, size=4)
"""Four numbers: the second and the third are experts."""


class Mixture(Cluster):
    """Two workers, and a model with two experts."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.plan = self.plan._replace(experts=BLOCKS)
        believes = self.coordinator.authenticator.is_proved
        self.coordinator = Coordinator(self.plan, self.strategy, self.learner)
        self.coordinator.authenticator.is_proved = believes  # type: ignore[method-assign]

    def hold(self, worker: FakeWorker, *experts: int) -> Any:
        worker.protocol.experts = experts
        return self.answers[self.say(worker)]


def mixture() -> Mixture:
    return Mixture(strategy_of(SyncPs(), 2), 2)


def holder(cluster: Mixture, name: str, *experts: int) -> FakeWorker:
    worker = cluster.join(name, pull=False)
    worker.protocol.on_answer(cluster.hold(worker, *experts))
    cluster.pull(worker)
    return worker


def test_an_expert_moves_by_its_holders_and_the_trunk_by_all() -> None:
    cluster = mixture()
    one, other = holder(cluster, "a", 0), holder(cluster, "b", 1)
    cluster.contribute(one, frames=encoded(4.0, 8.0, 4.0))
    cluster.contribute(other, frames=encoded(8.0, 16.0, 0.0))
    torch.testing.assert_close(cluster.learner.vector, torch.tensor([-1.5, -2.0, -4.0, -0.5]))
    assert [line[9] for line in cluster.ledger[-1]["from"]] == [[0], [1]]


def test_what_is_pulled_is_as_long_as_what_is_held() -> None:
    cluster = mixture()
    worker = cluster.join("a", pull=False)
    answer = cluster.hold(worker, 1)
    assert answer["size"] == 3
    worker.protocol.on_answer(answer)
    call = cluster.say(worker)
    assert sum(len(bytes(frame)) for frame in cluster.frames[call]) == 3 * 4


def test_experts_that_do_not_exist_are_refused() -> None:
    cluster = mixture()
    worker = cluster.join("a", pull=False)
    for wrong in ((2,), (1, 0), (0, 0)):
        answer = cluster.hold(worker, *wrong)
        assert (answer["kind"], answer["reason"]) == ("refused", "unfit")
    assert any("cannot hold experts" in note for note in cluster.notes)


COMPARES = Updates(aggregation=Krum())
REFUSALS = (
    ({"experts": None}, "the model of this run has no experts"),
    ({"updates": COMPARES}, "the rule of this run compares contributions"),
    ({"updates": Updates(memory=0.9)}, "the rule of this run compares contributions"),
    ({"updates": Updates(mixing=NearestNeighbours())}, "the rule of this run compares contributions"),
    ({"spans": ((0, 2), (2, 4))}, "this run exchanges its weights in fragments"),
    ({"above": RelayPlace(0, 1, 10)}, "this is a relay"),
    ({"experts": BLOCKS._replace(per_token=2)}, "each token visits 2 experts"),
)


@pytest.mark.parametrize(("changed", "reason"), REFUSALS)
def test_a_run_that_needs_all_experts_of_a_worker_says_why_to_both(changed: dict[str, Any], reason: str) -> None:
    cluster = mixture()
    worker = cluster.join("a", pull=False)
    cluster.coordinator.checks.plan = cluster.plan._replace(**changed)
    answer = cluster.hold(worker, 0)
    assert (answer["kind"], answer["reason"]) == ("refused", "unfit")
    assert reason in answer["detail"]
    assert any(f"a cannot hold experts 0: {reason}" in note for note in cluster.notes)
    assert cluster.hold(worker, 0)["kind"] == "refused", "asking again changes nothing"


def test_sets_of_experts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "MOST_SETS", 1)
    cluster = mixture()
    holder(cluster, "a", 0)
    other = cluster.join("b", pull=False)
    assert "different sets of experts already: take one of theirs" in cluster.hold(other, 1)["detail"]
    assert cluster.hold(other, 0)["kind"] == "held"


def test_through_a_database_a_worker_holds_all_experts() -> None:
    joined: Any = object.__new__(JoinedWorker)
    joined.connections = [object()]
    with pytest.raises(ShoalError, match="through a database all workers read the same weights"):
        joined._announce_experts((0, 1))


def test_other_experts_than_those_that_were_named_are_refused() -> None:
    cluster = mixture()
    worker = holder(cluster, "a", 0)
    assert cluster.status(cluster.contribute(worker, frames=encoded(1.0, 1.0, 1.0, 1.0))) == "malformed"


def test_who_has_begun_with_all_weights_cannot_hold_fewer() -> None:
    cluster = mixture()
    worker = cluster.join("a")
    assert cluster.hold(worker, 0)["reason"] == "unfit"


def test_a_journal_leads_to_the_same_weights() -> None:
    cluster = mixture()
    one, other = holder(cluster, "a", 0), holder(cluster, "b", 1)
    cluster.contribute(one, frames=encoded(4.0, 8.0, 4.0))
    cluster.contribute(other, frames=encoded(8.0, 16.0, 0.0))
    again = mixture()
    for record, frames in cluster.records:
        again.coordinator.replayed.apply(record, frames)
    assert torch.equal(again.learner.vector, cluster.learner.vector)
    assert cluster.learner.vector.any()


def test_sets_of_experts_that_nobody_holds_any_more_take_no_room() -> None:
    cluster = mixture()
    worker = holder(cluster, "a", 0)
    cluster.leave(worker)
    assert not cluster.coordinator.replies.publisher._publishers
