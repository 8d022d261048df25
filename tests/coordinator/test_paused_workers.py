"""Workers that leave for a while: the coordinator remembers what they say, and bounds it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shoal.config.schema.strategy import Async, SyncPs
from shoal.coordinator import Coordinator
from shoal.protocol.messages import LONGEST_REASON, PAUSED
from shoal.reporters.text_status import member_rows
from shoal.runs.monitoring.members import MemberOverview
from shoal.runs.monitoring.status import StatusWriter
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
    assert cluster.coordinator.state.away == {"a": "paused: its computer is in use"}
    assert "a is paused: its computer is in use" in cluster.notes
    cluster.join("a")
    assert cluster.coordinator.state.away == {}


def test_a_worker_that_leaves_for_good_is_not_paused() -> None:
    cluster = Cluster(strategy_of(SyncPs(), 2), 2)
    worker = cluster.join("a")
    worker.protocol.stop("it has had enough")
    cluster.leave(worker)
    assert cluster.coordinator.state.away == {}
    assert cluster.notes[-1] == "a left: it has had enough"


def test_what_a_worker_says_of_its_pause_is_plain_and_short() -> None:
    cluster = Cluster(strategy_of(SyncPs(), 2), 2)
    pause(cluster, cluster.join("a"), "\x1b[2J" + "x" * 2 * LONGEST_REASON)
    (said,) = cluster.coordinator.state.away.values()
    assert said.isprintable()
    assert len(said) == 80


def test_the_list_of_paused_workers_is_bounded() -> None:
    replayed = Cluster(strategy_of(SyncPs(), 2), 2).coordinator.replayed
    replayed.plan = replayed.plan._replace(bounds=replayed.plan.bounds._replace(sessions=3))
    for number in range(5):
        replayed.apply({"kind": "away", "worker": f"w{number}", "why": PAUSED}, ())
    assert list(replayed.state.away) == ["w2", "w3", "w4"]


def test_after_a_restart_no_round_waits_for_a_paused_worker() -> None:
    cluster = Cluster(strategy_of(SyncPs(), 2), 2)
    a, b = cluster.join("a"), cluster.join("b")
    cluster.step(a)
    cluster.step(b)
    pause(cluster, a, "its computer is in use")
    again = cluster.recovered()
    assert again.coordinator.state.away == {"a": "paused: its computer is in use"}
    again.step(again.join("b"))
    assert again.coordinator.state.version == 2, "the round closed at once"
    again.join("a")
    assert again.coordinator.state.away == {}


def status_of(coordinator: Coordinator, folder: Path) -> StatusWriter:
    recorder: Any = SimpleNamespace(run=None, directory=SimpleNamespace(path=folder))
    unused: Any = None
    return StatusWriter(recorder, coordinator, unused, MemberOverview(coordinator, None, lambda text: None), unused)


def test_after_a_restart_the_status_shows_who_has_paused_and_why(tmp_path: Path) -> None:
    cluster = Cluster(strategy_of(Async(), 1))
    worker = cluster.join("a")
    cluster.step(worker)
    pause(cluster, worker, "its computer is in use")
    coordinator = cluster.recovered().coordinator
    (_, shown) = member_rows({"members": [], "gone": status_of(coordinator, tmp_path).remember_gone([])})
    assert shown[:2] == ("a", "paused: its computer is in use")
    assert "1" in shown, "what it contributed before"


def test_the_status_tells_workers_that_left_from_those_that_vanished(tmp_path: Path) -> None:
    cluster = Cluster(strategy_of(Async(), 2), 2)
    polite, silent = cluster.join("a"), cluster.join("b")
    status = status_of(cluster.coordinator, tmp_path)
    status.remember_gone(status.members.read().rows)
    polite.protocol.stop("it has had enough")
    cluster.leave(polite)
    cluster.pass_time(1e6)
    assert silent.name not in cluster.coordinator.members.by_name
    rows = status.remember_gone(status.members.read().rows)
    assert {row["worker"]: row["state"] for row in rows} == {"a": "left", "b": "gone"}


def test_the_contributions_of_a_worker_are_counted_over_all_its_sessions() -> None:
    cluster = Cluster(strategy_of(Async(), 1))
    worker = cluster.join("a")
    cluster.step(worker)
    cluster.step(worker)
    pause(cluster, worker, "its computer is in use")
    assert cluster.step(cluster.join("a")) == "accepted"
    assert cluster.coordinator.state.accepted == {"a": 3}
    assert cluster.recovered().coordinator.state.accepted == {"a": 3}


def test_a_run_whose_workers_have_all_paused_rests() -> None:
    cluster = Cluster(strategy_of(Async(), 2), 2)
    members = MemberOverview(cluster.coordinator, None, cluster.notes.append)
    assert not members.read().rests, "workers have yet to join"
    a, b = cluster.join("a"), cluster.join("b")
    cluster.step(a)
    pause(cluster, a, "its computer is in use")
    assert not members.read().rests
    pause(cluster, b, "it runs on battery")
    assert members.read().rests
    cluster.join("a")
    (row,) = members.read().rows
    assert (row["worker"], row["accepted"], members.read().here, members.read().rests) == ("a", 1, 1, False)


def test_a_farewell_beside_a_step_ends_the_session() -> None:
    cluster = Cluster(strategy_of(SyncPs(), 2), 2)
    worker = cluster.join("a")
    worker.protocol.stop(PAUSED + "its computer is in use")
    answer = cluster.answers[cluster.ask(worker.protocol.farewell())]
    assert answer["kind"] == "goodbye"
    assert cluster.coordinator.members.by_name == {}
    assert worker.protocol.next_request(0.0) is None, "the thread that computes has nothing more to say"
