"""Workers that leave for a while: the coordinator remembers what they say, and bounds it."""

from __future__ import annotations

from shoal.config.schema.strategy import SyncPs
from shoal.coordinator.members.table import MemberTable
from shoal.protocol.messages import LONGEST_REASON, PAUSED
from tests.support.small_cluster import Cluster, FakeWorker, strategy_of


def pause(cluster: Cluster, worker: FakeWorker, why: str) -> None:
    worker.protocol.stop(PAUSED + why)
    cluster.leave(worker)


def test_a_paused_worker_is_listed_until_it_returns_and_the_round_does_not_wait() -> None:
    cluster = Cluster(strategy_of(SyncPs(), 2), 2)
    a, b = cluster.join("a"), cluster.join("b")
    cluster.contribute(b)
    assert cluster.coordinator.state.version == 0
    pause(cluster, a, "its computer is in use")
    assert cluster.coordinator.state.version == 1, "the round closes with those that are here"
    assert cluster.coordinator.members.paused == {"a": "paused: its computer is in use"}
    assert "a is paused: its computer is in use" in cluster.notes
    cluster.join("a")
    assert cluster.coordinator.members.paused == {}


def test_a_worker_that_leaves_for_good_is_not_paused() -> None:
    cluster = Cluster(strategy_of(SyncPs(), 2), 2)
    worker = cluster.join("a")
    worker.protocol.stop("it has had enough")
    cluster.leave(worker)
    assert cluster.coordinator.members.paused == {}
    assert cluster.notes[-1] == "a left: it has had enough"


def test_what_a_worker_says_of_its_pause_is_plain_and_short() -> None:
    cluster = Cluster(strategy_of(SyncPs(), 2), 2)
    pause(cluster, cluster.join("a"), "\x1b[2J" + "x" * 2 * LONGEST_REASON)
    (said,) = cluster.coordinator.members.paused.values()
    assert said.isprintable()
    assert len(said) == 80


def test_the_list_of_paused_workers_is_bounded() -> None:
    members = MemberTable(1.0, most_sessions=3)
    for number in range(5):
        members.pause(f"w{number}", PAUSED)
    assert list(members.paused) == ["w2", "w3", "w4"]


def test_a_farewell_beside_a_step_ends_the_session() -> None:
    cluster = Cluster(strategy_of(SyncPs(), 2), 2)
    worker = cluster.join("a")
    worker.protocol.stop(PAUSED + "its computer is in use")
    answer = cluster.answers[cluster.ask(worker.protocol.farewell())]
    assert answer["kind"] == "goodbye"
    assert cluster.coordinator.members.by_name == {}
    assert worker.protocol.next_request(0.0) is None, "the thread that computes has nothing more to say"
