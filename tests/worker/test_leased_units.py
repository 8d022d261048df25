"""A worker that leases units, at a desk in memory: what it does when memory, numbers or other people get in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch

from shoal.config.schema.updates import Int8Codec, Updates
from shoal.errors import ShoalError
from shoal.updates import codecs
from shoal.updates.frames import frame_of
from shoal.worker.leased import Leased


class Unit(NamedTuple):
    id: int
    iteration: int = 0
    epoch: int = 0
    start: int = 0
    batches: int = 2


class Desk:
    """Gives out units one after the other; ends the run after the last."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = list(units)
        self.log: list[tuple[Any, ...]] = []
        self.moved_on = self.over = False
        self.status = "accepted"

    def wanted(self, unit: Unit) -> bool:
        return not self.moved_on

    def claim(self, count: int, timeout_s: float) -> list[Unit]:
        taken, self.units = self.units[:1], self.units[1:]
        self.over = not taken
        return taken

    def weights(self, have: int) -> Any:
        if have >= 0 and not self.over:
            return None
        header = {"weights": "full", "step": 0.0, "done": have >= 0}
        return SimpleNamespace(version=have + 1, kind="full", header=header, frames=(frame_of(torch.ones(3).numpy()),))

    def submit(self, unit: Unit, header: dict[str, Any], frames: Any) -> str:
        values = torch.frombuffer(bytearray(frames[0]), dtype=torch.float32).tolist() if len(frames) == 1 else []
        self.log.append(("submit", unit.id, header["samples"], values))
        return self.status

    def give_back(self, unit: Unit) -> None:
        self.log.append(("give back", unit.id))

    def fail(self, unit: Unit, reason: str) -> None:
        self.log.append(("fail", unit.id, reason))

    def leave(self) -> None:
        self.log.append(("leave",))

    def wake(self) -> None:
        self.log.append(("wake",))


class MeanEngine:
    """Its gradient is the mean of the samples."""

    device = torch.device("cpu")
    layouts = ("model",)

    def __init__(self, most: int = 99) -> None:
        self.vector, self.gradient, self.buffers = torch.zeros(3), torch.zeros(3), torch.empty(0)
        self.most = most
        self.sizes: list[int] = []

    def gradients(self, batches: list[dict[str, torch.Tensor]]) -> Any:
        values = batches[0]["x"]
        if len(values) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(len(values))
        self.gradient.fill_(float(values.mean()))
        return SimpleNamespace(metrics={"loss": values.mean()}, weight=len(values), samples=len(values))

    def unscale(self) -> None:
        return None

    def changed(self) -> None:
        return None


def read(epoch: int, start: int, batches: int) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(start, start + batches):
        yield {"x": torch.arange(8.0) + 8 * number}


def worker(desk: Desk, engine: MeanEngine, source: Callable[..., Any] = read, told: list[str] | None = None) -> Leased:
    made: Any = engine
    return Leased("w", desk, made, source, Updates(), tell=(told if told is not None else []).append)


def test_a_unit_is_one_mean_over_all_its_samples() -> None:
    desk = Desk([Unit(7), Unit(8, start=2, batches=1)])
    made = worker(desk, MeanEngine())
    made.work()
    assert desk.log[:2] == [("submit", 7, 16, [7.5] * 3), ("submit", 8, 8, [19.5] * 3)]
    assert desk.log[-1] == ("leave",)
    assert made.samples == 24


def test_memory_that_runs_out_makes_the_parts_smaller_and_the_unit_is_finished() -> None:
    desk, told = Desk([Unit(7), Unit(8)]), list[str]()
    engine = MeanEngine(most=3)
    worker(desk, engine, told=told).work()
    assert [entry[:3] for entry in desk.log[:2]] == [("submit", 7, 16), ("submit", 8, 16)]
    assert desk.log[0][3] == pytest.approx([7.5] * 3)
    assert engine.sizes == [2] * 16
    assert told == ["out of memory with 8 samples at once: going on with 4", "out of memory with 4 samples at once: going on with 2"]


def test_a_machine_on_which_nothing_fits_hands_the_unit_to_others() -> None:
    desk = Desk([Unit(7)])
    with pytest.raises(ShoalError, match="not enough memory"):
        worker(desk, MeanEngine(most=0)).work()
    assert desk.log[0] == ("fail", 7, "out of memory with a single sample")


def test_a_gradient_that_is_not_finite_is_never_handed_in() -> None:
    desk = Desk([Unit(7), Unit(8)])

    def poisoned(epoch: int, start: int, batches: int) -> Iterator[dict[str, torch.Tensor]]:
        yield {"x": torch.full((4,), float("nan") if len(desk.log) == 0 else 1.0)}

    worker(desk, MeanEngine(), poisoned).work()
    assert desk.log[:2] == [("fail", 7, "the gradient is not finite"), ("submit", 8, 4, [1.0] * 3)]


def test_a_unit_that_nobody_wants_any_more_is_left_in_the_middle() -> None:
    desk = Desk([Unit(7)])

    def moving(epoch: int, start: int, batches: int) -> Iterator[dict[str, torch.Tensor]]:
        yield {"x": torch.ones(4)}
        desk.moved_on = True
        yield {"x": torch.ones(4)}
        raise AssertionError("it went on")

    made = worker(desk, MeanEngine(), moving)
    made.work()
    assert desk.log == [("leave",)]
    assert made.counts["abandoned"] == 1


def test_a_unit_of_older_weights_is_not_begun() -> None:
    desk = Desk([Unit(7, iteration=-1), Unit(8)])
    worker(desk, MeanEngine()).work()
    assert [entry[:2] for entry in desk.log] == [("submit", 8), ("leave",)]


def test_who_leaves_gives_back_what_is_not_done() -> None:
    desk = Desk([Unit(7)])
    made = worker(desk, MeanEngine(), lambda *place: (made.stop(), read(*place))[1])  # type: ignore[func-returns-value]
    made.work()
    assert desk.log == [("wake",), ("give back", 7), ("leave",)]


def test_what_came_too_late_is_counted_and_not_as_ours() -> None:
    desk = Desk([Unit(7)])
    desk.status = "late"
    made = worker(desk, MeanEngine())
    made.work()
    assert (made.counts["rejected"], made.samples) == (1, 0)


def test_of_several_networks_each_is_told_where_the_others_are_going() -> None:
    """Weights move by 2 from version 0 to 1, and by 6 from there to version 4: 2 a version."""
    expected: list[list[float]] = []
    published = [(0, 1.0), (1, 3.0), (4, 9.0)]

    class Engine(MeanEngine):
        layouts = ("discriminator", "generator")

        def expect(self, moved: torch.Tensor) -> None:
            expected.append(moved.tolist())

    class Moving(Desk):
        def weights(self, have: int) -> Any:
            version, value = published.pop(0)
            header = {"weights": "full", "step": 0.0, "done": False}
            return SimpleNamespace(version=version, kind="full", header=header, frames=(frame_of(torch.full((3,), value).numpy()),))

    made = worker(Moving([]), Engine())
    for _ in range(3):
        made._refresh()
    assert expected == [[2.0] * 3, [2.0] * 3]


def test_who_is_far_behind_reads_on_until_it_has_what_its_unit_is_for() -> None:
    codec = Int8Codec()
    ones = codecs.encode(codec, torch.ones(3), None)
    hanging = {-1: (4, "full", (frame_of(torch.full((3,), 4.0).numpy()),)), 4: (5, "difference", ones), 5: (6, "difference", ones)}

    class Behind(Desk):
        def weights(self, have: int) -> Any:
            if have not in hanging:
                return None
            version, kind, frames = hanging[have]
            return SimpleNamespace(version=version, kind=kind, header={"weights": kind, "step": 0.0, "done": False}, frames=frames)

    desk, engine = Behind([]), MeanEngine()
    made = Leased("w", desk, cast(Any, engine), read, Updates(codec=codec), tell=lambda text: None)
    made._do(cast(Any, Unit(7, iteration=6)))
    assert (made.version, engine.vector.tolist()) == (6, pytest.approx([6.0] * 3, rel=1e-2))
    assert [entry[:2] for entry in desk.log] == [("submit", 7)]
    made._do(cast(Any, Unit(8, iteration=9)))
    assert desk.log[-1] == ("give back", 8), "nobody has the weights for it yet"
