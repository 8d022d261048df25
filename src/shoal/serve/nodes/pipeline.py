"""The serving backend for a model whose layers are on several machines.

The server embeds the tokens and computes the logits. In between, each batch passes the stages of a route; a stage is a range of layers on
one machine. The server keeps the inputs of each stage while a request runs. When a machine is lost, its requests take another route: the
replacement reads the kept inputs at once, and batches in flight start again. Where no inputs were kept at a new boundary between stages,
the whole request is read again from its tokens.

The server judges what comes back by itself. An output of another shape or type, or none within the deadline, is the machine's fault. Where
numbers are not finite, an inquiry computes the stages again. A machine at fault is removed, and what was computed with wrong outputs of it
is computed again from the tokens.

There is no thread and no socket here: machines take commands from `NodeState.commands`, and their reports call `on_read`.

Shapes: B batch, L tokens, D width, V vocabulary.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.models.generation.decoding import finite_rows
from shoal.models.generation.kv_cache import mask_of_rows
from shoal.models.packed.layers import byte_count, number_count
from shoal.models.split_model import ModelEnds
from shoal.serve.backend import LONGEST_UNBOUNDED
from shoal.serve.batching import Backend, ForwardBatch, MachineEntry, PromptOutput
from shoal.serve.nodes.inquiry import Inquiry, StageEvidence
from shoal.serve.nodes.layer_host import LayerRange, TokenBatch
from shoal.serve.nodes.messages import NodeCommand
from shoal.serve.nodes.node_timing import work_of
from shoal.serve.nodes.output_checks import output_problem, rows_not_finite
from shoal.serve.nodes.placement import SERVER_NODE, LayerPlanner, LayerSize, NodePlacement, NodeState, Route, RouteStage
from shoal.serve.nodes.trials import NodeTrials

_WAIT_S = 0.1
_REPLAN_EVERY = 256
"""Decoded batches after which the split is planned again."""
_RESEND_SHARE = 0.25
"""Share of a machine's deadline after which the server sends what another machine claims to have sent."""
_MOST_DOUBTS = 4
"""Inquiries about one request; after that it ends."""


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
        """Keep the inputs from a position on, replacing earlier ones. Where inputs before the position are missing, nothing is kept."""
        pieces = self.kept.setdefault(layer, [])
        if sum(map(len, pieces)) < position:
            pieces.clear()
        else:
            _shorten(pieces, position)
            pieces.append(x_LD)

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


@dataclass
class PendingForward:
    """A batch that the engine waits for, and the logits of its requests so far."""

    batch: ForwardBatch
    logits: dict[int, Tensor] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens that were left of a request when the last tokens of this batch were removed."""


def _shorten(pieces: list[Tensor], length: int) -> None:
    """Remove what stands after the first `length` tokens of consecutive pieces."""
    held = sum(map(len, pieces))
    while held > length:
        last = pieces.pop()
        held -= len(last)
        if held < length:
            pieces.append(last[: length - held])
            held = length


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


class NodePipeline(Backend):
    """Sends batches through the stages of routes and restores requests when a machine is lost. Any thread may call it."""

    def __init__(
        self,
        ends: ModelEnds,
        sizes: Sequence[LayerSize],
        *,
        expected: int,
        cache_tokens: int,
        can_rewind: bool,
        tell: Callable[[str], None],
        even: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sizes`: of each layer; `expected`: machines to wait for, including this one; `cache_tokens`: capacity of the caches;
        `can_rewind`: whether the last tokens can be removed from a cache; `even`: every machine gets layers, whatever its speed."""
        self.ends, self.can_rewind, self.can_verify, self.clock = ends.eval(), can_rewind, can_rewind, clock
        self.vocab_size = ends.vocab_size
        self.longest = ends.max_seq_len or LONGEST_UNBOUNDED
        self.device = next(ends.parameters()).device
        embedded_11D = ends.embed(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        self.width, self._dtype = embedded_11D.shape[-1], embedded_11D.dtype
        planner = LayerPlanner(sizes, cache_tokens, even=even)
        # What machines send directly may arrive twice, so caches must be able to rewind
        self.placement = NodePlacement(planner, expected=expected, probes=can_rewind, tell=tell, clock=clock)
        self._active: dict[int, ActiveRequest] = {}
        self._retained: dict[int, ActiveRequest] = {}
        """Ended requests whose caches new requests may copy."""
        self._in_flight: dict[int, InFlightBatch] = {}
        self._unreported: dict[int, InFlightBatch] = {}
        """Finished batches of which some stages have not reported yet."""
        self._pending: list[PendingForward] = []
        self._finished: deque[tuple[InFlightBatch, Tensor | None]] = deque()
        """Finished batches with the hidden states after the last layer; None: all their requests have ended."""
        self._inquiries: dict[int, Inquiry] = {}
        """By the number of the command that recomputes a stage."""
        self.ignored_reports = 0
        """Reported failures of batches that the machine does not hold."""
        self._batches_done, self._weight_done = 0, 0.0
        """Batches decoded since the last plan, and how many batches of one request would have taken as long."""
        self._numbers, self._changed = itertools.count(1), threading.Condition(threading.RLock())
        self.trials = NodeTrials(self.placement, self._embed, self.vocab_size, self._numbers, clock)

    # --- the backend interface -----------------------------------------------------------------------

    @property
    def microbatches(self) -> int:
        """One for each machine that computes, and one for the server's embedding and logits where it has no stage. With more, machines
        would wait less for each other, but small matrix products cost almost as much as large ones."""
        route = self.placement.current
        return 1 if route is None else len(route.stages) + (not route.uses_node(SERVER_NODE))

    def prepare(self) -> None:
        """Machines prepare themselves as they join."""

    @torch.inference_mode()
    def start(self, batch: ForwardBatch) -> None:
        with self._changed:
            started = PendingForward(batch)
            self._pending.append(started)
            by_route: dict[int, list[tuple[int, tuple[int, ...], int]]] = {}
            for request, ids in zip(batch.requests, batch.ids, strict=True):
                if request not in self._active:
                    self._active[request] = ActiveRequest(None)
                    self._active[request].take_route(self.placement.current)
                active = self._active[request]
                by_route.setdefault(active.route.number if active.route else 0, []).append((request, ids, len(active.ids)))
                active.ids += ids
                active.last = started
            for rows in by_route.values():
                requests, ids_of, positions = (tuple(column) for column in zip(*rows, strict=True))
                token_batch, route = TokenBatch(requests, positions, ids_of), self._active[requests[0]].route or Route(0, ())
                self._start_batch(InFlightBatch(next(self._numbers), started, route, token_batch))

    def results(self) -> Iterator[tuple[ForwardBatch, Tensor | None]]:
        with self._changed:
            self._changed.wait_for(lambda: self._finished, _WAIT_S)
        while self._finished:  # only this thread takes from it
            in_flight, y_BLD = self._finished.popleft()
            started = in_flight.started
            assert started is not None
            if not started.batch.needs_logits and started.batch.output is None:
                if self._take_pending(started):
                    yield started.batch, None
                continue
            result_BX = self._completed(in_flight, started, y_BLD)
            if result_BX is not None and self._take_pending(started):
                yield started.batch, result_BX

    def _completed(self, in_flight: InFlightBatch, started: PendingForward, y_BLD: Tensor | None) -> Tensor | None:
        """The result of a forward pass, if this was the last of its batches in flight; else None."""
        requests = started.batch.requests
        if y_BLD is not None:
            result_BX = self._result(y_BLD, started.batch.output)
            if rows := (~finite_rows(result_BX).reshape(len(result_BX), -1).all(1)).nonzero().flatten().tolist():
                self._on_logits_not_finite(in_flight, rows, y_BLD)
                return None
            if not in_flight.route.uses_node(SERVER_NODE):
                self.placement.nodes[SERVER_NODE].tokens += len(in_flight.token_batch.requests)
            if in_flight.token_batch.requests == requests:  # the usual case: all requests have one route
                return result_BX
            started.logits |= dict(zip(in_flight.token_batch.requests, result_BX, strict=True))
        if len(started.logits) < len(requests):
            return None
        return torch.stack([started.logits[request] for request in requests])

    def _take_pending(self, started: PendingForward) -> bool:
        """Remove a forward pass from the pending ones. False: it was discarded before."""
        with self._changed:
            waited = any(one is started for one in self._pending)
            self._pending = [one for one in self._pending if one is not started]
            return waited

    @torch.inference_mode()
    def _result(self, y_BLD: Tensor, output: PromptOutput | None) -> Tensor:
        """The logits [B, V] of the next tokens, or the output at all tokens [B, L, …], from the residual stream after the last layer."""
        if output is None:
            return self.ends.logits(y_BLD[:, -1:].to(self.device))[:, 0]
        compute = self.ends.logits if output == "logits" else self.ends.last_hidden
        return compute(y_BLD.to(self.device))

    def rewind(self, request: int, length: int) -> None:
        """Machines remove the tokens when they get the next ones, with their positions."""
        with self._changed:
            active = self._active[request]
            active.rewind(length)
            if active.last is not None:
                active.last.lengths[request] = length

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
            active.take_route(kept.route)
            for stage in set(kept.route.stages) & set(current.stages):
                self.placement.send(stage.name, NodeCommand("share", stage.layers, requests=(request, retained), length=length))
            if kept.route != current:
                self._restore(request, active, current, length)
            return True

    def discard_pending(self) -> None:
        with self._changed:
            self._in_flight.clear()
            self._inquiries.clear()
            self._unreported.clear()
            self._pending.clear()
            self._finished.clear()

    def machines(self) -> list[MachineEntry]:
        with self._changed:
            return self.placement.machines(LayerSize(number_count(self.ends), byte_count(self.ends)))

    # --- machines join and leave ---------------------------------------------------------------------

    def add(self, node: NodeState) -> None:
        with self._changed:
            self.placement.add(node, is_on_trial=self.trials.needs_trial(node.name))
            self._reroute()

    def remove(self, name: str) -> None:
        """Remove a machine. Its requests take another route."""
        with self._changed:
            self.trials.on_removed(name)
            if self.placement.remove(name):
                self._unreported = {number: one for number, one in self._unreported.items() if not one.route.uses_node(name)}
                self._reroute()

    def remove_faulty(self, name: str, why: str, *, has_wrong_outputs: bool = True) -> None:
        """Remove a machine for a fault. It must pass a trial to return. What was computed with wrong outputs of it is computed again."""
        with self._changed:
            node = self.placement.nodes.get(name)
            if node is None or not node.alive or name == SERVER_NODE:
                return
            self.trials.suspect(name, self._layers_of(node), why)
            self.placement.tell(f"{name} is removed: {why}")
            if has_wrong_outputs:
                self._forget_outputs(node.join_number)
            self.remove(name)

    def _layers_of(self, node: NodeState) -> LayerRange:
        """The layers of a machine in the present route, or some that it has."""
        stages = self.placement.current.stages if self.placement.current is not None else ()
        own = [stage.layers for stage in stages if stage.name == node.name]
        return next(iter([*own, *sorted(node.assigned)]), LayerRange(0, 1))

    def _forget_outputs(self, join_number: int) -> None:
        """Forget what was computed with outputs of a machine."""
        for request in [number for number, one in self._retained.items() if join_number in one.computed_by]:
            self._release(self._retained.pop(request), request)
        for active in self._active.values():
            if join_number in active.computed_by:
                active.forget()

    @torch.inference_mode()
    def tick(self) -> None:
        """Remove machines that are late, and start trials and measurements that are due. To be called several times a second."""
        with self._changed:
            now = self.clock()
            for name in self.trials.tick():
                self.remove_faulty(name, "it did not answer in its trial", has_wrong_outputs=False)
            for node in list(self.placement.nodes.values()):
                if node.alive and node.name != SERVER_NODE:
                    self._check_deadline(node, now)

    def _check_deadline(self, node: NodeState, now: float) -> None:
        waiting = [
            (since, in_flight.number, index)
            for in_flight in (*self._in_flight.values(), *self._unreported.values())
            for index, since in in_flight.since.items()
            if index not in in_flight.reported and in_flight.route.stages[index].join_number == node.join_number
        ]
        if not waiting:
            if node.timing.is_late_to_load(now):
                self.remove_faulty(node.name, "it did not load its layers in time", has_wrong_outputs=False)
            return
        since, number, index = min(waiting)
        in_flight = self._in_flight.get(number)
        if in_flight is not None and index in in_flight.direct_inputs:
            if node.timing.is_late(since, now, _RESEND_SHARE):  # perhaps the previous machine never sent it
                self.placement.close_direct_paths(in_flight.route.stages[index - 1 : index + 1])
                self._send_to_stage(in_flight, index, in_flight.sent[index], in_flight.direct_inputs.pop(index))
        elif node.timing.is_late(since, now):
            why = f"it did not answer within {node.timing.allowed_s():.0f} s"
            self.remove_faulty(node.name, why, has_wrong_outputs=False)

    def on_loaded(self, name: str, layers: LayerRange) -> None:
        with self._changed:
            if self.placement.on_loaded(name, layers):
                self._drop_unused()

    def on_load_failed(self, name: str, layers: LayerRange, problem: str) -> None:
        with self._changed:
            self.trials.on_failed(name)
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
        length = ids_BL.shape[1]
        lengths = [position + length for position in token_batch.positions]
        return self.ends.embed(ids_BL, max(lengths) - length, mask_of_rows(lengths, self.device))

    def _send_to_stage(self, in_flight: InFlightBatch, index: int, token_batch: TokenBatch, x_BLD: Tensor) -> None:
        """Send a batch to a stage, from where machines send it on directly as far as they can. Ended requests are left out."""
        rows = [i for i, request in enumerate(token_batch.requests) if self._is_wanted(request)]
        if len(rows) < len(token_batch.requests):
            x_BLD, token_batch = x_BLD[rows], token_batch.select(rows)
            self._drop_rows(in_flight, token_batch)
        if not rows:
            return
        requests = [self._active[request] for request in token_batch.requests]
        direct = not any(active.through_server for active in requests)
        in_flight.token_batch, next_hops = token_batch, self.placement.next_hops(in_flight.route.stages[index:]) if direct else ()
        for active in requests if next_hops else ():
            active.was_sent_directly = True
        in_flight.sent |= dict.fromkeys(range(index, index + 1 + len(next_hops)), token_batch)
        stage = in_flight.route.stages[index]
        self._note_sent(in_flight, index)
        self.placement.send(stage.name, NodeCommand("read", stage.layers, in_flight.number, token_batch, x_BLD, next_hops=next_hops))

    def _note_sent(self, in_flight: InFlightBatch, index: int) -> None:
        """A stage has its input: its deadline begins."""
        stage, in_flight.since[index] = in_flight.route.stages[index], self.clock()
        work = work_of(in_flight.sent[index], self.placement.planner.cost_of(stage.layers))
        self.placement.nodes[stage.name].timing.sent(in_flight.number, work)

    def _keep_inputs(self, stage: RouteStage, started: PendingForward | None, token_batch: TokenBatch, x_BLD: Tensor) -> None:
        """Keep the inputs of a stage for a machine that may replace it, on the CPU: they come from several devices. A report may come when
        some of its tokens were removed."""
        for request, position, x_LD in zip(token_batch.requests, token_batch.positions, x_BLD.cpu(), strict=True):
            active = self._active.get(request) or self._retained.get(request)
            if active is not None:
                length = position + len(x_LD) if started is None else started.lengths.get(request, position + len(x_LD))
                active.keep(stage.layers.first, position, x_LD[: length - position])

    def _is_wanted(self, request: int) -> bool:
        return request in self._active and not self._active[request].is_not_finite

    def _drop_rows(self, in_flight: InFlightBatch, left: TokenBatch) -> None:
        """Leave out the requests that ended: their logits are not used, and become zeros. Where the model gives no finite numbers for a
        request, its logits become NaN, which ends it."""
        gone = set(in_flight.token_batch.requests) - set(left.requests)
        if in_flight.started is not None:
            for request in gone:
                number = float("nan") if request in self._active else 0.0
                everywhere = () if in_flight.started.batch.output is None else (len(in_flight.token_batch.ids[0]),)
                in_flight.started.logits[request] = torch.tensor(number, device=self.device).expand(*everywhere, self.vocab_size)
        if not left.requests:
            self._in_flight.pop(in_flight.number, None)
            if in_flight.started is not None:
                self._finished.append((in_flight, None))
                self._changed.notify_all()

    @torch.inference_mode()
    def on_read(self, name: str, number: int, y_BLD: Tensor, seconds: float, handed_on: bool = False) -> None:
        """A machine reports the output of its stage: send it to the next stage, unless the machine did, or finish the batch. Reports on
        discarded batches are ignored."""
        with self._changed:
            in_flight = self._in_flight.get(number) or self._unreported.get(number)
            index = in_flight.stage_index(name) if in_flight is not None else -1
            if in_flight is None or index < 0:
                self.placement.nodes[name].timing.reported(number, self.clock(), self.clock())
                if self.trials.on_read(name, number, y_BLD, seconds):
                    self._drop_unused()
                return
            token_batch = in_flight.sent[index]
            shape = (len(token_batch.requests), len(token_batch.ids[0]), self.width)
            if (problem := output_problem(y_BLD, shape, self._dtype)) is not None:
                self.remove_faulty(name, problem)
            elif self._is_too_slow(in_flight, index, seconds):
                self.remove_faulty(name, "it takes much longer than it said when it joined", has_wrong_outputs=False)
            elif rows := rows_not_finite(y_BLD):
                in_flight.reported.add(index)
                self._doubt(in_flight, index, Doubt([token_batch.requests[row] for row in rows], "its output is not finite"))
            else:
                self._pass_on(in_flight, index, y_BLD, handed_on)

    def _is_too_slow(self, in_flight: InFlightBatch, index: int, claimed_s: float) -> bool:
        """Count the time of a batch. Return whether the machine is too slow, and the others can do without it."""
        stage, now = in_flight.route.stages[index], self.clock()
        node = self.placement.nodes[stage.name]
        seen_s = node.timing.reported(in_flight.number, in_flight.since.get(index, now), now)
        self.placement.count(stage, in_flight.sent[index], claimed_s, seen_s)
        return node.name != SERVER_NODE and node.timing.is_slow() and self.placement.can_do_without(node.name)

    def _pass_on(self, in_flight: InFlightBatch, index: int, y_BLD: Tensor, handed_on: bool) -> None:
        """Give the output of a stage to the next one, or finish the batch."""
        stages, token_batch = in_flight.route.stages, in_flight.sent[index]
        in_flight.reported.add(index)
        in_flight.direct_inputs.pop(index, None)
        if index + 1 == len(stages):
            self._finish(in_flight, token_batch, y_BLD)
        else:
            self._keep_inputs(stages[index + 1], in_flight.started, token_batch, y_BLD)
            if in_flight.doubted:
                self._inquire(in_flight)
            else:
                self._continue(in_flight, index, y_BLD, handed_on)
        if len(in_flight.reported) == len(stages):
            self._unreported.pop(in_flight.number, None)

    def _continue(self, in_flight: InFlightBatch, index: int, y_BLD: Tensor, handed_on: bool) -> None:
        """Send the output of a stage to the next one, unless that has it already."""
        after, stages = index + 1, in_flight.route.stages
        if after in in_flight.sent and not handed_on:
            # The next machine did not accept it: from now on the server sends it
            self.placement.reachable.pop((stages[index].join_number, stages[after].join_number), None)
        if any(later >= after for later in in_flight.reported) or in_flight.number not in self._in_flight:
            return
        if handed_on and after in in_flight.sent and after not in in_flight.declined:
            in_flight.direct_inputs[after] = y_BLD
            self._note_sent(in_flight, after)
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
        if in_flight.started is not None and in_flight.started.batch.decodes:
            self._batches_done += 1
            self._weight_done += self.placement.weight_of(token_batch)
        if self._batches_done >= _REPLAN_EVERY:
            self.replan(self._weight_done)
            self._batches_done, self._weight_done = 0, 0.0

    def replan(self, weight: float) -> None:
        """Plan again with the measured times of the machines: new requests may get a better split."""
        self.placement.replan()
        self._drop_unused()

    @torch.inference_mode()
    def fail(self, name: str, number: int, problem: str) -> None:
        """A machine could not compute a batch. Reports of machines that do not hold the batch are ignored."""
        with self._changed:
            in_flight = self._in_flight.get(number)
            index = in_flight.stage_index(name) if in_flight is not None else -1
            if in_flight is not None and index >= 0:
                in_flight.reported.add(index)
                requests = list(in_flight.sent[index].requests)
                self._doubt(in_flight, index, Doubt(requests, f"it could not compute its layers: {problem}"))
            elif not self.trials.on_failed(name, number):
                self.ignored_reports += 1

    # --- inquiries -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def _on_logits_not_finite(self, in_flight: InFlightBatch, rows: list[int], y_BLD: Tensor) -> None:
        with self._changed:
            if any(one is in_flight.started for one in self._pending):
                self._in_flight[in_flight.number] = in_flight
                requests = [in_flight.token_batch.requests[row] for row in rows]
                doubt = Doubt(requests, "the logits after its layers are not finite", y_BLD[rows])
                self._doubt(in_flight, len(in_flight.route.stages), doubt)

    def _doubt(self, in_flight: InFlightBatch, index: int, doubt: Doubt) -> None:
        """The output of a stage cannot be used for some requests. The batch waits until it is known why."""
        if in_flight.number in self._in_flight:
            in_flight.doubted[index] = doubt
            self._inquire(in_flight)

    def _inquire(self, in_flight: InFlightBatch) -> None:
        """Begin with the first stage whose output cannot be used, as soon as its input is known."""
        index = min(in_flight.doubted)
        if any(earlier not in in_flight.reported for earlier in range(index)):
            return
        doubt = in_flight.doubted[index]
        request = next((one for one in doubt.requests if self._is_wanted(one)), None)
        if request is not None:
            active = self._active[request]
            active.doubts += 1
            evidence = self._evidence(in_flight, index, request)
            if active.doubts > _MOST_DOUBTS:
                active.is_not_finite = True
            elif evidence is None:  # it is read again in a way that shows the server what each machine gets
                self.placement.close_direct_paths(in_flight.route.stages)
                active.forget()
                active.through_server = True
            else:
                ids = tuple(active.ids[: evidence[0].x_1LD.shape[1]])
                self._recompute(Inquiry(in_flight.number, request, ids, doubt.problem, evidence))
                return
        self._reroute({in_flight.number})

    def _evidence(self, in_flight: InFlightBatch, index: int, request: int) -> list[StageEvidence] | None:
        """What the stages up to this one computed of a request, the latest first. None: the server does not know the inputs of all."""
        active, stages, doubt = self._active[request], in_flight.route.stages, in_flight.doubted[index]
        if active.was_sent_directly or not active.computed_by <= in_flight.route.join_numbers:
            return None
        length = in_flight.position_of(request) + len(in_flight.token_batch.ids[0])
        token_batch = TokenBatch((request,), (0,), (tuple(active.ids[:length]),))
        inputs = [self._input_for(stage, active, token_batch, length) for stage in stages[: index + 1]]
        known = [x_1LD for x_1LD in inputs if x_1LD is not None]
        if len(known) < len(inputs):
            return None
        last = doubt.y_BLD[doubt.requests.index(request)][None] if doubt.y_BLD is not None else None
        return [StageEvidence(*one) for one in zip(stages, known, [*known[1:], last], strict=False)][::-1]

    def _recompute(self, inquiry: Inquiry) -> None:
        """Let the server compute a stage."""
        number, (stage, x_1LD, _) = next(self._numbers), inquiry.current
        self._inquiries[number] = inquiry
        token_batch = TokenBatch((inquiry.request,), (0,), (inquiry.ids,))
        self.placement.send(SERVER_NODE, NodeCommand("recompute", stage.layers, number, token_batch, x_1LD))

    @torch.inference_mode()
    def on_recomputed(self, number: int, own_1LD: Tensor | None) -> None:
        """What the server computed for an inquiry or a trial; None: it cannot compute these layers."""
        with self._changed:
            inquiry = self._inquiries.pop(number, None)
            if inquiry is None:
                self.trials.on_recomputed(number, own_1LD)
            elif inquiry.batch_number in self._in_flight:
                self._conclude(inquiry, own_1LD)

    def _conclude(self, inquiry: Inquiry, own_1LD: Tensor | None) -> None:
        """Remove the machine at fault, look at the stage before, or end a request for which the model gives no finite numbers."""
        verdict, active = inquiry.judge(own_1LD), self._active.get(inquiry.request)
        if verdict == "next":
            self._recompute(inquiry)
            return
        if verdict == "text" and active is not None:
            active.is_not_finite = True
        elif verdict == "machine":
            stage = inquiry.current.stage
            if active is not None:
                active.forget()
            if self.placement.nodes[stage.name].join_number == stage.join_number:
                self.remove_faulty(stage.name, inquiry.fault)
        self._reroute({inquiry.batch_number})

    # --- rerouting -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def _reroute(self, again: Set[int] = frozenset()) -> None:
        """Move requests without an intact route to the current one, and start their batches in flight again, as well as those of these
        numbers."""
        if (route := self.placement.current) is None:
            return
        moving = {number for number, active in self._active.items() if active.route is None or not self.placement.is_intact(active.route)}
        under_way = [
            in_flight
            for in_flight in self._in_flight.values()
            if in_flight.number in again
            or not self.placement.is_intact(in_flight.route)
            or not moving.isdisjoint(in_flight.token_batch.requests)
        ]
        moving |= {request for in_flight in under_way for request in in_flight.token_batch.requests if request in self._active}
        for in_flight in under_way:
            del self._in_flight[in_flight.number]
            if in_flight.started is None and in_flight.token_batch.requests[0] in self._active:
                # It was being restored: no stage is known to have its caches
                self._active[in_flight.token_batch.requests[0]].route = None
        restarted = [in_flight for in_flight in under_way if in_flight.started is not None]
        for number in moving:
            active = self._active[number]
            starts = [in_flight.position_of(number) for in_flight in restarted if number in in_flight.token_batch.requests]
            self._restore(number, active, route, min(starts, default=len(active.ids)))
        for in_flight in restarted:
            self._start_batch(InFlightBatch(next(self._numbers), in_flight.started, route, in_flight.token_batch))

    def _restore(self, number: int, active: ActiveRequest, route: Route, length: int) -> None:
        """Fill the caches of the new route's stages with the first tokens of a request. Batches in flight start again; a stage that has
        read them already, and cannot rewind, reads the request from its beginning."""
        known = set(active.route.stages) if active.route is not None and (self.can_rewind or length == len(active.ids)) else set()
        active.take_route(route)
        fresh = [stage for stage in route.stages if stage not in known]
        if length == 0 or not fresh:
            return
        token_batch = TokenBatch((number,), (0,), (tuple(active.ids[:length]),))
        inputs = {stage: self._input_for(stage, active, token_batch, length) for stage in fresh}
        if any(x_BLD is None for x_BLD in inputs.values()):
            self._start_batch(InFlightBatch(next(self._numbers), None, route, token_batch))
            return
        for stage, x_BLD in inputs.items():
            self.placement.nodes[stage.name].timing.sent(-1, work_of(token_batch, self.placement.planner.cost_of(stage.layers)))
            self.placement.send(stage.name, NodeCommand("read", stage.layers, -1, token_batch, x_BLD))

    def _input_for(self, stage: RouteStage, active: ActiveRequest, token_batch: TokenBatch, length: int) -> Tensor | None:
        if stage.layers.first == 0:
            return self._embed(token_batch)
        kept = active.kept.get(stage.layers.first)
        return torch.cat(kept)[None, :length] if kept and sum(map(len, kept)) >= length else None
