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

    def close(self) -> None:
        return None


def test_all_weights_have_time_to_come_over_a_slow_link() -> None:
    size = 10_000_000
    line = Line({"kind": "welcome", "session": "s", "name": "w", "size": size}, {"kind": "weights"})
    courier = Courier(line, Join("w", 1, {}), 600.0, pytest.fail)
    courier.join()
    courier.ask(Pull("", 0, -1)).result(10)
    courier.close()
    assert line.timeouts[0] <= 10  # nothing large comes with a welcome
    assert line.timeouts[1] > 4 * size / (10e6 / 8)  # 10 Mbit/s


def test_a_short_patience_is_short() -> None:
    line = Line()
    courier = Courier(line, Join("w", 1, {}), 0.2, lambda text: None)
    with pytest.raises(ShoalError, match="has not answered"):
        courier.join()
    assert max(line.timeouts) <= 0.2
