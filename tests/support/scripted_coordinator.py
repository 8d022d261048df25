"""A coordinator that answers a worker by a script, and engines that record what they are asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from shoal.config.schema.updates import Codec, NoCodec, Updates
from shoal.engines import StepResult
from shoal.engines.phase_times import PhaseTimes
from shoal.protocol.frames import frame_of
from shoal.protocol.messages import PROTOCOL, Frames
from shoal.worker.producers import GradientContribution, UnitGradientContribution
from shoal.worker.sender import ConnectionLostError, CoordinatorAnswer, Sender
from shoal.worker.session import WorkerSession
from shoal.worker.step_policies import FeedPolicy, PullPolicy
from shoal.worker.worker import Worker, WorkerPolicies

WELCOME = {"kind": "welcome", "session": "s", "name": "w", "size": 3, "seat": 0, "epoch": 0, "position": 0, "last_seq": -1, "version": 0}


class Line:
    """Answers as a function says, and keeps a log of what was asked."""

    def __init__(self, answer: Callable[[dict[str, Any], Frames], CoordinatorAnswer]) -> None:
        self._answer, self.log = answer, list[dict[str, Any]]()
        self.woken = 0
        self.unwanted: set[int] = set()

    def call(self, header: dict[str, Any], frames: Frames, timeout_s: float) -> CoordinatorAnswer:
        self.log.append(header)
        return self._answer(header, frames)

    def post(self, header: dict[str, Any], frames: Frames) -> bool:
        return False

    def answer(self, timeout_s: float) -> CoordinatorAnswer:
        raise AssertionError("nothing was posted")

    def still_wanted(self, unit: int) -> bool:
        return unit not in self.unwanted

    def wake(self) -> None:
        self.woken += 1

    def close(self) -> None: ...

    def asked(self, *kinds: str) -> list[dict[str, Any]]:
        return [header for header in self.log if header["kind"] in kinds]


class Engine:
    """Its gradient is ones. It notes at which weights gradients are taken."""

    device = torch.device("cpu")
    layouts: tuple[str, ...] = ("model",)

    def __init__(self) -> None:
        self.vector, self.gradient, self.buffers = torch.zeros(3), torch.ones(3), torch.empty(0)
        self.taken_at: list[list[float]] = []
        self.moves: list[list[float]] = []
        self.phases = PhaseTimes(self.device)

    def gradients(self, batches: Any) -> StepResult:
        self.taken_at.append(self.vector.tolist())
        return StepResult({}, 1, 1)

    def expect(self, moved: torch.Tensor) -> None:
        self.moves.append(moved.tolist())

    def take_report(self) -> torch.Tensor:
        return self.buffers

    def unscale(self) -> None: ...
    def changed(self) -> None: ...
    def apply_own(self, step: float) -> None: ...


class MeanEngine(Engine):
    """Its gradient is the mean of the samples, of which so many fit into memory."""

    def __init__(self, most: int = 99) -> None:
        super().__init__()
        self.most, self.sizes = most, list[int]()

    def gradients(self, batches: list[dict[str, torch.Tensor]]) -> Any:
        values = batches[0]["x"]
        if len(values) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(len(values))
        self.gradient.fill_(float(values.mean()))
        return SimpleNamespace(metrics={"loss": values.mean()}, weight=len(values), samples=len(values))


class Feed:
    """Batches without end."""

    def __init__(self, seat: int, epoch: int, position: int) -> None:
        self.place, self.position = (seat, epoch, position), position
        self.closed = False

    def __next__(self) -> dict[str, Any]:
        self.position += 1
        return {}

    def close(self) -> None:
        self.closed = True

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.place[1], "position": self.position}


class Numbered(Feed):
    """The eighth of a line of numbers that each batch is."""

    def __next__(self) -> dict[str, Any]:
        batch = {"x": torch.arange(8.0) + 8 * self.position}
        self.position += 1
        return batch


def weights(version: int, value: torch.Tensor | float, **more: Any) -> CoordinatorAnswer:
    """All weights, with where the run stands."""
    vector = value if isinstance(value, torch.Tensor) else torch.full((3,), value)
    header = {"kind": "weights", "version": version, "step": 0.0, "most_lag": 9.0, "done": False, "weights": "full"}
    return CoordinatorAnswer(header | more, (frame_of(vector.clone().numpy()),))


def courier_of(
    line: Any, tell: Callable[[str], None] = lambda text: None, patience_s: float = 600.0, clock: Callable[[], float] = time.monotonic
) -> Sender:
    return Sender(line, WorkerSession("w", {}, PROTOCOL, "i", patience_s), tell, clock)


def worker_of(
    line: Line,
    engine: Engine,
    *,
    contribution: GradientContribution | None = None,
    pull: PullPolicy | None = None,
    leased: bool = False,
    feed: Callable[[int, int, int], Any] = Feed,
    tell: Callable[[str], None] = lambda text: None,
    codec: Codec | None = None,
    window: int = 0,
) -> Worker:
    """A worker that has joined."""
    courier = courier_of(line, tell, clock=stopped)
    courier.exchange()
    policies = WorkerPolicies(
        FeedPolicy(leased=leased),
        contribution or (UnitGradientContribution() if leased else GradientContribution()),
        pull or PullPolicy(),
        window,
    )
    made: Any = engine
    return Worker(courier, made, feed, policies, Updates(codec=codec or NoCodec()), clock=stopped)


def stopped() -> float:
    """A clock on which nothing takes any time, so that no worker goes on before it is answered."""
    return 0.0


def scripted(answers: Iterator[CoordinatorAnswer]) -> Callable[[dict[str, Any], Frames], CoordinatorAnswer]:
    """One answer after the other; a lost connection when there are none left."""

    def answer(header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        try:
            return next(answers)
        except StopIteration:
            raise ConnectionLostError("nobody is there") from None

    return answer
