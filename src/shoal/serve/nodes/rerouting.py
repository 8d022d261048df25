"""Moves requests to another route when machines join or are lost.

A machine that replaces another one reads the kept inputs of its stage at once. Where no inputs were kept at a new boundary between stages,
the whole request is read again from its tokens.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch

from shoal.serve.nodes.active_requests import ActiveRequest, ActiveRequests
from shoal.serve.nodes.in_flight import InFlightBatch
from shoal.serve.nodes.layer_host import TokenBatch
from shoal.serve.nodes.messages import NodeCommand
from shoal.serve.nodes.node_timing import work_of
from shoal.serve.nodes.placement import NodePlacement, Route
from shoal.serve.nodes.stage_dispatch import StageDispatch


class Rerouting:
    """Gives requests another route, and restores their caches there."""

    def __init__(
        self, placement: NodePlacement, requests: ActiveRequests, dispatch: StageDispatch, numbers: Iterator[int], *, can_rewind: bool
    ) -> None:
        """`numbers`: numbers for batches; `can_rewind`: whether the last tokens can be removed from a cache."""
        self.placement, self.requests, self.dispatch, self._numbers, self.can_rewind = placement, requests, dispatch, numbers, can_rewind

    @torch.inference_mode()
    def reroute(self, again: Set[int] = frozenset()) -> None:
        """Move requests without an intact route to the current one, and start their batches in flight again, as well as those of these
        numbers."""
        if (route := self.placement.current) is None:
            return
        every = self.requests.active
        moving = {number for number, one in every.items() if one.route is None or not self.placement.is_intact(one.route)}
        under_way = [
            in_flight
            for in_flight in self.dispatch.in_flight.values()
            if in_flight.number in again
            or not self.placement.is_intact(in_flight.route)
            or not moving.isdisjoint(in_flight.token_batch.requests)
        ]
        moving |= {request for in_flight in under_way for request in in_flight.token_batch.requests if request in every}
        for in_flight in under_way:
            del self.dispatch.in_flight[in_flight.number]
            if in_flight.started is None and in_flight.token_batch.requests[0] in every:
                # It was being restored: no stage is known to have its caches
                every[in_flight.token_batch.requests[0]].route = None
        restarted = [in_flight for in_flight in under_way if in_flight.started is not None]
        for number in moving:
            active = every[number]
            starts = [in_flight.position_of(number) for in_flight in restarted if number in in_flight.token_batch.requests]
            self.restore(number, active, route, min(starts, default=len(active.ids)))
        for in_flight in restarted:
            self.dispatch.start(InFlightBatch(next(self._numbers), in_flight.started, route, in_flight.token_batch))

    def restore(self, number: int, active: ActiveRequest, route: Route, length: int) -> None:
        """Fill the caches of the new route's stages with the first tokens of a request. Batches in flight start again; a stage that has
        read them already, and cannot rewind, reads the request from its beginning."""
        known = set(active.route.stages) if active.route is not None and (self.can_rewind or length == len(active.ids)) else set()
        active.take_route(route)
        fresh = [stage for stage in route.stages if stage not in known]
        if length == 0 or not fresh:
            return
        token_batch = TokenBatch((number,), (0,), (tuple(active.ids[:length]),))
        inputs = {stage: self.dispatch.input_of(stage, active, token_batch, length) for stage in fresh}
        if any(x_BLD is None for x_BLD in inputs.values()):
            self.dispatch.start(InFlightBatch(next(self._numbers), None, route, token_batch))
            return
        for stage, x_BLD in inputs.items():
            self.placement.nodes[stage.name].timing.sent(-1, work_of(token_batch, self.placement.planner.cost_of(stage.layers)))
            self.placement.send(stage.name, NodeCommand("read", stage.layers, -1, token_batch, x_BLD))
