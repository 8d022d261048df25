"""Requests that live, and their tokens on the way through a route.

Shapes: L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.serve.batching import ForwardBatch
from shoal.serve.nodes.layer_host import TokenBatch
from shoal.serve.nodes.routes import Route


@dataclass
class ActiveRequest:
    """A request with its tokens so far, and what was sent to each stop of its route after the first, by the stop's first layer."""

    route: Route | None
    ids: list[int] = field(default_factory=list)
    kept: dict[int, list[Tensor]] = field(default_factory=dict)

    def keep(self, layer: int, position: int, x_LD: Tensor) -> None:
        """What was sent for a position, and everything after it, is replaced. Where what came before is missing, nothing is kept."""
        pieces = self.kept.setdefault(layer, [])
        length = sum(map(len, pieces))
        if length < position:
            pieces.clear()
            return
        while length > position:
            last = pieces.pop()
            length -= len(last)
            if length < position:
                pieces.append(last[: position - length])
                length = position
        pieces.append(x_LD)

    def beginning(self, length: int) -> ActiveRequest:
        """A request that begins like this one."""
        return ActiveRequest(
            self.route, self.ids[:length], {layer: [_first(pieces, length)] for layer, pieces in self.kept.items() if pieces}
        )


@dataclass
class PendingForward:
    """A batch that the engine waits for, and the logits of its requests so far."""

    batch: ForwardBatch
    logits: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class InFlightBatch:
    """Tokens on their way through a route."""

    number: int
    started: PendingForward | None
    """None: the caches of a request are restored, and nobody waits for logits."""
    route: Route
    reading: TokenBatch
    given: dict[int, TokenBatch] = field(default_factory=dict)
    """What each stop was given to read: requests may end on the way."""
    reported: set[int] = field(default_factory=set)
    """The stops that have said what they read. Where machines hand on, a later one may be quicker to say so."""
    declined: set[int] = field(default_factory=set)
    """The stops that could not use what they were handed."""
    handed: dict[int, Tensor] = field(default_factory=dict)
    """What each stop was handed by the one before it, until it has said what it made of it."""

    def stop_of(self, name: str) -> int:
        """The number of a machine's stop that was given something and has not reported yet; −1: it has none."""
        return next((i for i in self.given if self.route.stops[i].name == name and i not in self.reported), -1)


def select_rows(reading: TokenBatch, rows: Sequence[int]) -> TokenBatch:
    """Some requests of those that are read together."""
    requests, positions, ids = reading
    return TokenBatch(tuple(requests[i] for i in rows), tuple(positions[i] for i in rows), tuple(ids[i] for i in rows))


def _first(pieces: Sequence[Tensor], length: int) -> Tensor:
    """A copy of the first rows, which does not hold on to the others."""
    return torch.cat(list(pieces))[:length].clone()
