"""How a worker stands is known again when the coordinator was killed and has come back, and when the worker has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.rounds.plausibility import MOST_UNRECORDED
from shoal.coordinator.turn import Turn
from shoal.errors import ShoalError
from shoal.protocol.identities import Identity
from tests.support.eventually import eventually
from tests.support.live_coordinator import Honest, Live


@pytest.fixture
def living(tmp_path: Path) -> Iterator[Callable[..., Live]]:
    with contextlib.ExitStack() as ending:

        def make(**options: Any) -> Live:
            made = Live(tmp_path, **options)
            ending.callback(made.end)
            return made

        yield make


def nothing(live: Live) -> None:
    """All goes on."""


def restarted(live: Live) -> None:
    live.restart()


def restarted_from_a_snapshot(live: Live) -> None:
    live.in_its_thread(live.driver.snapshot)
    live.restart()


@pytest.mark.parametrize("happens", [restarted, restarted_from_a_snapshot])
def test_who_is_in_quarantine_stays_there(living: Callable[..., Live], happens: Callable[[Live], None]) -> None:
    live, identity = living(units=True), Identity.new()
    ada, eve = Honest(live, "ada"), Honest(live, "eve", identity)
    assert ada.manage() == "accepted"
    for _ in range(live.bounds.failures):
        eve.fail()
    assert "eve" not in live.coordinator.members.by_name
    happens(live)
    with pytest.raises(ShoalError, match="failed what others manage, and may come back in"):
        Honest(live, "eve", identity)
    assert Honest(live, "ada", ada.protocol.identity).manage() == "accepted"


@pytest.mark.parametrize("happens", [nothing, restarted, restarted_from_a_snapshot])
def test_failures_in_a_row_are_counted_over_leaving_and_coming_back(living: Callable[..., Live], happens: Callable[[Live], None]) -> None:
    live, identity, key = living(units=True), Identity.new(), Identity.new()
    assert Honest(live, "ada", key).manage() == "accepted"
    eve = Honest(live, "eve", identity)
    for _ in range(live.bounds.failures - 1):
        eve.fail()
    eve.leave()
    happens(live)
    ada, eve = Honest(live, "ada", key), Honest(live, "eve", identity)
    assert ada.manage() == "accepted"
    eve.fail()
    assert live.coordinator.state.quarantined == {"eve": ""}
    eventually(lambda: any("eve failed 5 units in a row that others manage" in note for note in live.notes))


def test_who_is_let_in_again_is_so_after_a_restart_and_one_result_clears_a_name(living: Callable[..., Live]) -> None:
    live, identity = living(units=True), Identity.new()

    def keep() -> None:
        turn = Turn(0.0, live.coordinator.replayed, {})
        turn.record({"kind": "quarantined", "worker": "eve", "guest": "", "out": True})
        turn.record({"kind": "blamed", "worker": "ada", "failed": 4})
        turn.record({"kind": "quarantined", "worker": "eve", "guest": "", "out": False})
        live.driver._carry_out(turn.effects)

    live.in_its_thread(keep)
    assert Honest(live, "ada").manage() == "accepted"
    live.restart()
    assert Honest(live, "eve", identity).manage() == "accepted"
    assert (live.coordinator.state.quarantined, live.coordinator.state.failures) == ({}, {})


@pytest.mark.parametrize("happens", [restarted, restarted_from_a_snapshot])
def test_how_far_a_worker_has_come_is_known_though_much_was_turned_away(
    living: Callable[..., Live], happens: Callable[[Live], None]
) -> None:
    live, identity = living(), Identity.new()
    worker = Honest(live, "ada", identity)
    assert worker.step() == "accepted"
    for seq in range(1, 4 * MOST_UNRECORDED):
        assert worker.claim(seq=seq, position=1)["status"] == "overtaken"
    happens(live)
    again = Honest(live, "ada", identity)
    assert again.claim(seq=2**53)["reason"] == "misplaced"
    again = Honest(live, "ada", identity)
    assert again.claim(seq=4 * MOST_UNRECORDED, position=2)["status"] == "accepted", "no number that it cannot have come to"
