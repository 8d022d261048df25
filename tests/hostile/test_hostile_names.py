"""Names that nobody uses are free again, and a process that was replaced does not come back through a message that was late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.config.schema.strategy import Async
from shoal.coordinator.events import RequestReceived
from shoal.protocol.messages import PROTOCOL, Join
from tests.support.small_cluster import Cluster, FakeWorker, nameplate, strategy_of

ASYNC = strategy_of(Async(max_staleness=50))


def test_only_names_under_which_something_was_accepted_are_remembered() -> None:
    cluster = Cluster(ASYNC)
    ada, eve = cluster.join("ada"), cluster.join("eve")
    cluster.step(ada)
    cluster.leave(ada)
    cluster.leave(eve)
    cluster.pass_time(599.0)
    assert set(cluster.coordinator.state.keys) == {"ada", "eve"}
    cluster.pass_time(2.0)
    state = cluster.coordinator.state
    assert set(state.keys) == set(state.seats) == {"ada"}
    assert cluster.recovered().coordinator.state == state, "and it stays forgotten"
    other = cluster.answers[cluster.ask_in(Join("eve", PROTOCOL, {}, "", "cd" * 32))]
    assert other["name"] == "eve"
    assert cluster.answers[cluster.ask_in(Join("ada", PROTOCOL, {}, "", "cd" * 32))]["name"] == "ada-2"


def test_a_late_joining_of_a_dead_predecessor_does_not_evict_its_successor() -> None:
    cluster = Cluster(ASYNC)
    dead, alive = FakeWorker("ada", "first"), FakeWorker("ada", "second")
    cluster.hear(dead, cluster.say(dead))  # it signs, and dies; its answer is on its way
    for _ in range(2):
        cluster.hear(alive, cluster.say(alive))
    assert cluster.status(cluster.say(dead)) == "unknown-nonce"
    assert cluster.coordinator.members.by_name["ada"].session == alive.session


def test_a_challenge_does_not_wait_for_ever() -> None:
    cluster = Cluster(ASYNC)
    ada = FakeWorker("ada")
    cluster.hear(ada, cluster.say(ada))
    cluster.pass_time(61.0)
    assert cluster.hear(ada, cluster.say(ada))["reason"] == "unknown-nonce"
    assert [cluster.hear(ada, cluster.say(ada))["kind"] for _ in range(2)] == ["challenge", "welcome"]


def test_long_names_stay_names() -> None:
    cluster = Cluster(ASYNC)
    for number in range(3):
        answer = cluster.answers[cluster.ask_in(Join("a" * 64, PROTOCOL, {}, "", f"{number:064x}"))]
        assert len(answer["name"]) == 64
    assert answer["name"].endswith("a-3")


def test_a_crowd_does_not_fill_the_screen() -> None:
    cluster = Cluster(ASYNC)
    for number in range(400):
        cluster.leave(cluster.join(f"w{number}", pull=False))
        cluster.now += 0.01
    assert len(cluster.notes) < 300
    cluster.pass_time(10.0)
    cluster.join("ada")
    assert any("more workers came or went" in note for note in cluster.notes)


# --- a crowd that asks to be let in ---------------------------------------------------------------------------


def test_however_many_ask_for_a_challenge_nobodys_is_forgotten() -> None:
    cluster = Cluster(ASYNC)
    slow = FakeWorker("ada")
    cluster.hear(slow, cluster.say(slow))
    for number in range(5000):
        cluster.ask(Join(f"eve{number}", PROTOCOL, {}, "", "cd" * 32))
    assert cluster.hear(slow, cluster.say(slow))["kind"] == "welcome"


@pytest.mark.parametrize("change", [lambda nonce: "1" + nonce, lambda nonce: nonce[:-1] + "g", lambda nonce: "", lambda nonce: "--"])
def test_a_challenge_is_good_once_and_as_it_was_given(change: Callable[[str], str]) -> None:
    cluster = Cluster(ASYNC)
    asked = Join("ada", PROTOCOL, {}, "", nameplate("ada").key)
    nonce = cluster.answers[cluster.ask(asked)]["nonce"]
    proved = asked._replace(nonce=nonce, proof="0" * 128)
    assert cluster.status(cluster.ask(proved._replace(nonce=change(nonce)))) == "unknown-nonce"
    assert cluster.answers[cluster.ask(proved)]["kind"] == "welcome"
    assert cluster.status(cluster.ask(proved)) == "unknown-nonce", "it was recorded, and comes again"


def test_a_crowd_at_one_address_keeps_nobody_out_who_comes_from_another() -> None:
    cluster = Cluster(ASYNC)

    def come(name: str, address: str) -> str | None:
        def ask(asked: Join) -> int:
            cluster.calls += 1
            event = RequestReceived(cluster.calls, asked, (), f"session-{cluster.calls}", address=address)
            cluster.carry_out(cluster.coordinator.handle(event, cluster.now))
            return cluster.calls

        asked = Join(name, PROTOCOL, {}, "", nameplate(name).key)
        return cluster.status(ask(asked._replace(nonce=cluster.answers[ask(asked)]["nonce"], proof="0" * 128)))

    came = [come(f"eve{number}", f"2001:db8::{number:x}") for number in range(700)]
    assert "too-fast" in came, "an IPv6 network is one address"
    assert [come(f"ada{number}", "192.0.2.1") for number in range(50)] == [None] * 50


def test_a_free_name_is_looked_for_only_for_those_who_prove_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a crowd has come under names like it, that takes long."""
    cluster = Cluster(ASYNC)
    door, looked = cluster.coordinator.authenticator, list[str | None]()
    name_for = door.name_for
    monkeypatch.setattr(door, "name_for", lambda asked, state: (looked.append(asked.name), name_for(asked, state))[1])
    monkeypatch.setattr(door, "is_proved", lambda key, purpose, name, nonce, proof: proof == "0" * 128)
    asked = Join("ada", PROTOCOL, {}, "", nameplate("ada").key)
    nonce = cluster.answers[cluster.ask(asked)]["nonce"]
    assert cluster.status(cluster.ask(asked._replace(nonce="made up", proof="0" * 128))) == "unknown-nonce"
    assert cluster.status(cluster.ask(asked._replace(nonce=nonce, proof="1" * 128))) == "unproved"
    assert looked == []
    assert cluster.answers[cluster.ask(asked._replace(nonce=nonce, proof="0" * 128))]["kind"] == "welcome"
    assert looked == ["ada"]
