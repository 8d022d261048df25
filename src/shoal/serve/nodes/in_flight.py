"""Batches of tokens on their way through the machines, and the forward passes of the engine that wait for them.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from shoal.serve.batching.backend_interface import ForwardBatch
from shoal.serve.nodes.layer_host import TokenBatch
from shoal.serve.nodes.placement import Route


@dataclass
class PendingForward:
    """A batch that the engine waits for, and the logits of its requests so far."""

    batch: ForwardBatch
    logits: dict[int, Tensor] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens that were left of a request when the last tokens of this batch were removed."""


class Doubt(NamedTuple):
    """Requests for which a stage gave no usable output."""

    requests: list[int]
    problem: str
    y_BLD: Tensor | None = None
    """Where the logits are not finite: the last hidden states of these requests."""


@dataclass
class InFlightBatch:
    """A batch of tokens that passes the stages of a route. Stages are numbered by their position in the route."""

    number: int
    started: PendingForward | None
    """None where only the caches of a request are restored: no logits are needed."""
    route: Route
    token_batch: TokenBatch
    sent: dict[int, TokenBatch] = field(default_factory=dict)
    """The tokens that each stage was sent. Later stages may get fewer, since requests may end meanwhile."""
    reported: set[int] = field(default_factory=set)
    """Stages that have reported. With direct sending, a later stage may report first."""
    declined: set[int] = field(default_factory=set)
    """Stages that declined what the previous machine sent them."""
    direct_inputs: dict[int, Tensor] = field(default_factory=dict)
    """What each stage was sent by the previous machine, until the stage reports."""
    since: dict[int, float] = field(default_factory=dict)
    """When each stage got its input."""
    doubted: dict[int, Doubt] = field(default_factory=dict)
    """Stages whose output cannot be used. The stage after the last: the logits."""

    def stage_index(self, name: str) -> int:
        """The stage of a machine that was sent tokens and has not reported yet; −1: none."""
        return next((i for i in self.sent if self.route.stages[i].name == name and i not in self.reported), -1)

    def position_of(self, request: int) -> int:
        """The position of a request's first token in this batch."""
        return self.token_batch.positions[self.token_batch.requests.index(request)]
