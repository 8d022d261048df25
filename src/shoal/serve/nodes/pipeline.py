"""The serving backend for a model whose layers are on several machines.

The server embeds the tokens and computes the logits. In between, each batch passes the stages of a route; a stage is a range of layers on
one machine. The server keeps the inputs of each stage while a request runs. When a machine is lost, its requests take another route: the
replacement reads the kept inputs at once, and batches in flight start again. Where no inputs were kept at a new boundary between stages,
the whole request is read again from its tokens.

There is no thread and no socket here: machines take commands from `NodeState.commands`, and their reports call `on_read`.

Shapes: B batch, L tokens, D width, V vocabulary.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.generation.kv_cache import mask_of_rows
from shoal.models.split_model import ModelEnds
from shoal.serve.backend import LONGEST_UNBOUNDED
from shoal.serve.batching import ForwardBatch, MachineEntry
from shoal.serve.nodes.layer_host import LayerRange, TokenBatch
from shoal.serve.nodes.messages import NodeCommand
from shoal.serve.nodes.placement import SERVER_NODE, LayerPlanner, NodePlacement, NodeState, Route, RouteStage

_WAIT_S = 0.1
_REPLAN_EVERY = 256
"""Decoded batches after which the split is planned again."""


@dataclass
class ActiveRequest:
    """A request with its tokens so far, and the kept inputs of each stage after the first, by the stage's first layer."""

    route: Route | None
    ids: list[int] = field(default_factory=list)
    kept: dict[int, list[Tensor]] = field(default_factory=dict)

    def keep(self, layer: int, position: int, x_LD: Tensor) -> None:
        """Keep the inputs from a position on, replacing earlier ones. Where inputs before the position are missing, nothing is kept."""
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
        """A new request with the first `length` tokens of this one."""
        kept = {layer: [torch.cat(pieces)[:length].clone()] for layer, pieces in self.kept.items() if pieces}
        return ActiveRequest(self.route, self.ids[:length], kept)


@dataclass
class PendingForward:
    """A batch that the engine waits for, and the logits of its requests so far."""

    batch: ForwardBatch
    logits: dict[int, Tensor] = field(default_factory=dict)


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

    def stage_index(self, name: str) -> int:
        """The stage of a machine that was sent tokens and has not reported yet; −1: none."""
        return next((i for i in self.sent if self.route.stages[i].name == name and i not in self.reported), -1)

    def position_of(self, request: int) -> int:
        """The position of a request's first token in this batch."""
        return self.token_batch.positions[self.token_batch.requests.index(request)]


class NodePipeline:
    """Sends batches through the stages of routes and restores requests when a machine is lost. Any thread may call it."""

    def __init__(
        self, ends: ModelEnds, sizes: Sequence[int], *, expected: int, cache_tokens: int, can_rewind: bool, tell: Callable[[str], None]
    ) -> None:
        """`sizes`: parameters of each layer; `expected`: machines to wait for before the first route, including this one;
        `cache_tokens`: capacity of the caches; `can_rewind`: whether the last tokens can be removed from a cache."""
        self.ends, self.can_rewind = ends.eval(), can_rewind
        self.vocab_size = ends.vocab_size
        self.longest = ends.max_seq_len or LONGEST_UNBOUNDED
        self.device = next(ends.parameters()).device
        self.width = ends.embed(torch.zeros(1, 1, dtype=torch.long, device=self.device)).shape[-1]
        planner = LayerPlanner(sizes, next(ends.parameters()).element_size(), 2 * self.width * cache_tokens)
        # What machines send directly may arrive twice, so caches must be able to rewind
        self.placement = NodePlacement(planner, expected=expected, probes=can_rewind, tell=tell)
        self._active: dict[int, ActiveRequest] = {}
        self._retained: dict[int, ActiveRequest] = {}
        """Ended requests whose caches new requests may copy."""
        self._in_flight: dict[int, InFlightBatch] = {}
        self._unreported: dict[int, InFlightBatch] = {}
        """Finished batches of which some stages have not reported yet."""
        self._pending: list[PendingForward] = []
        self._finished: deque[tuple[InFlightBatch, Tensor | None]] = deque()
        """Finished batches with the hidden states after the last layer; None: all their requests have ended."""
        self._failed: str | None = None
        self._batches_done, self._weight_done = 0, 0.0
        """Batches decoded since the last plan, and how many batches of one request would have taken as long."""
        self._numbers = itertools.count(1)
        self._changed = threading.Condition(threading.RLock())

    # --- the backend interface -----------------------------------------------------------------------

    @property
    def microbatches(self) -> int:
        """One for each machine that computes, and one for the server's embedding and logits where it has no stage. With more, machines
        would wait less for each other, but small matrix products cost almost as much as large ones."""
        route = self.placement.current
        return 1 if route is None else len(route.stages) + (not route.uses_node(SERVER_NODE))

    @torch.inference_mode()
    def start(self, batch: ForwardBatch) -> None:
        with self._changed:
            started = PendingForward(batch)
            self._pending.append(started)
            by_route: dict[int, list[tuple[int, tuple[int, ...], int]]] = {}
            for request, ids in zip(batch.requests, batch.ids, strict=True):
                active = self._active.setdefault(request, ActiveRequest(self.placement.current))
                by_route.setdefault(active.route.number if active.route else 0, []).append((request, ids, len(active.ids)))
                active.ids += ids
            for rows in by_route.values():
                requests, ids_of, positions = (tuple(column) for column in zip(*rows, strict=True))
                token_batch, route = TokenBatch(requests, positions, ids_of), self._active[requests[0]].route or Route(0, ())
                self._start_batch(InFlightBatch(next(self._numbers), started, route, token_batch))

    def results(self) -> Iterator[tuple[ForwardBatch, Tensor | None]]:
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._failed, _WAIT_S)
            if self._failed:
                problem, self._failed = self._failed, None
                raise ShoalError(problem)
        while self._finished:  # only this thread takes from it
            in_flight, y_BLD = self._finished.popleft()
            started = in_flight.started
            assert started is not None
            if not started.batch.needs_logits:
                if self._take_pending(started):
                    yield started.batch, None
                continue
            logits_BV = self._completed(in_flight, started, y_BLD)
            if logits_BV is not None and self._take_pending(started):
                yield started.batch, logits_BV

    def _completed(self, in_flight: InFlightBatch, started: PendingForward, y_BLD: Tensor | None) -> Tensor | None:
        """The logits of a forward pass, if this was the last of its batches in flight; else None."""
        requests = started.batch.requests
        if y_BLD is not None:
            logits_BV = self._logits(y_BLD)
            if not in_flight.route.uses_node(SERVER_NODE):
                self.placement.nodes[SERVER_NODE].tokens += len(in_flight.token_batch.requests)
            if in_flight.token_batch.requests == requests:  # the usual case: all requests have one route
                return logits_BV
            started.logits |= dict(zip(in_flight.token_batch.requests, logits_BV, strict=True))
        return torch.stack([started.logits[request] for request in requests]) if len(started.logits) == len(requests) else None

    def _take_pending(self, started: PendingForward) -> bool:
        """Remove a forward pass from the pending ones. False: it was discarded before."""
        with self._changed:
            waited = any(one is started for one in self._pending)
            self._pending = [one for one in self._pending if one is not started]
            return waited

    @torch.inference_mode()
    def _logits(self, y_BLD: Tensor) -> Tensor:
        return self.ends.logits(y_BLD[:, -1:].to(self.device))[:, 0]

    def release(self, request: int) -> None:
        with self._changed:
            active = self._active.pop(request, None) or self._retained.pop(request, None)
            if active is not None:
                self._release(active, request)
                self._drop_unused()

    def retain(self, request: int) -> bool:
        with self._changed:
            if self.can_rewind and request in self._active:
                self._retained[request] = self._active.pop(request)
                self._drop_unused()
            return request in self._retained

    @torch.inference_mode()
    def copy_prefix(self, request: int, retained: int, length: int) -> bool:
        """The machines copy the retained request's caches. The replacement of a lost machine reads the kept inputs instead."""
        with self._changed:
            kept, current = self._retained.get(retained), self.placement.current
            if kept is None or kept.route is None or current is None:
                return False
            active = self._active[request] = kept.beginning(length)
            for stage in set(kept.route.stages) & set(current.stages):
                self.placement.send(stage.name, NodeCommand("share", stage.layers, requests=(request, retained), length=length))
            if kept.route != current:
                self._restore(request, active, current, length)
            return True

    def discard_pending(self) -> None:
        with self._changed:
            self._in_flight.clear()
            self._unreported.clear()
            self._pending.clear()
            self._finished.clear()

    def machines(self) -> list[MachineEntry]:
        with self._changed:
            return self.placement.machines(sum(one.numel() for one in self.ends.parameters()))

    # --- machines join and leave ---------------------------------------------------------------------

    def add(self, node: NodeState) -> None:
        with self._changed:
            self.placement.add(node)
            self._reroute()

    def remove(self, name: str) -> None:
        """Remove a machine. Its requests take another route."""
        with self._changed:
            if self.placement.remove(name):
                self._unreported = {number: one for number, one in self._unreported.items() if not one.route.uses_node(name)}
                self._reroute()

    def on_loaded(self, name: str, layers: LayerRange) -> None:
        with self._changed:
            if self.placement.on_loaded(name, layers):
                self._drop_unused()

    def on_load_failed(self, name: str, layers: LayerRange, problem: str) -> None:
        with self._changed:
            self.placement.on_load_failed(name, layers, problem)
            self._reroute()

    def on_probed(self, name: str, other: str, reached: bool) -> None:
        with self._changed:
            self.placement.on_probed(name, other, reached)

    def _drop_unused(self) -> None:
        """Drop layers that no route needs any more, and the retained requests whose caches are dropped with them."""
        for dropped in self.placement.drop_unused(active.route for active in self._active.values()):
            lost = [number for number, one in self._retained.items() if one.route is not None and dropped in one.route.stages]
            for request in lost:
                self._release(self._retained.pop(request), request)

    def _release(self, active: ActiveRequest, request: int) -> None:
        for stage in active.route.stages if active.route is not None else ():
            self.placement.send(stage.name, NodeCommand("release", requests=(request,)))

    # --- batches in flight ---------------------------------------------------------------------------

    def _start_batch(self, in_flight: InFlightBatch) -> None:
        """Embed the tokens and send them to the first stage. Without a route they wait for one."""
        self._in_flight[in_flight.number] = in_flight
        if in_flight.route.stages:
            self._send_to_stage(in_flight, 0, in_flight.token_batch, self._embed(in_flight.token_batch))

    def _embed(self, token_batch: TokenBatch) -> Tensor:
        ids_BL = torch.tensor(token_batch.ids, device=self.device)
        if len(set(token_batch.positions)) == 1:
            return self.ends.embed(ids_BL, token_batch.positions[0])
        lengths = [position + 1 for position in token_batch.positions]
        return self.ends.embed(ids_BL, max(lengths) - 1, mask_of_rows(lengths, self.device))

    def _send_to_stage(self, in_flight: InFlightBatch, index: int, token_batch: TokenBatch, x_BLD: Tensor) -> None:
        """Send a batch to a stage, from where machines send it on directly as far as they can. Ended requests are left out."""
        rows = [i for i, request in enumerate(token_batch.requests) if request in self._active]
        if len(rows) < len(token_batch.requests):
            x_BLD, token_batch = x_BLD[rows], token_batch.select(rows)
            self._drop_rows(in_flight, token_batch)
        if not rows:
            return
        in_flight.token_batch, next_hops = token_batch, self.placement.next_hops(in_flight.route.stages[index:])
        in_flight.sent |= dict.fromkeys(range(index, index + 1 + len(next_hops)), token_batch)
        stage = in_flight.route.stages[index]
        self.placement.send(stage.name, NodeCommand("read", stage.layers, in_flight.number, token_batch, x_BLD, next_hops=next_hops))

    def _keep_inputs(self, stage: RouteStage, token_batch: TokenBatch, x_BLD: Tensor) -> None:
        """Keep the inputs of a stage for a machine that may have to replace it."""
        for request, position, x_LD in zip(token_batch.requests, token_batch.positions, x_BLD, strict=True):
            active = self._active.get(request) or self._retained.get(request)
            if active is not None:
                active.keep(stage.layers.first, position, x_LD)

    def _drop_rows(self, in_flight: InFlightBatch, left: TokenBatch) -> None:
        """Leave out the requests that ended: their logits are not used, and become zeros."""
        gone = set(in_flight.token_batch.requests) - set(left.requests)
        if in_flight.started is not None:
            in_flight.started.logits |= {request: torch.zeros(self.vocab_size, device=self.device) for request in gone}
        if not left.requests:
            self._in_flight.pop(in_flight.number, None)
            if in_flight.started is not None:
                self._finished.append((in_flight, None))
                self._changed.notify_all()

    @torch.inference_mode()
    def on_read(self, name: str, number: int, y_BLD: Tensor, seconds: float, handed_on: bool = False) -> None:
        """A machine reports the output of its stage: send it to the next stage, unless the machine did, or finish the batch. Reports on
        discarded batches are ignored. Raises ShoalError where the output cannot be right."""
        with self._changed:
            in_flight = self._in_flight.get(number) or self._unreported.get(number)
            index = in_flight.stage_index(name) if in_flight is not None else -1
            if in_flight is None or index < 0:
                return
            token_batch, stages = in_flight.sent[index], in_flight.route.stages
            if y_BLD.shape != (len(token_batch.requests), len(token_batch.ids[0]), self.width) or not y_BLD.is_floating_point():
                raise ShoalError(f"{name} answered with {y_BLD.dtype} numbers of the shape {tuple(y_BLD.shape)}")
            self.placement.count(stages[index], token_batch, seconds)
            in_flight.reported.add(index)
            in_flight.direct_inputs.pop(index, None)
            if index + 1 == len(stages):
                self._finish(in_flight, token_batch, y_BLD)
            else:
                self._keep_inputs(stages[index + 1], token_batch, y_BLD)
                self._continue(in_flight, index, y_BLD, handed_on)
            if len(in_flight.reported) == len(stages):
                self._unreported.pop(number, None)

    def _continue(self, in_flight: InFlightBatch, index: int, y_BLD: Tensor, handed_on: bool) -> None:
        """Send the output of a stage to the next one, unless that has it already."""
        after, stages = index + 1, in_flight.route.stages
        if after in in_flight.sent and not handed_on:
            # The next machine did not accept it: from now on the server sends it
            self.placement.reachable.pop((stages[index].join_number, stages[after].join_number), None)
        if any(later >= after for later in in_flight.reported) or in_flight.number not in self._in_flight:
            return
        if handed_on and after not in in_flight.declined:
            in_flight.direct_inputs[after] = y_BLD
        else:
            self._send_to_stage(in_flight, after, in_flight.sent[index], y_BLD)

    def decline(self, name: str, number: int) -> None:
        """A machine cannot use what the previous one sent: the server sends it again, after the commands that must precede it."""
        with self._changed:
            in_flight = self._in_flight.get(number)
            index = in_flight.stage_index(name) if in_flight is not None else -1
            if in_flight is None or index < 0:
                return
            if index in in_flight.direct_inputs:
                self._send_to_stage(in_flight, index, in_flight.sent[index], in_flight.direct_inputs.pop(index))
            else:
                in_flight.declined.add(index)

    def _finish(self, in_flight: InFlightBatch, token_batch: TokenBatch, y_BLD: Tensor) -> None:
        """A batch has passed all its stages."""
        del self._in_flight[in_flight.number]
        in_flight.token_batch = token_batch
        if len(in_flight.reported) < len(in_flight.route.stages):
            self._unreported[in_flight.number] = in_flight
        if in_flight.started is not None:
            self._finished.append((in_flight, y_BLD))
            self._changed.notify_all()
        if len(token_batch.ids[0]) == 1:
            self._batches_done += 1
            self._weight_done += self.placement.weight_of(token_batch)
        if self._batches_done >= _REPLAN_EVERY:
            self.replan(self._weight_done)
            self._batches_done, self._weight_done = 0, 0.0

    def replan(self, weight: float) -> None:
        """Plan again with the measured times of the machines: new requests may get a better split."""
        self.placement.replan()
        self._drop_unused()

    def fail(self, number: int, problem: str) -> None:
        """A machine failed on a batch: its requests end."""
        with self._changed:
            if number in self._in_flight:
                self._failed = problem
                self._changed.notify_all()

    # --- rerouting -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def _reroute(self) -> None:
        """Move requests without an intact route to the current one, and start their batches in flight again."""
        if (route := self.placement.current) is None:
            return
        moving = [number for number, active in self._active.items() if active.route is None or not self.placement.is_intact(active.route)]
        under_way = [in_flight for in_flight in self._in_flight.values() if not self.placement.is_intact(in_flight.route)]
        for in_flight in under_way:
            del self._in_flight[in_flight.number]
            if in_flight.started is None and in_flight.token_batch.requests[0] in self._active:
                # It was being restored: no stage is known to have its caches
                self._active[in_flight.token_batch.requests[0]].route = None
        again = [in_flight for in_flight in under_way if in_flight.started is not None]
        for number in moving:
            active = self._active[number]
            starts = [in_flight.position_of(number) for in_flight in again if number in in_flight.token_batch.requests]
            self._restore(number, active, route, min(starts, default=len(active.ids)))
        for in_flight in again:
            self._start_batch(InFlightBatch(next(self._numbers), in_flight.started, route, in_flight.token_batch))

    def _restore(self, number: int, active: ActiveRequest, route: Route, length: int) -> None:
        """Fill the caches of the new route's stages with the first tokens of a request. Batches in flight start again; a stage that has
        read them already, and cannot rewind, reads the request from its beginning."""
        known = set(active.route.stages) if active.route is not None and (self.can_rewind or length == len(active.ids)) else set()
        active.route = route
        fresh = [stage for stage in route.stages if stage not in known]
        if length == 0 or not fresh:
            return
        token_batch = TokenBatch((number,), (0,), (tuple(active.ids[:length]),))
        inputs = {stage: self._input_for(stage, active, token_batch, length) for stage in fresh}
        if any(x_BLD is None for x_BLD in inputs.values()):
            self._start_batch(InFlightBatch(next(self._numbers), None, route, token_batch))
            return
        for stage, x_BLD in inputs.items():
            self.placement.send(stage.name, NodeCommand("read", stage.layers, -1, token_batch, x_BLD))

    def _input_for(self, stage: RouteStage, active: ActiveRequest, token_batch: TokenBatch, length: int) -> Tensor | None:
        if stage.layers.first == 0:
            return self._embed(token_batch)
        kept = active.kept.get(stage.layers.first)
        return torch.cat(kept)[None, :length] if kept and sum(map(len, kept)) >= length else None
