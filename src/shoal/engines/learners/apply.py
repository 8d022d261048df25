"""A strategy's `apply` policy: what moves the coordinator's weights. The run's optimizer along a gradient, or an outer one along how far
workers moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from shoal.config.schema.strategy import OuterOptimizer
from shoal.config.schema.training import KEYWORDS, Optimizer, Schedule
from shoal.data import Feed
from shoal.engines.optim import optimizers
from shoal.engines.optim.learning_rate import learning_rate
from shoal.engines.single import SingleEngine
from shoal.errors import ShoalError
from shoal.updates import clipping
from shoal.updates.fragments import Span

ScheduleKind = Literal["constant", "cosine", "linear", "polynomial"]


class ApplyPolicy(Protocol):
    """How updates move the weights."""

    @property
    def computes(self) -> bool:
        """Whether the coordinator computes as workers do, and so wants the device that the settings name for them."""
        ...

    def learner(self, engine: SingleEngine, spans: tuple[Span, ...], feed: Feed | None = None) -> EngineLearner:
        """`spans`: the parts of the weights that rounds take in turn; none: every round moves all of them. `feed`: the run's own, for
        what learns from it here."""
        ...


@dataclass(frozen=True)
class OptimizerStep:
    """The run's optimizer steps along each update, as if it were a gradient of its own."""

    computes: bool = False

    def learner(self, engine: SingleEngine, spans: tuple[Span, ...], feed: Feed | None = None) -> EngineLearner:
        return EngineLearner(engine)


@dataclass(frozen=True)
class OuterStep:
    """An outer optimizer steps along how far workers moved; `averages`: the new weights are the mean of theirs."""

    optimizer: OuterOptimizer
    schedule: ScheduleKind = "constant"
    """The outer learning rate over the rounds."""
    clip_norm: float | None = None
    """Limit on the norm of the outer gradient."""
    averages: bool = False
    computes: bool = False

    def learner(self, engine: SingleEngine, spans: tuple[Span, ...], feed: Feed | None = None) -> EngineLearner:
        return OuterLearner(engine, self, spans)


@dataclass(frozen=True)
class AdoptWeights:
    """The weights are those of another coordinator, as it sends them: a relay's."""

    computes: bool = False

    def learner(self, engine: SingleEngine, spans: tuple[Span, ...], feed: Feed | None = None) -> EngineLearner:
        return AdoptingLearner(engine)


class EngineLearner:
    """An engine that is stepped along what workers send."""

    meaningless: tuple[str, ...] = ()
    """Figures of the engine that say nothing here."""

    def __init__(self, engine: SingleEngine) -> None:
        self.engine = engine

    @property
    def intake(self) -> Any:
        """What takes in the contributions, where they are no updates of the weights; None: they are."""
        return None

    @property
    def vector(self) -> Tensor:
        vector = self.engine.vector
        return vector if vector.dtype == torch.float32 and vector.device.type == "cpu" else vector.float().cpu()

    @property
    def buffers(self) -> Tensor:
        return self.engine.buffers

    def apply(self, update: Tensor, buffers: Tensor, step: float, share: float) -> Mapping[str, float]:
        if buffers.numel():
            self.engine.follow_report(buffers)
        return self._step(update, step, share)

    def state_dict(self) -> dict[str, Any]:
        """What moves the weights and is not the engine's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None

    def _step(self, update: Tensor, step: float, share: float) -> Mapping[str, float]:
        return {name: float(value) for name, value in self.engine.apply(update, step, share).items()}


class AdoptingLearner(EngineLearner):
    """Weights that come from another coordinator."""

    meaningless = ("learning_rate",)

    def apply(self, update: Tensor, buffers: Tensor, step: float, share: float) -> Mapping[str, float]:
        self.begin(update, buffers)
        self.engine.step_count += 1
        return {}

    def begin(self, weights: Tensor, buffers: Tensor) -> None:
        """Take these weights."""
        self.engine.vector.copy_(weights)
        self.engine.changed()
        if buffers.numel():
            self.engine.load_buffers(buffers)


class OuterLearner(EngineLearner):
    """Weights that an outer optimizer moves, once a round. The engine's own optimizer is not used: workers have theirs."""

    meaningless = ("learning_rate",)

    def __init__(self, engine: SingleEngine, policy: OuterStep, spans: tuple[Span, ...]) -> None:
        super().__init__(engine)
        self.policy, outer = policy, policy.optimizer
        self.spans = spans or ((0, engine.vector.numel()),)
        self.schedule = Schedule(kind=policy.schedule)
        self.shaped = outer.name in optimizers.SHAPED
        self.parts = [nn.Parameter(engine.vector[start:end]) for start, end in self.spans]
        keywords = outer_keywords(outer)
        self.outer: dict[str, torch.optim.Optimizer]
        if self.shaped:
            chosen = Optimizer(name=outer.name, learning_rate=outer.learning_rate, kwargs=keywords)
            self.outer = {name: optimizers.build(chosen, network) for name, network in engine.networks.items()}
        else:
            kind: Any = getattr(torch.optim, outer.name)
            self.outer = {"outer": kind(self.parts, lr=outer.learning_rate, **keywords)}

    def _step(self, update: Tensor, step: float, share: float) -> Mapping[str, float]:
        engine, number = self.engine, self.engine.step_count % len(self.spans)
        engine.step_count += 1
        if self.policy.averages:
            torch.mul(update, share, out=self.parts[number].data)
            engine.changed()
            return {}
        update = update * share  # what came may lie in a frame that is yet to be written down
        limit = self.policy.clip_norm
        norm = clipping.norm(update) if limit is None else clipping.clip_(update, limit)
        self._point(update, number)
        rate = learning_rate(self.schedule, self.policy.optimizer.learning_rate, step, engine.total_steps)
        for optimizer in self.outer.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizers.step(optimizer)
        engine.changed()
        return {"outer_gradient_norm": norm, "outer_learning_rate": rate}

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self.outer.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, optimizer in self.outer.items():
            if name in state:
                optimizer.load_state_dict(state[name])

    def _point(self, update: Tensor, number: int) -> None:
        """Give the round's fragment its gradient, and all others none: an optimizer leaves those alone, with what it remembers of them."""
        for part in self.parts:
            part.grad = None
        self.parts[number].grad = update
        if not self.shaped:
            return
        start, end = self.spans[number]
        self.engine.gradient[start:end] = update
        at = 0
        for network in self.engine.networks.values():
            for slope, parameter in zip(network.slopes, network.masters, strict=True):
                for one, own in [(parameter, slope), *zip(optimizers.matrices_of(parameter), slope, strict=False)]:
                    one.grad = own if start <= at < end else None
                at += slope.numel()


def outer_keywords(outer: OuterOptimizer) -> dict[str, Any]:
    """The outer optimizer's arguments besides its learning rate: momentum where it takes one. What it refuses is told."""
    kind: Any = getattr(torch.optim, outer.name)
    taken = KEYWORDS[outer.name]
    keywords = {"momentum": outer.momentum} if "momentum" in taken else {}
    if "nesterov" in taken and outer.momentum > 0:
        keywords["nesterov"] = outer.nesterov
    keywords |= outer.kwargs
    try:
        kind([nn.Parameter(torch.zeros(2, 2))], lr=outer.learning_rate, **keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShoalError(f"strategy.outer.name: {outer.name} refuses its settings: {error}") from None
    return keywords
