"""One worker among many and a coordinator by script: weights go straight ahead, and others make two versions beside each of its own."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from shoal.config.schema.updates import Updates
from shoal.coordinator import Every, Policy
from shoal.engines import StepResult
from shoal.updates.frames import frame_of
from shoal.updates.messages import Contribute, Leave
from shoal.worker.courier import Answer
from shoal.worker.member import Member

STEP = torch.tensor([1.0, -2.0, 0.5])
"""How far a version moves the weights."""


class Courier:
    """Answers at once; every contribution makes three versions, of which two are by others."""

    round_trip_s = 0.0

    def __init__(self, contributions: int) -> None:
        self.welcome = {"last_seq": -1, "seat": 0, "epoch": 0, "position": 0, "name": "w"}
        self.left, self.version = contributions, 0

    def ask(self, asked: Any, frames: Any = (), soon: bool = False) -> Future[Answer]:
        if isinstance(asked, Contribute):
            self.version, self.left = self.version + 3, self.left - 1
        header = {"kind": "weights", "status": "accepted", "version": self.version, "round": 0, "step": 0.0, "most_lag": 9.0}
        header |= {"done": self.left == 0, "weights": "full"}
        answered: Future[Answer] = Future()
        answered.set_result(Answer({} if isinstance(asked, Leave) else header, (frame_of((self.version * STEP).numpy()),)))
        return answered


class Engine:
    """Notes where gradients are taken, in versions."""

    device = torch.device("cpu")
    buffers = torch.empty(0)
    layouts = ("model",)

    def __init__(self) -> None:
        self.vector, self.gradient, self.taken_at = torch.zeros(3), torch.ones(3), list[float]()

    def gradients(self, batches: Any) -> StepResult:
        assert torch.allclose(self.vector, self.vector[0] * STEP)
        self.taken_at.append(float(self.vector[0]))
        return StepResult({}, 1, 1)

    def unscale(self) -> None: ...
    def changed(self) -> None: ...
    def apply_own(self, step: float) -> None: ...


class Feed:
    def __next__(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "position": 1}


def taken_at(policy: Policy, contributions: int) -> list[float]:
    engine, courier = Engine(), Courier(contributions)
    made: Any = (courier, engine, lambda *place: Feed(), policy, Updates())
    Member(*made).work()
    return engine.taken_at


@pytest.mark.parametrize("worker_steps", [False, True])
def test_gradients_are_taken_where_the_weights_will_be(worker_steps: bool) -> None:
    policy = Policy(Every(), lambda lag, speed: 1.0, worker_steps=worker_steps, look_ahead=True)
    ahead = [place - 3 * number for number, place in enumerate(taken_at(policy, 40))]
    assert ahead[0] == 0  # nothing is known of the way yet
    assert ahead[-1] == pytest.approx(2, abs=0.01)  # what two others make meanwhile
    assert ahead == sorted(ahead)


def test_who_does_not_look_ahead_stays_with_what_was_pulled() -> None:
    policy = Policy(Every(), lambda lag, speed: 1.0)
    assert taken_at(policy, 4) == [0, 3, 6, 9]


def test_nobody_looks_further_than_the_way_is_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.worker.member._MOST_AHEAD", 1.0)
    policy = Policy(Every(), lambda lag, speed: 1.0, look_ahead=True)
    assert taken_at(policy, 40)[-1] == pytest.approx(3 * 39 + 1, abs=0.01)
