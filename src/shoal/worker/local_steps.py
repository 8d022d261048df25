"""A worker that takes many steps alone, with its own optimizer, and then sends how far they led it: θ₀ − θ.

θ₀ is what the coordinator sent last. Its answer brings the next θ₀, and the worker goes on from there; its optimizer and the schedule of
its learning rate are never started over. Where weights are exchanged in fragments, each fragment has a θ₀ of its own age.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.updates.fragments import Span
from shoal.worker.courier import Answer
from shoal.worker.interfaces import Feed, StepResult, Window
from shoal.worker.member import Member


class Walk(NamedTuple):
    """Figures of many steps: means, and how much they were learned from."""

    metrics: dict[str, Tensor]
    weight: int
    samples: int


class Keeper(Protocol):
    """What a worker keeps of itself, to go on after a break."""

    def save(self, version: int, residual: Tensor | None) -> None: ...
    def restore(self, version: int, residual: Tensor | None) -> None: ...


class LocalSteps(Member):
    """A member of a run whose workers mostly work alone."""

    def __init__(self, *arguments: Any, keepsakes: Keeper, spans: tuple[Span, ...] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.keepsakes = keepsakes
        self.spans = spans
        """Fragments of the weights, which rounds take in turn; none: all at once."""
        self.wanted = self.ways.inner.steps
        """Steps until the next contribution."""
        self.walked = 0
        """Steps since the last one."""

    def _step(self) -> None:
        self.state = "computing"
        started, feed = time.monotonic(), self.feed
        result = self._walk(feed)
        if result is None:
            return
        span = slice(*self.spans[self.round % len(self.spans)]) if self.spans else slice(None)
        vector = self._difference(span)
        if not self.outgoing.limit(vector):
            self.engine.forget_past()
            self._return()
            return
        frames = self.outgoing.frames(vector, result.samples, span)
        if self.slowdown > 1:
            time.sleep((self.slowdown - 1) * (time.monotonic() - started))
        self._step_s = time.monotonic() - started
        self.steps += 1
        self.batches = self.walked * self.accumulation * self.ranks
        self._send(result, self.version, frames)
        self.walked = 0
        if not self.ways.inner.overlap:
            self._settle()

    def _walk(self, feed: Feed) -> StepResult | None:
        """Step by step; None where that came to nothing: the run is over, or the data was somebody else's by then."""
        window, samples, self.walked = Window(), 0, 0
        while self.walked < self.wanted:
            if self.walked == self.ways.inner.overlap:
                self._settle()
            if self.stopping or self.done or self.feed is not feed:
                return None
            until = self.ways.inner.overlap if self.walked < self.ways.inner.overlap else self.wanted
            result, steps = self.engine.walk(feed, self.accumulation, until - self.walked)
            window.add(result)
            samples += result.samples
            self.walked += steps
        weight = window.weight
        metrics = {name: torch.tensor(value) for name, value in window.take(self.engine.world).items()}
        metrics |= {f"inner_{name}": torch.tensor(value) for name, value in self.engine.learning_rates().items()}
        metrics["inner_steps"] = torch.tensor(float(self.walked))
        return Walk(metrics, weight, samples)

    def _difference(self, span: slice) -> Tensor:
        """What to send: how far the steps led, or where they led where the new weights are the mean of all."""
        base = self.base[span]
        vector = self._vectors[0][: base.numel()]
        vector.copy_(self.engine.vector[span])
        return vector if self.ways.inner.averages else torch.sub(base, vector, out=vector)

    def _pull(self) -> None:
        super()._pull()
        if not self.steps:  # it has just come, or come back
            self.keepsakes.restore(self.version, self.outgoing.residual)
            if not self.spans:
                self._return()

    def _take(self, answer: Answer) -> None:
        before = self.version
        super()._take(answer)
        self.wanted = answer.header.get("inner_steps", self.wanted)
        self.engine.step_count = round(self.server_step * self.ways.inner.steps) + self.walked
        if answer.header.get("status") != "accepted":
            self._return()
        elif self.version != before:
            self.keepsakes.save(self.version, self.outgoing.residual)

    def _return(self) -> None:
        """Back to the coordinator's weights: what was learned since was not taken."""
        self.engine.vector.copy_(self.base)
        self.engine.changed()
