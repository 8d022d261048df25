"""One worker among many and a coordinator by script."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.config.schema.updates import Int8Codec, Updates
from shoal.errors import ShoalError
from shoal.protocol.frames import frame_of
from shoal.protocol.messages import Frames
from shoal.updates import codecs
from shoal.worker.producers import GradientContribution, GradientProducer
from shoal.worker.sender import CoordinatorAnswer
from shoal.worker.step_policies import PullPolicy
from shoal.worker.update_encoding import UpdateEncoder
from tests.support.scripted_coordinator import WELCOME, Engine, Feed, Line, MeanEngine, Numbered, weights, worker_of

STEP = torch.tensor([1.0, -2.0, 0.5])
"""How far a version moves the weights."""


def marching(contributions: int) -> Callable[[dict[str, Any], Frames], CoordinatorAnswer]:
    """Weights go straight ahead: every contribution makes three versions, of which two are by others."""
    left, version = contributions, 0

    def answer(header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        nonlocal left, version
        if header["kind"] == "join":
            return CoordinatorAnswer(WELCOME, ())
        if header["kind"] == "leave":
            return CoordinatorAnswer({"kind": "goodbye"}, ())
        if header["kind"] == "contribute":
            version, left = version + 3, left - 1
        more = {"kind": "receipt", "status": "accepted", "seq": header.get("seq", 0), "round": 0, "done": left == 0}
        return weights(version, version * STEP, **more)

    return answer


def taken_at(contributions: int, own_steps: bool = False, look_ahead: bool = False) -> list[float]:
    """Where gradients are taken, in versions."""
    engine, line = Engine(), Line(marching(contributions))
    worker_of(line, engine, contribution=GradientContribution(own_steps=own_steps), pull=PullPolicy(look_ahead=look_ahead)).work()
    assert all(place == pytest.approx([place[0] * step for step in STEP.tolist()]) for place in engine.taken_at)
    assert line.log[-1]["kind"] == "leave"
    return [place[0] for place in engine.taken_at]


@pytest.mark.parametrize("own_steps", [False, True])
def test_gradients_are_taken_where_the_weights_will_be(own_steps: bool) -> None:
    ahead = [place - 3 * number for number, place in enumerate(taken_at(40, own_steps, look_ahead=True))]
    assert ahead[0] == 0  # nothing is known of the way yet
    assert ahead[-1] == pytest.approx(2, abs=0.01)  # what two others make meanwhile
    assert ahead == sorted(ahead)


def test_a_worker_that_does_not_look_ahead_stays_with_what_was_pulled() -> None:
    assert taken_at(4) == [0, 3, 6, 9]


def test_no_worker_looks_further_than_the_way_is_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.worker.weights.MOST_AHEAD", 1.0)
    assert taken_at(40, look_ahead=True)[-1] == pytest.approx(3 * 39 + 1, abs=0.01)


def test_a_forgotten_worker_takes_its_new_place_and_discards_data_of_others() -> None:
    answers, feeds = marching(3), list[Feed]()

    def forgetful(header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        if header["kind"] == "contribute" and header["session"] == "s":
            return CoordinatorAnswer({"kind": "refused", "reason": "unknown-session"}, ())
        if header["kind"] == "join" and feeds:
            return CoordinatorAnswer(WELCOME | {"session": "t", "seat": 4, "epoch": 2, "position": 7, "last_seq": 5}, ())
        return answers(header, frames)

    def feed(*place: int) -> Feed:
        feeds.append(Feed(*place))
        return feeds[-1]

    line = Line(forgetful)
    worker_of(line, Engine(), feed=feed).work()
    assert [made.place for made in feeds] == [(0, 0, 0), (4, 2, 7)]
    assert feeds[0].closed
    sent = line.asked("contribute")
    assert [(header["session"], header["seq"], header["epoch"], header["position"]) for header in sent] == [
        ("s", 0, 0, 1),
        ("t", 6, 2, 8),
        ("t", 7, 2, 9),
        ("t", 8, 2, 10),
    ]


# --- units on lease -------------------------------------------------------------------------------------


class Lender:
    """Gives out units one after the other, for version 0; ends the run after the last."""

    def __init__(self, *units: tuple[int, int, int]) -> None:
        """Each unit: its number, its first batch, and how many it has."""
        self.units = list(units)
        self.status = "accepted"
        self.handed_in: list[tuple[int, int, list[float]]] = []

    def __call__(self, header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        match header["kind"]:
            case "join":
                return CoordinatorAnswer(WELCOME, ())
            case "claim" if self.units:
                unit, start, batches = self.units.pop(0)
                return weights(0, 1.0, kind="lease", unit=unit, epoch=0, start=start, batches=batches)
            case "claim":
                return weights(0, 1.0, kind="lease", unit=-1, done=not self.units)
            case "contribute":
                values = torch.frombuffer(bytearray(frames[0]), dtype=torch.float32).tolist()
                self.handed_in.append((header["unit"], header["samples"], values))
                stands = {"version": 0, "step": 0.0, "most_lag": 9.0, "done": False}
                return CoordinatorAnswer({"kind": "receipt", "status": self.status, "seq": header["seq"], "round": 0} | stands, ())
            case "pull":
                return weights(0, 1.0)
        return CoordinatorAnswer({"kind": "noted"}, ())


def test_a_unit_is_one_mean_over_all_its_samples() -> None:
    lender = Lender((7, 0, 2), (8, 2, 1))
    line = Line(lender)
    worker = worker_of(line, MeanEngine(), leased=True, feed=Numbered)
    worker.work()
    assert lender.handed_in == [(7, 16, [7.5] * 3), (8, 8, [19.5] * 3)]
    assert [header["kind"] for header in line.log] == ["join", "pull", *["claim", "contribute"] * 2, "claim", "leave"]
    assert worker.samples == 24
    assert [(header["epoch"], header["position"]) for header in line.asked("contribute")] == [(0, 2), (0, 3)]


def test_memory_that_runs_out_makes_the_parts_smaller_and_the_unit_is_finished() -> None:
    lender, said, engine = Lender((7, 0, 2), (8, 0, 2)), list[str](), MeanEngine(most=3)
    worker_of(Line(lender), engine, leased=True, feed=Numbered, tell=said.append).work()
    assert [entry[:2] for entry in lender.handed_in] == [(7, 16), (8, 16)]
    assert lender.handed_in[0][2] == pytest.approx([7.5] * 3)
    assert engine.sizes == [2] * 16
    assert said == ["out of memory with 8 samples at once: going on with 4", "out of memory with 4 samples at once: going on with 2"]


def test_a_machine_on_which_nothing_fits_hands_the_unit_to_others() -> None:
    line = Line(Lender((7, 0, 2)))
    with pytest.raises(ShoalError, match="not enough memory"):
        worker_of(line, MeanEngine(most=0), leased=True, feed=Numbered).work()
    assert [(header["unit"], header["reason"]) for header in line.asked("fail")] == [(7, "out of memory with a single sample")]


def test_a_gradient_that_is_not_finite_is_never_handed_in() -> None:
    lender = Lender((7, 0, 1), (8, 1, 1))

    class Poisoned(Feed):
        def __next__(self) -> dict[str, Any]:
            return {"x": torch.full((4,), float("nan") if self.position == 0 else 1.0)}

    line = Line(lender)
    worker_of(line, MeanEngine(), leased=True, feed=Poisoned).work()
    assert [(header["unit"], header["reason"]) for header in line.asked("fail")] == [(7, "the gradient is not finite")]
    assert lender.handed_in == [(8, 4, [1.0] * 3)]


def test_a_unit_that_nobody_wants_any_more_is_left_in_the_middle() -> None:
    lender, taken = Lender((7, 0, 3)), 0

    class Moving(Feed):
        def __next__(self) -> dict[str, Any]:
            nonlocal taken
            taken += 1
            if taken == 2:
                line.unwanted.add(7)
            return {"x": torch.ones(4)}

    line = Line(lender)
    worker = worker_of(line, MeanEngine(), leased=True, feed=Moving)
    worker.work()
    assert (taken, worker.counts["abandoned"]) == (2, 1)
    assert not lender.handed_in
    assert [header["unit"] for header in line.asked("giveback")] == [7]


def test_a_unit_for_other_weights_is_not_begun() -> None:
    lender = Lender()

    def ahead(header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        if header["kind"] == "claim" and not line.asked("giveback"):
            return CoordinatorAnswer(weights(5, 1.0, kind="lease", unit=7, epoch=0, start=0, batches=1, weights="same").header, ())
        return lender(header, frames)

    line = Line(ahead)
    worker_of(line, MeanEngine(), leased=True, feed=Numbered).work()
    assert [header["unit"] for header in line.asked("giveback")] == [7]
    assert not lender.handed_in


def test_a_worker_that_leaves_gives_back_what_is_not_done() -> None:
    lender = Lender((7, 0, 2))

    class Stopping(Numbered):
        def __next__(self) -> dict[str, Any]:
            worker.stop()
            return super().__next__()

    line = Line(lender)
    worker = worker_of(line, MeanEngine(), leased=True, feed=Stopping)
    worker.work()
    assert [header["kind"] for header in line.log[2:]] == ["claim", "giveback", "leave"]
    assert line.woken


def test_a_worker_that_makes_no_progress_says_that_it_is_stuck() -> None:
    now, said = [0.0], list[str]()

    class Slow(Numbered):
        def __next__(self) -> dict[str, Any]:
            for seconds in (299.0, 2000.0, 800.0):  # a lease has 300
                now[0] += seconds
                said.append(worker.doing)
            return super().__next__()

    worker = worker_of(Line(Lender((7, 0, 1))), MeanEngine(), leased=True, feed=Slow)
    worker.clock = lambda: now[0]
    worker.work()
    assert said == ["computing", "computing", "stuck"]
    assert worker.doing == "leaving"


def test_a_gradient_that_is_not_finite_never_overwrites_one_that_is_under_way() -> None:
    """With half precision gradients overflow now and then, while the one before them is still being sent."""
    engine = Engine()
    engine.apply_own = lambda step: None  # type: ignore[method-assign]
    reported = list[str]()
    surroundings: Any = SimpleNamespace(
        engine=engine,
        feed=Feed(0, 0, 0),
        accumulation=1,
        ranks=1,
        server_step=0.0,
        weights=SimpleNamespace(version=0),
        encoder=UpdateEncoder(engine, Updates()),  # type: ignore[arg-type]
        report=lambda text: reported.append(text),
    )
    producer = GradientProducer(surroundings, own_steps=True)
    first = producer.make()
    assert first is not None
    engine.gradient.fill_(float("inf"))
    assert producer.make() is None
    assert len(reported) == 1
    engine.gradient.fill_(2.0)
    second = producer.make()
    assert second is not None
    assert first.vector.tolist() == [1.0] * 3
    assert second.vector.tolist() == [2.0] * 3


def test_what_came_too_late_is_counted_and_not_as_its_own() -> None:
    lender = Lender((7, 0, 1))
    lender.status = "late"
    worker = worker_of(Line(lender), MeanEngine(), leased=True, feed=Numbered)
    worker.work()
    assert (worker.counts["rejected"], worker.samples) == (1, 0)


# --- weights ----------------------------------------------------------------------------------------------


def test_of_several_networks_each_is_told_where_the_others_are_going() -> None:
    """Weights move by 2 from version 0 to 1, and by 6 from there to version 4: 2 a version."""
    versions = iter([(0, 1.0, False), (1, 3.0, False), (4, 9.0, False), (5, 11.0, True)])

    class Several(Engine):
        layouts = ("discriminator", "generator")

    def answer(header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        if header["kind"] in ("join", "leave"):
            return CoordinatorAnswer(WELCOME, ())
        version, value, done = next(versions)
        return weights(version, value, kind="receipt", status="accepted", seq=header.get("seq", 0), round=0, done=done)

    engine = Several()
    worker_of(Line(answer), engine).work()
    assert engine.moves == [[2.0] * 3] * 3


def test_differences_lead_on_from_what_the_worker_has() -> None:
    codec = Int8Codec()
    ones = codecs.encode(codec, torch.ones(3), None)

    def answer(header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        stands = {"step": 0.0, "most_lag": 9.0, "seq": header.get("seq", 0), "round": 0, "status": "accepted", "kind": "receipt"}
        if header["kind"] == "pull":
            return CoordinatorAnswer(stands | {"version": 4, "weights": "full", "done": False}, (frame_of(torch.full((3,), 4.0).numpy()),))
        if header["kind"] == "contribute":
            version = header["have"] + 1
            return CoordinatorAnswer(stands | {"version": version, "weights": "difference", "done": version == 6}, ones)
        return CoordinatorAnswer(WELCOME, ())

    engine = Engine()
    worker = worker_of(Line(answer), engine, codec=codec)
    worker.work()
    assert (worker.weights.version, engine.vector.tolist()) == (6, pytest.approx([6.0] * 3, rel=1e-2))
