"""A model whose layers are on several machines, as the engine sees it.

The server has the ends: it embeds tokens, and makes logits of what comes back. In between, what was started goes from stop to stop, where a
stop is some layers at a machine. The server keeps what it sent to each stop for as long as a request lives. When a machine is lost, the
requests that went through it take another route: its layers' new holder reads what was kept in one piece, and what was under way starts
again; where nothing was kept at a new border between stops, the whole request is read again from its tokens.

There is no thread and no socket here: machines take their orders from `Node.orders`, and say what they did by calling `done`.

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
from shoal.models.stages import ModelEnds
from shoal.serve.backend import LONGEST_UNBOUNDED
from shoal.serve.batching import ForwardBatch, MachineStatus
from shoal.serve.nodes.layer_host import LayerRange, TokenBatch
from shoal.serve.nodes.messages import NodeCommand
from shoal.serve.nodes.placement import HERE, LayerPlanner, NodePlacement, NodeState, Route, RouteStage

_WAIT_S = 0.1
_LOOK_EVERY = 256
"""After so many groups of tokens the split is looked at again."""


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
        kept = {layer: [torch.cat(pieces)[:length].clone()] for layer, pieces in self.kept.items() if pieces}
        return ActiveRequest(self.route, self.ids[:length], kept)


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


class Pipeline:
    """Machines, routes, requests and what is under way. Any thread may call it."""

    def __init__(
        self, ends: ModelEnds, sizes: Sequence[int], *, expected: int, cache_tokens: int, forgets: bool, tell: Callable[[str], None]
    ) -> None:
        """`sizes`: parameters of each layer; `expected`: machines to wait for before the first route, this one counted; `cache_tokens`: how
        many tokens the caches must have room for; `forgets`: whether a cache can forget its last tokens."""
        self.ends, self.forgets = ends.eval(), forgets
        self.vocab_size = ends.vocab_size
        self.longest = ends.max_seq_len or LONGEST_UNBOUNDED
        self.device = next(ends.parameters()).device
        self.width = ends.embed(torch.zeros(1, 1, dtype=torch.long, device=self.device)).shape[-1]
        planner = LayerPlanner(sizes, next(ends.parameters()).element_size(), 2 * self.width * cache_tokens)
        # What is handed on directly may come twice, so caches must be able to forget
        self.fleet = NodePlacement(planner, expected=expected, probes=forgets, tell=tell)
        self._live: dict[int, ActiveRequest] = {}
        self._resting: dict[int, ActiveRequest] = {}
        """Requests that have ended, and whose caches others may share."""
        self._trips: dict[int, InFlightBatch] = {}
        self._trailing: dict[int, InFlightBatch] = {}
        """Trips that came back before all of their stops had reported."""
        self._works: list[PendingForward] = []
        self._arrived: deque[tuple[InFlightBatch, Tensor | None]] = deque()
        """Trips that came back, with the stream after the last layer; None: all their requests have ended."""
        self._failed: str | None = None
        self._groups_through, self._weight_through = 0, 0.0
        """Groups that came through since the split was looked at, and how many groups of one request would have taken as long."""
        self._numbers = itertools.count(1)
        self._changed = threading.Condition(threading.RLock())

    # --- what the engine asks ------------------------------------------------------------------------

    @property
    def microbatches(self) -> int:
        """One for each machine that computes; the server does, at the ends, even where it has no stop. With more, machines would wait less
        for each other, but smaller products cost almost as much as large ones."""
        route = self.fleet.current
        return 1 if route is None else len(route.stops) + (not route.goes_through(HERE))

    @torch.inference_mode()
    def start(self, batch: ForwardBatch) -> None:
        with self._changed:
            started = PendingForward(batch)
            self._works.append(started)
            by_route: dict[int, list[tuple[int, tuple[int, ...], int]]] = {}
            for request, ids in zip(batch.requests, batch.ids, strict=True):
                live = self._live.setdefault(request, ActiveRequest(self.fleet.current))
                by_route.setdefault(live.route.number if live.route else 0, []).append((request, ids, len(live.ids)))
                live.ids += ids
            for rows in by_route.values():
                requests, ids_of, positions = (tuple(column) for column in zip(*rows, strict=True))
                batch_of_route = TokenBatch(requests, positions, ids_of)
                self._depart(InFlightBatch(next(self._numbers), started, self._route_of(requests[0]), batch_of_route))

    def results(self) -> Iterator[tuple[ForwardBatch, Tensor | None]]:
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._failed, _WAIT_S)
            if self._failed:
                problem, self._failed = self._failed, None
                raise ShoalError(problem)
        while (arrived := self._next_arrival()) is not None:
            (trip, y_BLD), started = arrived, arrived[0].started
            assert started is not None
            if not started.batch.needs_logits:
                if self._forget(started):
                    yield started.batch, None
                continue
            logits_BV = self._completed(trip, started, y_BLD)
            if logits_BV is not None and self._forget(started):
                yield started.batch, logits_BV

    def _completed(self, trip: InFlightBatch, started: PendingForward, y_BLD: Tensor | None) -> Tensor | None:
        """The logits of a work, where this was the last trip that it waited for."""
        requests = started.batch.requests
        if y_BLD is not None:
            logits_BV = self._logits(y_BLD)
            if not trip.route.goes_through(HERE):
                self.fleet.nodes[HERE].tokens += len(trip.reading.requests)
            if trip.reading.requests == requests:  # as mostly: all of them took one way
                return logits_BV
            started.logits |= dict(zip(trip.reading.requests, logits_BV, strict=True))
        return torch.stack([started.logits[request] for request in requests]) if len(started.logits) == len(requests) else None

    def _next_arrival(self) -> tuple[InFlightBatch, Tensor | None] | None:
        with self._changed:
            return self._arrived.popleft() if self._arrived else None

    def _forget(self, started: PendingForward) -> bool:
        """Whether the engine still waits for a work, which it then does no longer."""
        with self._changed:
            waited = any(one is started for one in self._works)
            self._works = [one for one in self._works if one is not started]
            return waited

    @torch.inference_mode()
    def _logits(self, y_BLD: Tensor) -> Tensor:
        return self.ends.logits(y_BLD[:, -1:].to(self.device))[:, 0]

    def release(self, request: int) -> None:
        with self._changed:
            live = self._live.pop(request, None) or self._resting.pop(request, None)
            if live is not None:
                self._release(live, request)
                self._retire()

    def retain(self, request: int) -> bool:
        with self._changed:
            if self.forgets and request in self._live:
                self._resting[request] = self._live.pop(request)
                self._retire()
            return request in self._resting

    @torch.inference_mode()
    def copy_prefix(self, request: int, resting: int, length: int) -> bool:
        """Machines that hold the kept text's caches copy them. Where a machine was lost meanwhile, the one in its place reads what was
        kept for it, as for a request that runs."""
        with self._changed:
            kept, current = self._resting.get(resting), self.fleet.current
            if kept is None or kept.route is None or current is None:
                return False
            live = self._live[request] = kept.beginning(length)
            for stop in set(kept.route.stops) & set(current.stops):
                self.fleet.send(stop.name, NodeCommand("share", stop.place, requests=(request, resting), length=length))
            if kept.route != current:
                self._restore(request, live, current, length)
            return True

    def discard_pending(self) -> None:
        with self._changed:
            self._trips.clear()
            self._trailing.clear()
            self._works.clear()
            self._arrived.clear()

    def machines(self) -> list[MachineStatus]:
        with self._changed:
            return self.fleet.machines(sum(one.numel() for one in self.ends.parameters()))

    # --- machines come and go ------------------------------------------------------------------------

    def add(self, node: NodeState) -> None:
        """A machine is here."""
        with self._changed:
            self.fleet.add(node)
            self._move()

    def lose(self, name: str) -> None:
        """A machine is gone: its requests take another route."""
        with self._changed:
            if self.fleet.lose(name):
                self._trailing = {number: trip for number, trip in self._trailing.items() if not trip.route.goes_through(name)}
                self._move()

    def held(self, name: str, place: LayerRange) -> None:
        """A machine has loaded layers."""
        with self._changed:
            if self.fleet.held(name, place):
                self._retire()

    def unheld(self, name: str, place: LayerRange, problem: str) -> None:
        """A machine could not load layers that it was told to hold."""
        with self._changed:
            self.fleet.unheld(name, place, problem)
            self._move()

    def probed(self, name: str, other: str, reached: bool) -> None:
        """A machine has tried to reach another one."""
        with self._changed:
            self.fleet.probed(name, other, reached)

    def _retire(self) -> None:
        """Drop layers that no route needs any more, and forget kept texts whose caches go with them."""
        for dropped in self.fleet.retire(live.route for live in self._live.values()):
            for request in [number for number, live in self._resting.items() if live.route is not None and dropped in live.route.stops]:
                self._release(self._resting.pop(request), request)

    def _release(self, live: ActiveRequest, request: int) -> None:
        for stop in live.route.stops if live.route is not None else ():
            self.fleet.send(stop.name, NodeCommand("release", requests=(request,)))

    # --- on the way ----------------------------------------------------------------------------------

    def _route_of(self, request: int) -> Route:
        route = self._live[request].route
        return route if route is not None else Route(0, ())

    def _depart(self, trip: InFlightBatch) -> None:
        """Embed the tokens and send them to the first stop. Without a route they wait for one."""
        self._trips[trip.number] = trip
        if trip.route.stops:
            self._forward(trip, 0, trip.reading, self._embedded(trip.reading))

    def _embedded(self, reading: TokenBatch) -> Tensor:
        ids_BL = torch.tensor(reading.ids, device=self.device)
        if len(set(reading.positions)) == 1:
            return self.ends.embed(ids_BL, reading.positions[0])
        lengths = [position + 1 for position in reading.positions]
        return self.ends.embed(ids_BL, max(lengths) - 1, mask_of_rows(lengths, self.device))

    def _forward(self, trip: InFlightBatch, at: int, reading: TokenBatch, x_BLD: Tensor) -> None:
        """Send a trip to a stop, and from there to those that can be reached directly, without requests that ended meanwhile."""
        rows = [i for i, request in enumerate(reading.requests) if request in self._live]
        if len(rows) < len(reading.requests):
            x_BLD, reading = x_BLD[rows], reading.select(rows)
            self._give_up_rows(trip, reading)
        if not rows:
            return
        trip.reading, onward = reading, self.fleet.onward(trip.route.stops[at:])
        trip.given |= dict.fromkeys(range(at, at + 1 + len(onward)), reading)
        stop = trip.route.stops[at]
        self.fleet.send(stop.name, NodeCommand("read", stop.place, trip.number, reading, x_BLD, onward=onward))

    def _keep(self, stop: RouteStage, reading: TokenBatch, x_BLD: Tensor) -> None:
        """Keep what a stop is given, for whoever may have to take its place."""
        for request, position, x_LD in zip(reading.requests, reading.positions, x_BLD, strict=True):
            live = self._live.get(request) or self._resting.get(request)
            if live is not None:
                live.keep(stop.first, position, x_LD)

    def _give_up_rows(self, trip: InFlightBatch, left: TokenBatch) -> None:
        """Nobody looks at the logits of requests that ended: zeros take their place."""
        gone = set(trip.reading.requests) - set(left.requests)
        if trip.started is not None:
            trip.started.logits |= {request: torch.zeros(self.vocab_size, device=self.device) for request in gone}
        if not left.requests:
            self._trips.pop(trip.number, None)
            if trip.started is not None:
                self._arrived.append((trip, None))
                self._changed.notify_all()

    @torch.inference_mode()
    def done(self, name: str, number: int, y_BLD: Tensor, seconds: float, handed_on: bool = False) -> None:
        """A machine has read: go on to the next stop, unless it was handed on there, or tell the engine. What nobody waits for any more is
        let go. Raises ShoalError where the machine's answer cannot be right."""
        with self._changed:
            trip = self._trips.get(number) or self._trailing.get(number)
            at = trip.stop_of(name) if trip is not None else -1
            if trip is None or at < 0:
                return
            reading, stops = trip.given[at], trip.route.stops
            if y_BLD.shape != (len(reading.requests), len(reading.ids[0]), self.width) or not y_BLD.is_floating_point():
                raise ShoalError(f"{name} answered with {y_BLD.dtype} numbers of the shape {tuple(y_BLD.shape)}")
            self.fleet.count(stops[at], reading, seconds)
            trip.reported.add(at)
            trip.handed.pop(at, None)
            if at + 1 == len(stops):
                self._arrive(trip, reading, y_BLD)
            else:
                self._keep(stops[at + 1], reading, y_BLD)
                self._go_on(trip, at, y_BLD, handed_on)
            if len(trip.reported) == len(stops):
                self._trailing.pop(number, None)

    def _go_on(self, trip: InFlightBatch, at: int, y_BLD: Tensor, handed_on: bool) -> None:
        """Bring what was read at a stop to the next one, unless that has it already."""
        after, stops = at + 1, trip.route.stops
        if after in trip.given and not handed_on:
            # It was to be handed on, and the next machine did not take it: from now on the server brings it
            self.fleet.direct.pop((stops[at].stay, stops[after].stay), None)
        if any(later >= after for later in trip.reported) or trip.number not in self._trips:
            return
        if handed_on and after not in trip.declined:
            trip.handed[after] = y_BLD
        else:
            self._forward(trip, after, trip.given[at], y_BLD)

    def decline(self, name: str, number: int) -> None:
        """A machine cannot use what another handed to it: the server brings it again, after what has to come before it."""
        with self._changed:
            trip = self._trips.get(number)
            at = trip.stop_of(name) if trip is not None else -1
            if trip is None or at < 0:
                return
            if at in trip.handed:
                self._forward(trip, at, trip.given[at], trip.handed.pop(at))
            else:
                trip.declined.add(at)

    def _arrive(self, trip: InFlightBatch, reading: TokenBatch, y_BLD: Tensor) -> None:
        """A trip is through all its stops."""
        del self._trips[trip.number]
        trip.reading = reading
        if len(trip.reported) < len(trip.route.stops):
            self._trailing[trip.number] = trip
        if trip.started is not None:
            self._arrived.append((trip, y_BLD))
            self._changed.notify_all()
        if len(reading.ids[0]) == 1:
            self._groups_through += 1
            self._weight_through += self.fleet.weight_of(reading)
        if self._groups_through >= _LOOK_EVERY:
            self.look_again(self._weight_through)
            self._groups_through, self._weight_through = 0, 0.0

    def look_again(self, weight: float) -> None:
        """Machines are known better now than when they joined: there may be a better split for requests to come."""
        self.fleet.look_again()
        self._retire()

    def fail(self, number: int, problem: str) -> None:
        """A machine could not read: the requests that wait for it end."""
        with self._changed:
            if number in self._trips:
                self._failed = problem
                self._changed.notify_all()

    # --- another way ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def _move(self) -> None:
        """Requests whose route is broken, or that have none, take the current one; what was under way begins again."""
        if (route := self.fleet.current) is None:
            return
        moving = [number for number, live in self._live.items() if live.route is None or not self.fleet.is_whole(live.route)]
        under_way = [trip for trip in self._trips.values() if not self.fleet.is_whole(trip.route)]
        for trip in under_way:
            del self._trips[trip.number]
            if trip.started is None and trip.reading.requests[0] in self._live:
                # It was being restored: no stop is known to hold it
                self._live[trip.reading.requests[0]].route = None
        again = [trip for trip in under_way if trip.started is not None]
        for number in moving:
            live = self._live[number]
            starts = [trip.reading.positions[trip.reading.requests.index(number)] for trip in again if number in trip.reading.requests]
            self._restore(number, live, route, min(starts, default=len(live.ids)))
        for trip in again:
            self._depart(InFlightBatch(next(self._numbers), trip.started, route, trip.reading))

    def _restore(self, number: int, live: ActiveRequest, route: Route, length: int) -> None:
        """Let the stops of the new route hold the first tokens of a request in their caches. What was under way starts again; a stop
        that has read it already, and cannot forget it, reads the request from its beginning."""
        known = set(live.route.stops) if live.route is not None and (self.forgets or length == len(live.ids)) else set()
        live.route = route
        fresh = [stop for stop in route.stops if stop not in known]
        if length == 0 or not fresh:
            return
        past = tuple(live.ids[:length])
        reading = TokenBatch((number,), (0,), (past,))
        inputs = {stop: self._kept_for(stop, live, reading, length) for stop in fresh}
        if any(x_BLD is None for x_BLD in inputs.values()):
            self._depart(InFlightBatch(next(self._numbers), None, route, reading))
            return
        for stop, x_BLD in inputs.items():
            self.fleet.send(stop.name, NodeCommand("read", stop.place, -1, reading, x_BLD))

    def _kept_for(self, stop: RouteStage, live: ActiveRequest, reading: TokenBatch, length: int) -> Tensor | None:
        if stop.first == 0:
            return self._embedded(reading)
        kept = live.kept.get(stop.first)
        return torch.cat(kept)[None, :length] if kept and sum(map(len, kept)) >= length else None
