"""The requests whose layers are on several machines: their tokens, their routes, and the inputs that the server keeps of each stage.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.serve.nodes.in_flight import PendingForward
from shoal.serve.nodes.layer_host import TokenBatch
from shoal.serve.nodes.messages import NodeCommand
from shoal.serve.nodes.placement import NodePlacement, Route, RouteStage


@dataclass
class ActiveRequest:
    """A request with its tokens so far, and the kept inputs of each stage after the first, by the stage's first layer."""

    route: Route | None
    ids: list[int] = field(default_factory=list)
    kept: dict[int, list[Tensor]] = field(default_factory=dict)
    computed_by: set[int] = field(default_factory=set)
    """Join numbers of the machines that computed a part of it."""
    was_sent_directly: bool = False
    """Some machine got a part of it from another machine, so the server does not know what that was."""
    through_server: bool = False
    """Machines do not send it directly any more."""
    doubts: int = 0
    """How often its numbers were not finite, or could not be computed."""
    is_not_finite: bool = False
    """The model gives no finite numbers for it."""
    last: PendingForward | None = None
    """The forward pass of its last tokens."""

    def keep(self, layer: int, position: int, x_LD: Tensor) -> None:
        """Keep the inputs from a position on, replacing earlier ones. Where inputs before the position are missing, nothing is kept.
        Each piece is joined with shorter ones before it, so that a long text has few."""
        pieces = self.kept.setdefault(layer, [])
        if sum(map(len, pieces)) < position:
            pieces.clear()
            return
        _shorten(pieces, position)
        while pieces and len(pieces[-1]) <= len(x_LD):
            x_LD = torch.cat([pieces.pop(), x_LD])
        pieces.append(x_LD)

    def kept_input(self, layer: int, length: int) -> Tensor | None:
        """The inputs of the first tokens; None: not all of them were kept."""
        pieces = self.kept.get(layer)
        return torch.cat(pieces)[None, :length] if pieces and sum(map(len, pieces)) >= length else None

    def rewind(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
        del self.ids[length:]
        for pieces in self.kept.values():
            _shorten(pieces, length)

    def beginning(self, length: int) -> ActiveRequest:
        """A new request with the first `length` tokens of this one."""
        kept = {layer: [torch.cat(pieces)[:length].clone()] for layer, pieces in self.kept.items() if pieces}
        return ActiveRequest(self.route, self.ids[:length], kept, set(self.computed_by), self.was_sent_directly)

    def take_route(self, route: Route | None) -> None:
        self.route = route
        self.computed_by |= route.join_numbers if route is not None else set()

    def forget(self) -> None:
        """Forget all that was computed: it is read again from its tokens."""
        self.kept.clear()
        self.computed_by.clear()
        self.route, self.was_sent_directly = None, False


def _shorten(pieces: list[Tensor], length: int) -> None:
    """Remove what stands after the first `length` tokens of consecutive pieces."""
    held = sum(map(len, pieces))
    while held > length:
        last = pieces.pop()
        held -= len(last)
        if held < length:
            pieces.append(last[: length - held])
            held = length


class ActiveRequests:
    """The requests that run, and ended ones whose caches new requests may copy. Both by number."""

    def __init__(self, placement: NodePlacement) -> None:
        self.placement = placement
        self.active: dict[int, ActiveRequest] = {}
        self.retained: dict[int, ActiveRequest] = {}

    def is_wanted(self, request: int) -> bool:
        return request in self.active and not self.active[request].is_not_finite

    def release(self, request: int) -> None:
        """Forget a request, and let machines free its caches."""
        found = self.active.pop(request, None) or self.retained.pop(request, None)
        if found is not None:
            self._release_caches(found, request)
            self.drop_unused()

    def retain(self, request: int) -> bool:
        """Keep the caches of an ended request. False: there is no such request."""
        if request in self.active:
            self.retained[request] = self.active.pop(request)
            self.drop_unused()
        return request in self.retained

    def forget_outputs(self, join_number: int) -> None:
        """Forget what was computed with outputs of a machine."""
        for request in [number for number, one in self.retained.items() if join_number in one.computed_by]:
            self._release_caches(self.retained.pop(request), request)
        for active in self.active.values():
            if join_number in active.computed_by:
                active.forget()

    def drop_unused(self) -> None:
        """Drop layers that no route needs any more, and the retained requests whose caches are dropped with them."""
        for dropped in self.placement.drop_unused(active.route for active in self.active.values()):
            lost = [number for number, one in self.retained.items() if one.route is not None and dropped in one.route.stages]
            for request in lost:
                self._release_caches(self.retained.pop(request), request)

    def keep_inputs(self, stage: RouteStage, started: PendingForward | None, token_batch: TokenBatch, x_BLD: Tensor) -> None:
        """Keep the inputs of a stage for a machine that may replace it, on the CPU: they come from several devices. A report may come when
        some of its tokens were removed."""
        for request, position, x_LD in zip(token_batch.requests, token_batch.positions, x_BLD.cpu(), strict=True):
            active = self.active.get(request) or self.retained.get(request)
            if active is not None:
                length = position + len(x_LD) if started is None else started.lengths.get(request, position + len(x_LD))
                active.keep(stage.layers.first, position, x_LD[: length - position])

    def _release_caches(self, one: ActiveRequest, request: int) -> None:
        for stage in one.route.stages if one.route is not None else ():
            self.placement.send(stage.name, NodeCommand("release", requests=(request,)))
