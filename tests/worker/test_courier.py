"""Who asks, and how long an answer is waited for."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.updates.messages import Join, Pull
from shoal.worker.courier import Answer, Courier, Frames, Lost


class Line:
    """Answers as it was told, and remembers how long each answer was waited for."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.timeouts = list(answers), list[float]()

    def call(self, header: dict[str, Any], frames: Frames, timeout_s: float) -> Answer:
        self.timeouts.append(timeout_s)
        if not self.answers:
            raise Lost("nobody is there")
        return Answer(self.answers.pop(0), ())

    def post(self, header: dict[str, Any], frames: Frames) -> bool:
        return False

    def answer(self, timeout_s: float) -> Answer:
        raise AssertionError("nothing was posted")

    def close(self) -> None:
        return None


class Posting(Line):
    """Takes what is posted, and loses some of it: `lost` says which."""

    def __init__(self, *answers: dict[str, Any], lost: tuple[int, ...] = ()) -> None:
        super().__init__(*answers)
        self.lost, self.log = lost, list[str]()

    def call(self, header: dict[str, Any], frames: Frames, timeout_s: float) -> Answer:
        self.log.append(f"call {header['kind']}")
        return super().call(header, frames, timeout_s)

    def post(self, header: dict[str, Any], frames: Frames) -> bool:
        self.log.append(f"post {header['number']}")
        return True

    def answer(self, timeout_s: float) -> Answer:
        number = len([one for one in self.log if one.startswith("post")])
        self.log.append(f"answer {number}")
        if number in self.lost:
            raise Lost("the connection was lost")
        return super().call({}, (), timeout_s)


WELCOME = {"kind": "welcome", "session": "s", "name": "w", "size": 10}


def test_what_is_wanted_soon_is_posted_and_its_answer_waited_for_by_who_asked() -> None:
    line = Posting(WELCOME, {"kind": "weights", "version": 1}, {"kind": "weights", "version": 2})
    courier = Courier(line, Join("w", 1, {}), 600.0, pytest.fail)
    courier.join()
    asked = [courier.ask(Pull("", 0, -1), soon=True)]
    assert line.log == ["call join", "post 1"]  # it is on its way, and nobody waits for it yet
    assert asked[0].result().header["version"] == 1
    assert courier.ask(Pull("", 0, -1), soon=True).result().header["version"] == 2
    courier.close()
    assert line.log[1:] == ["post 1", "answer 1", "post 2", "answer 2"]


def test_what_was_posted_in_vain_is_asked_again() -> None:
    line = Posting(WELCOME, {"kind": "weights", "version": 1}, lost=(1,))
    courier = Courier(line, Join("w", 1, {}), 600.0, pytest.fail)
    courier.join()
    assert courier.ask(Pull("", 0, -1), soon=True).result().header["version"] == 1
    courier.close()
    assert line.log == ["call join", "post 1", "answer 1", "call pull"]


def test_all_weights_have_time_to_come_over_a_slow_link() -> None:
    size = 10_000_000
    line = Line({"kind": "welcome", "session": "s", "name": "w", "size": size}, {"kind": "weights"})
    courier = Courier(line, Join("w", 1, {}), 600.0, pytest.fail)
    courier.join()
    courier.ask(Pull("", 0, -1)).result()
    courier.close()
    assert line.timeouts[0] <= 10  # nothing large comes with a welcome
    assert line.timeouts[1] > 4 * size / (10e6 / 8)  # 10 Mbit/s


def test_a_short_patience_is_short() -> None:
    line = Line()
    courier = Courier(line, Join("w", 1, {}), 0.2, lambda text: None)
    with pytest.raises(ShoalError, match="has not answered"):
        courier.join()
    assert max(line.timeouts) <= 0.2


def test_a_sign_of_life_tells_whether_the_run_is_over() -> None:
    courier = Courier(Line(WELCOME), Join("w", 1, {}), 1.0, lambda text: None)
    courier.join()
    pulse = Line({"kind": "pulse", "done": False}, {"kind": "pulse", "done": True}, {"kind": "refused", "reason": "unknown-session"})
    assert [courier.beat(pulse, "computing") for _ in range(4)] == [False, True, False, False], "a lost one says nothing"
    courier.close()
