"""A worker's side of the conversation: what it says next, whatever it hears."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.protocol.identities import is_proved
from shoal.protocol.messages import PROTOCOL, Claim, Contribute, Fail, GiveBack, Join, Leave, Pull, SeatAssigned
from shoal.worker.session import ANSWER_S, ContributionReceipt, LeasedUnit, RunNews, SessionEndedError, WorkerSession

WELCOME = {"kind": "welcome", "session": "s", "name": "w", "size": 10, "seat": 2, "epoch": 1, "position": 4, "last_seq": 6, "version": 3}
STANDS = {"version": 3, "step": 3.0, "most_lag": 9.0, "done": False}
MADE = Contribute("", 0, 0, 3, 0, 1.0, 2, 1, 5, 1, -1, {})


def asked(protocol: WorkerSession, now: float = 0.0) -> Any:
    question = protocol.next_request(now)
    return None if question is None else question.asked


def joined(**welcome: Any) -> WorkerSession:
    """A worker with weights of version 3."""
    protocol = WorkerSession(None, {}, PROTOCOL, "i", patience_s=100.0)
    key = protocol.identity.key
    assert asked(protocol) == Join(None, PROTOCOL, {}, "i", key)
    assert protocol.on_answer({"kind": "challenge", "nonce": "n"}) == []
    proved = asked(protocol)
    assert is_proved(key, "join", "", "n", proved.proof)
    assert proved == Join(None, PROTOCOL, {}, "i", key, "n", proved.proof)
    assert protocol.on_answer(WELCOME | welcome) == [SeatAssigned(2, 1, 4)]
    assert asked(protocol) is None, "it prepares itself"
    protocol.ready = True
    assert asked(protocol) == Pull("s", 1, -1)
    (news,) = protocol.on_answer({"kind": "weights", "weights": "full"} | STANDS)
    assert isinstance(news, RunNews)
    assert news.afresh
    return protocol


def receipt(status: str, **more: Any) -> dict[str, Any]:
    return {"kind": "receipt", "status": status, "seq": 7, "round": 3, "weights": "same"} | STANDS | more


def test_a_contribution_is_numbered_and_its_answer_settles_it() -> None:
    protocol = joined()
    protocol.contribute(MADE, (b"x",), pulls=True)
    question = protocol.next_request(0.0)
    assert question is not None
    assert question.asked == MADE._replace(session="s", number=2, seq=7, round=3, have=3)
    assert question.frames == (b"x",)
    first, second = protocol.on_answer(receipt("accepted", version=4, round=4))
    assert isinstance(first, ContributionReceipt)
    assert first[1:] == ("accepted", 4, 7, "", "")
    assert isinstance(second, RunNews)
    assert not second.afresh
    assert (protocol.round, protocol.have, asked(protocol)) == (4, 4, None)


def test_what_was_not_answered_is_asked_again_under_a_new_number() -> None:
    protocol = joined()
    protocol.contribute(MADE, (b"x",), pulls=False)
    numbers = [asked(protocol).number]
    for pause in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        retry = protocol.on_no_answer(1.0, "gone")
        assert retry.pause_s == pause
        assert bool(retry.message) == (pause >= 0.4)
        numbers.append(asked(protocol).number)
    assert numbers == sorted(set(numbers))
    protocol.on_answer(receipt("accepted"))
    protocol.contribute(MADE, (), pulls=False)
    asked(protocol)
    assert protocol.on_no_answer(1.0, "gone").pause_s == 0.1, "an answer came in between"


def test_patience_ends() -> None:
    protocol = joined()
    protocol.contribute(MADE, (), pulls=False)
    protocol.next_request(5.0)
    protocol.on_no_answer(50.0, "gone")
    with pytest.raises(ShoalError, match="has not answered for 101 s: gone"):
        protocol.on_no_answer(106.0, "gone")


def test_a_worker_that_is_asked_to_stop_does_not_wait_for_a_coordinator_that_is_gone() -> None:
    protocol = joined()
    protocol.contribute(MADE, (), pulls=False)
    protocol.next_request(0.0)
    protocol.stop()
    protocol.on_no_answer(1.0, "gone")
    assert isinstance(asked(protocol, 1.0), Contribute)
    protocol.on_no_answer(6.0, "gone")
    assert asked(protocol, 6.0) is None
    assert protocol.left


def test_all_weights_have_time_to_come_over_a_slow_link() -> None:
    protocol = joined(size=10_000_000)
    protocol.contribute(MADE, (bytes(1000),), pulls=True)
    question = protocol.next_request(0.0)
    assert question is not None
    assert question.timeout_s > 4 * 10_000_000 / (10e6 / 8)  # 10 Mbit/s
    fresh = WorkerSession(None, {}, PROTOCOL, "i", patience_s=0.2).next_request(0.0)
    assert fresh is not None
    assert fresh.timeout_s == 0.2 < ANSWER_S, "nothing large comes with a welcome, and a short patience is short"


def test_a_coordinator_that_forgot_the_session_is_joined_again_and_sent_the_rest() -> None:
    protocol = joined()
    protocol.contribute(MADE, (b"x",), pulls=True)
    asked(protocol)
    assert protocol.on_answer({"kind": "refused", "reason": "unknown-session"}) == []
    assert asked(protocol) == Join("w", PROTOCOL, {}, "i", protocol.identity.key)
    assert protocol.on_answer(WELCOME | {"session": "t", "epoch": 1, "position": 4}) == []
    assert asked(protocol) == Pull("t", 3, -1)
    (news,) = protocol.on_answer({"kind": "weights", "weights": "full"} | STANDS | {"version": 9})
    assert isinstance(news, RunNews)
    again = protocol.next_request(0.0)
    assert again is not None
    assert (again.asked.seq, again.asked.have, again.frames) == (7, 9, (b"x",))  # type: ignore[union-attr]


def test_what_it_had_taken_is_asked_for_without_being_sent_again() -> None:
    protocol = joined()
    protocol.contribute(MADE, (b"x",), pulls=True)
    asked(protocol)
    protocol.on_answer({"kind": "refused", "reason": "unknown-session"})
    asked(protocol)
    assert protocol.on_answer(WELCOME | {"session": "t", "last_seq": 7, "position": 5}) == []
    question = protocol.next_request(0.0)
    assert question is not None
    assert isinstance(question.asked, Contribute)
    assert question.frames == ()


def test_a_coordinator_that_comes_back_without_what_its_seal_confirmed_is_told_of() -> None:
    protocol = joined()
    protocol.contribute(MADE, (b"x",), pulls=True)
    asked(protocol)
    first, _ = protocol.on_answer(receipt("accepted", round=4, digest="d", seal="s"))
    assert isinstance(first, ContributionReceipt)
    assert (first.digest, first.seal) == ("d", "s")
    protocol.session = ""
    asked(protocol)
    protocol.on_answer(WELCOME | {"session": "t", "last_seq": 7})
    assert protocol.forgotten == ""
    protocol.session = ""
    asked(protocol)
    protocol.on_answer(WELCOME | {"session": "u", "last_seq": 6})
    assert "confirmed contribution 7 of w, and has come back without it" in protocol.forgotten


@pytest.mark.parametrize("welcome", [{"seat": 5}, {"position": 5}])
def test_what_others_learned_from_meanwhile_is_not_sent(welcome: dict[str, int]) -> None:
    protocol = joined()
    protocol.contribute(MADE, (b"x",), pulls=True)
    asked(protocol)
    protocol.on_answer({"kind": "refused", "reason": "unknown-session"})
    asked(protocol)
    told = WELCOME | {"session": "t"} | welcome
    assert protocol.on_answer(told) == [SeatAssigned(told["seat"], told["epoch"], told["position"])]
    assert isinstance(asked(protocol), Pull)
    protocol.on_answer({"kind": "weights", "weights": "full"} | STANDS)
    assert asked(protocol) is None
    assert protocol.seq == 8, "its number is not used again"


def test_a_worker_waits_for_its_round_without_sending_again_unless_it_is_to_stop() -> None:
    protocol = joined()
    protocol.contribute(MADE, (b"x",), pulls=True)
    asked(protocol)
    assert protocol.on_answer(receipt("wait")) == []
    question = protocol.next_request(0.0)
    assert question is not None
    assert (question.asked.seq, question.frames) == (7, ())  # type: ignore[union-attr]
    protocol.stop()
    first, _ = protocol.on_answer(receipt("wait"))
    assert isinstance(first, ContributionReceipt)
    assert first.status == "accepted"


def test_the_next_round_follows_the_last_one_taken_and_is_never_a_closed_one() -> None:
    for status, open_round, expected in (("accepted", 3, 4), ("accepted", 9, 9), ("late", 5, 5), ("stale", 3, 3), ("ahead", 2, 2)):
        protocol = joined()
        protocol.contribute(MADE, (), pulls=True)
        asked(protocol)
        protocol.on_answer(receipt(status, round=open_round))
        assert protocol.round == expected, status


def test_refusals_that_will_not_change_end_the_conversation() -> None:
    for reason in ("replayed", "too-fast", "asked-again"):
        protocol = joined()
        protocol.contribute(MADE, (), pulls=True)
        asked(protocol)
        assert protocol.on_answer({"kind": "refused", "reason": reason}) == []
        assert isinstance(asked(protocol), Contribute)
    with pytest.raises(SessionEndedError, match="you sent nonsense"):
        protocol.on_answer({"kind": "refused", "reason": "malformed", "detail": "you sent nonsense"})


def test_a_unit_is_claimed_and_returned_before_anything_else_is_said() -> None:
    protocol = joined()
    protocol.claim()
    assert asked(protocol) == Claim("s", 2, 3)
    (news,) = protocol.on_answer({"kind": "lease", "unit": -1, "weights": "same"} | STANDS)
    assert isinstance(news, RunNews)
    assert asked(protocol) is None, "the worker looks at the news first"
    protocol.claim()
    assert asked(protocol) == Claim("s", 3, 3)
    _, unit = protocol.on_answer({"kind": "lease", "unit": 8, "epoch": 1, "start": 4, "batches": 2, "weights": "same"} | STANDS)
    assert unit == LeasedUnit(8, 3, 1, 4, 2)
    assert asked(protocol) is None
    protocol.give_back(8)
    protocol.fail(9, "x" * 1000)
    protocol.leave()
    assert asked(protocol) == GiveBack("s", 4, 8)
    protocol.on_answer({"kind": "noted"})
    assert asked(protocol) == Fail("s", 5, 9, "x" * 500)
    protocol.on_answer({"kind": "noted"})
    assert asked(protocol) == Leave("s", 6)
    protocol.on_answer({"kind": "goodbye"})
    assert asked(protocol) is None


def test_a_sign_of_life_tells_if_the_run_is_over_and_which_units_still_count() -> None:
    protocol = joined()
    beats = [protocol.heartbeat("computing", {"samples": 3}) for _ in range(2)]
    assert [(beat.session, beat.number, beat.state, beat.figures) for beat in beats] == [
        ("s", 1, "computing", {"samples": 3}),
        ("s", 2, "computing", {"samples": 3}),
    ]
    protocol.on_heartbeat_answer({"kind": "refused", "reason": "unknown-session"})
    assert (protocol.done, protocol.oldest) == (False, -1)
    protocol.on_heartbeat_answer({"kind": "pulse", "done": True, "oldest": 8})
    assert (protocol.done, protocol.oldest) == (True, 8)


def test_a_goodbye_that_is_lost_is_not_said_again() -> None:
    protocol = joined()
    protocol.leave()
    asked(protocol)
    assert protocol.on_no_answer(1.0, "gone").pause_s == 0.0
    assert asked(protocol) is None


def test_a_worker_that_gives_up_asks_nothing_more() -> None:
    protocol = joined()
    protocol.contribute(MADE, (), pulls=True)
    asked(protocol)
    assert protocol.waits
    protocol.give_up()
    assert protocol.on_no_answer(1.0, "gone").pause_s == 0.0
    assert asked(protocol) is None


def test_a_worker_that_cannot_go_on_says_why_and_waits_no_longer_than_for_a_word() -> None:
    protocol = joined()
    protocol.welcome["size"] = 10**9
    protocol.leave("x" * 1000)
    question = protocol.next_request(0.0)
    assert question is not None
    assert question.asked == Leave("s", 2, "x" * 500)
    assert question.timeout_s == ANSWER_S


def test_a_worker_that_is_asked_to_stop_does_not_join_a_coordinator_that_came_back() -> None:
    """Its successor may be there already, under the same name and with the same key."""
    protocol = joined()
    protocol.contribute(MADE, (b"x",), pulls=True)
    asked(protocol)
    protocol.stop()
    protocol.on_answer({"kind": "refused", "reason": "unknown-session"})
    assert protocol.left
    assert protocol.next_request(0.0) is None
