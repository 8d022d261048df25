"""The courier: who asks in which thread, and what happens to what was posted in vain."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.protocol.messages import Contribute, Frames, SeatAssigned
from shoal.worker.sender import ConnectionLostError, CoordinatorAnswer
from shoal.worker.session import ContributionReceipt, RunNews
from shoal.worker.timing import LinkMeasurements
from tests.support.scripted_coordinator import WELCOME, Line, courier_of, scripted, weights

MADE = Contribute("", 0, 0, 1, 0, 1.0, 2, 0, 1, 1, -1, {})
RECEIPT = {"kind": "receipt", "status": "accepted", "seq": 0, "round": 1, "version": 2, "step": 2.0, "most_lag": 9.0, "done": False}


class Posting(Line):
    """Takes what is posted, and loses some of it: `lost` says which."""

    def __init__(self, *answers: CoordinatorAnswer, lost: tuple[int, ...] = ()) -> None:
        super().__init__(scripted(iter(answers)))
        self.lost, self.said = lost, list[str]()

    def call(self, header: dict[str, Any], frames: Frames, timeout_s: float) -> CoordinatorAnswer:
        self.said.append(f"call {header['kind']}")
        return super().call(header, frames, timeout_s)

    def post(self, header: dict[str, Any], frames: Frames) -> bool:
        self.said.append(f"post {header['kind']}")
        return True

    def answer(self, timeout_s: float) -> CoordinatorAnswer:
        number = len([one for one in self.said if one.startswith("post")])
        self.said.append(f"answer {number}")
        if number in self.lost:
            raise ConnectionLostError("the connection was lost")
        return self._answer({}, ())


def joined(line: Line) -> Any:
    courier = courier_of(line, pytest.fail)
    assert courier.exchange() == [SeatAssigned(0, 0, 0)]
    courier.protocol.ready = True
    (news,) = courier.exchange()
    assert isinstance(news, RunNews)
    return courier


def test_an_urgent_request_is_posted_and_its_answer_waited_for_by_the_caller() -> None:
    line = Posting(CoordinatorAnswer(WELCOME, ()), weights(1, 0.0), CoordinatorAnswer(RECEIPT, ()), CoordinatorAnswer(RECEIPT, ()))
    courier = joined(line)
    for _ in range(2):
        courier.protocol.contribute(MADE, (), pulls=False)
        pending = courier.send(soon=True)
        assert line.said[-1] == "post contribute"  # it is on its way, and nobody waits for it yet
        assert [type(event) for event in pending()] == [ContributionReceipt, RunNews]
    courier.close()
    assert line.said[2:] == ["post contribute", "answer 1", "post contribute", "answer 2"]


def test_what_was_posted_in_vain_is_asked_again() -> None:
    line = Posting(CoordinatorAnswer(WELCOME, ()), weights(1, 0.0), CoordinatorAnswer(RECEIPT, ()), lost=(1,))
    courier = joined(line)
    courier.protocol.contribute(MADE, (), pulls=False)
    assert len(courier.send(soon=True)()) == 2
    courier.close()
    assert line.said[2:] == ["post contribute", "answer 1", "call contribute"]


def test_what_has_time_is_carried_by_a_thread_and_its_errors_come_back() -> None:
    refused = CoordinatorAnswer({"kind": "refused", "reason": "malformed", "detail": "nonsense"}, ())
    line = Posting(CoordinatorAnswer(WELCOME, ()), weights(1, 0.0), CoordinatorAnswer(RECEIPT, ()), refused)
    courier = joined(line)
    courier.protocol.contribute(MADE, (), pulls=False)
    assert len(courier.send(soon=False)()) == 2
    courier.protocol.contribute(MADE, (), pulls=False)
    with pytest.raises(ShoalError, match="nonsense"):
        courier.send(soon=False)()
    courier.close()
    assert line.said[2:] == ["call contribute", "call contribute"]


def test_a_short_patience_is_short() -> None:
    courier = courier_of(Line(scripted(iter(()))), patience_s=0.2)
    with pytest.raises(ShoalError, match="has not answered"):
        courier.exchange()


def test_a_sign_of_life_goes_its_own_way() -> None:
    courier = joined(Line(scripted(iter([CoordinatorAnswer(WELCOME, ()), weights(1, 0.0)]))))
    pulse = Line(
        scripted(
            iter(
                [
                    CoordinatorAnswer({"kind": "pulse", "done": False, "oldest": 4}, ()),
                    CoordinatorAnswer({"kind": "pulse", "done": True}, ()),
                ]
            )
        )
    )
    for expected in (False, True, True):  # the third is lost, and says nothing
        courier.send_heartbeat(pulse, "computing", {"samples": 1.0})
        assert courier.protocol.done == expected
    assert [header["number"] for header in pulse.log] == [1, 2, 3]
    courier.close()


def test_a_message_in_a_heartbeat_answer_is_shown_once_and_steers_no_terminal() -> None:
    told: list[str] = []
    courier = courier_of(Line(scripted(iter([CoordinatorAnswer(WELCOME, ())]))), told.append)
    courier.exchange()
    answers = [{"kind": "pulse", "word": "your unit\x1b[2J was given to another one"}, {"kind": "pulse"}]
    pulse = Line(scripted(iter([CoordinatorAnswer(answer, ()) for answer in answers])))
    for _ in answers:
        courier.send_heartbeat(pulse, "computing", {})
    assert told == ["warning: your unit?[2J was given to another one"]
    courier.close()


def test_a_link_is_known_by_its_quickest_small_answer_and_its_most_bytes_a_second() -> None:
    link = LinkMeasurements()
    assert link.figures == {}
    link.carried(1000, 5.0)  # too short to tell anything
    link.answered(0.3)
    link.answered(0.1)
    assert link.figures == {"latency_ms": pytest.approx(100.0)}
    link.carried(1_000_000, 1.1)
    link.carried(1_000_000, 2.1)
    assert link.figures["bandwidth_mbps"] == pytest.approx(8.0)
