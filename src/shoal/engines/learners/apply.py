"""Apply policies of strategies: how updates move the coordinator's weights. Either the run's optimizer steps along a gradient, or an
outer optimizer steps along the workers' pseudo-gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.config.schema.strategy import OuterOptimizer
from shoal.config.schema.training import KEYWORDS, Schedule, TorchOptimizer
from shoal.data import Feed
from shoal.engines.optim import optimizers
from shoal.engines.optim.learning_rate import learning_rate
from shoal.engines.single import SingleEngine
from shoal.errors import ShoalError
from shoal.updates import clipping
from shoal.updates.fragments import Span

_CONSTANT = Schedule()


class ApplyPolicy:
    """How updates move the weights."""

    computes: ClassVar[bool] = False
    """Whether the coordinator computes gradients like a worker, and so uses the device that the settings name for workers."""

    def learner(self, engine: SingleEngine, spans: tuple[Span, ...], feed: Feed | None = None) -> EngineLearner:
        """Build the learner. `spans`: fragments of the weights that rounds update in turn; empty: every round updates all weights.
        `feed`: the run's feed, for a learner that trains on the coordinator."""
        return EngineLearner(engine)


@dataclass(frozen=True)
class OptimizerStep(ApplyPolicy):
    """The run's optimizer takes one step along each update, as if the coordinator had computed that gradient."""


@dataclass(frozen=True)
class OuterStep(ApplyPolicy):
    """An outer optimizer steps along the pseudo-gradient. `averages`: the new weights are the mean of the workers' weights."""

    optimizer: OuterOptimizer
    schedule: Schedule = _CONSTANT
    """The outer learning rate over the rounds."""
    clip_norm: float | None = None
    """Limit on the norm of the outer gradient."""
    averages: bool = False

    def learner(self, engine: SingleEngine, spans: tuple[Span, ...], feed: Feed | None = None) -> EngineLearner:
        return OuterLearner(engine, self, spans)


@dataclass(frozen=True)
class AdoptWeights(ApplyPolicy):
    """The weights of another coordinator are adopted as it sends them: for relays."""

    def learner(self, engine: SingleEngine, spans: tuple[Span, ...], feed: Feed | None = None) -> EngineLearner:
        return AdoptingLearner(engine)


class EngineLearner:
    """An engine that is stepped with the updates that workers send."""

    meaningless: tuple[str, ...] = ()
    """Metrics of the engine that have no meaning for this learner."""
    intake: Any = None
    """Handler for contributions that are rollouts; None in ordinary runs."""

    def __init__(self, engine: SingleEngine) -> None:
        self.engine = engine

    @property
    def vector(self) -> Tensor:
        """The weights that are sent to workers, in main memory."""
        return self.engine.vector.float().cpu()  # neither copies where it changes nothing

    @property
    def buffers(self) -> Tensor:
        return self.engine.buffers

    @property
    def gradient_buffer(self) -> Tensor | None:
        gradient = self.engine.gradient
        return gradient if gradient.dtype == torch.float32 and gradient.device.type == "cpu" else None

    def apply(self, update: Tensor, buffers: Tensor, step: float, share: float) -> Mapping[str, float]:
        if buffers.numel():
            self.engine.follow_report(buffers)
        return self._step(update, step, share)

    def state_dict(self) -> dict[str, Any]:
        """State of the learner beside the engine's state, such as the outer optimizer's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def _step(self, update: Tensor, step: float, share: float) -> Mapping[str, float]:
        return {name: float(value) for name, value in self.engine.apply(update, step, share).items()}


class AdoptingLearner(EngineLearner):
    """Learner whose weights are received from another coordinator."""

    meaningless = ("learning_rate",)

    def apply(self, update: Tensor, buffers: Tensor, step: float, share: float) -> Mapping[str, float]:
        self.begin(update, buffers)
        self.engine.step_count += 1
        return {}

    def begin(self, weights: Tensor, buffers: Tensor) -> None:
        self.engine.vector.copy_(weights)
        self.engine.changed()
        if buffers.numel():
            self.engine.load_buffers(buffers)


class OuterLearner(EngineLearner):
    """Learner whose weights an outer optimizer moves once per round. The engine's own optimizer is not used: each worker has one."""

    meaningless = ("learning_rate",)

    def __init__(self, engine: SingleEngine, policy: OuterStep, spans: tuple[Span, ...]) -> None:
        super().__init__(engine)
        self.policy, outer = policy, policy.optimizer
        self.spans = spans or ((0, engine.vector.numel()),)
        self.schedule = policy.schedule
        self.shaped = outer.name in optimizers.SHAPED
        self.parts = [nn.Parameter(engine.vector[start:end]) for start, end in self.spans]
        keywords = outer_keywords(outer)
        self.outer: dict[str, torch.optim.Optimizer]
        if self.shaped:
            chosen = TorchOptimizer(name=outer.name, learning_rate=outer.learning_rate, kwargs=keywords)
            self.outer = {name: optimizers.build(chosen, network) for name, network in engine.networks.items()}
        else:
            kind: Any = getattr(torch.optim, outer.name)
            self.outer = {"outer": kind(self.parts, lr=outer.learning_rate, **keywords)}

    def _step(self, update: Tensor, step: float, share: float) -> Mapping[str, float]:
        engine, number = self.engine, self.engine.step_count % len(self.spans)
        if self.policy.averages:
            torch.mul(update, share, out=self.parts[number].data)
            engine.changed()
            engine.count_step()
            return {}
        update = update * share  # not in place: the update may be a view of a frame that is still to be journaled
        limit = self.policy.clip_norm
        norm = clipping.norm(update) if limit is None else clipping.clip_(update, limit)
        self._point(update, number)
        rate = learning_rate(self.schedule, self.policy.optimizer.learning_rate, step, engine.total_steps)
        for optimizer in self.outer.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizers.step(optimizer)
        engine.changed()
        engine.count_step()
        return {"outer_gradient_norm": norm, "outer_learning_rate": rate}

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self.outer.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, optimizer in self.outer.items():
            if name in state:
                optimizer.load_state_dict(state[name])

    def _point(self, update: Tensor, number: int) -> None:
        """Set the gradient of the round's fragment alone: an optimizer leaves parameters without gradient, and their state, unchanged."""
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
    """The outer optimizer's arguments besides its learning rate. Raises ShoalError for arguments that it refuses."""
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
