"""The owner's orders: a run that is held up makes nothing and loses nothing, and whoever is kept out stays out, whatever dies."""

from __future__ import annotations

import pytest

from shoal.config.schema.strategy import Async, SyncPs
from shoal.protocol.messages import ACTIONS, BadMessage, OwnerCommand, parse
from shoal.worker.session import SessionEndedError
from tests.support.small_cluster import Cluster, strategy_of

OWNER = "ab" * 32
ASYNC = strategy_of(Async(max_staleness=50))


def owned(policies: object = ASYNC, expected: int = 1) -> Cluster:
    cluster = Cluster(policies, expected)  # type: ignore[arg-type]
    cluster.coordinator.owner_commands.plan = cluster.plan = cluster.plan._replace(owner_key=OWNER)
    return cluster


def order(cluster: Cluster, action: str, name: str | None = None) -> dict:
    asked = OwnerCommand(action, name, OWNER)
    nonce = cluster.answers[cluster.ask(asked)]["nonce"]
    return dict(cluster.answers[cluster.ask(asked._replace(nonce=nonce, proof="0" * 128))])


@pytest.mark.parametrize("strategy", [ASYNC, strategy_of(SyncPs(round_timeout_s=10.0), 2)], ids=["async", "syncps"])
def test_a_paused_run_takes_what_comes_and_makes_no_version_until_it_goes_on(strategy: object) -> None:
    cluster = owned(strategy, expected=2)
    a, b = cluster.join("a"), cluster.join("b")
    assert order(cluster, "pause")["kind"] == "done"
    calls = [cluster.contribute(a), cluster.contribute(b)]
    assert [cluster.status(call) for call in calls] == [None, None]
    cluster.pass_time(5.0)
    assert [cluster.status(call) for call in calls] == ["wait", "wait"], "they hear in time that they wait"
    for worker, call in zip((a, b), calls, strict=True):
        cluster.hear(worker, call)
    again = [cluster.contribute(worker, again=True) for worker in (a, b)]
    assert cluster.coordinator.state.version == 0
    order(cluster, "resume")
    assert [cluster.status(call) for call in again] == ["accepted", "accepted"]
    assert cluster.coordinator.state.version >= 1
    assert sorted(one[0] for line in cluster.ledger for one in line["from"]) == ["a", "b"], "each once"


def test_a_pause_outlives_the_coordinator() -> None:
    cluster = owned()
    order(cluster, "pause")
    again = cluster.recovered()
    assert again.coordinator.state.paused
    worker = again.join("a")
    assert again.status(again.contribute(worker)) is None
    assert again.coordinator.state.version == 0


def test_who_is_kept_out_is_told_and_stays_out_after_a_crash_until_it_is_let_in() -> None:
    cluster = owned()
    eve, ada = cluster.join("eve"), cluster.join("ada")
    cluster.step(eve)
    assert "keeps eve out" in order(cluster, "evict", "eve")["text"]
    assert cluster.status(cluster.contribute(eve)) == "unknown-session"
    for there in (cluster, cluster.recovered()):
        with pytest.raises(SessionEndedError, match="the run's owner keeps eve out"):
            there.join("eve")
    assert cluster.step(ada) == "accepted"
    order(cluster, "readmit", "eve")
    assert cluster.step(cluster.join("eve")) == "accepted"
    assert [line for line in cluster.ledger if "evicted" in line] == [{"evicted": "eve", "out": True}, {"evicted": "eve", "out": False}]


def test_an_order_about_nobody_is_refused_by_name() -> None:
    cluster = owned()
    cluster.join("ada")
    answer = order(cluster, "evict", "eve")
    assert (answer["reason"], "ada" in answer["detail"]) == ("unknown-worker", True)


def test_to_stop_is_to_end_saved() -> None:
    cluster = owned()
    order(cluster, "stop")
    assert cluster.coordinator.owner_commands.stops


@pytest.mark.parametrize("action", ACTIONS)
def test_nobody_but_the_owner_gives_orders(action: str) -> None:
    cluster = owned()
    stranger = OwnerCommand(action, None, "cd" * 32, "1", "0" * 128)
    assert cluster.status(cluster.ask(stranger)) == "unproved"
    replayed = OwnerCommand(action, None, OWNER, "session-1", "0" * 128)
    assert cluster.status(cluster.ask(replayed)) == "unknown-nonce"
    assert not cluster.coordinator.state.paused
    assert not cluster.coordinator.owner_commands.stops


def test_what_is_no_order_is_no_message() -> None:
    header = {"kind": "order", "action": "delete", "name": None, "key": OWNER, "nonce": "", "proof": ""}
    with pytest.raises(BadMessage, match="action"):
        parse(header)
