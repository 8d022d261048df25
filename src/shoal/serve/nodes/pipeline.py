"""The serving backend for a model whose layers are on several machines.

The server embeds the tokens and computes the logits (`server_ends.py`). In between, each batch passes the stages of a route
(`stage_dispatch.py`); a stage is a range of layers on one machine. The server keeps the inputs of each stage while a request runs
(`active_requests.py`). When a machine is lost, its requests take another route (`rerouting.py`).

The server judges what comes back by itself. An output of another shape or type, or none within the deadline, is the machine's fault. Where
numbers are not finite, an inquiry computes the stages again (`running_inquiries.py`). A machine at fault is removed, and what was computed
with wrong outputs of it is computed again from the tokens.

There is no thread and no socket here: machines take commands from `NodeState.commands`, and their reports call `on_read`.

Shapes: B batch, L tokens, D width, V vocabulary.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shoal.models.generation.decoding import finite_rows
from shoal.models.packed.layers import byte_count, number_count
from shoal.models.split_model import ModelEnds
from shoal.serve.backend import LONGEST_UNBOUNDED
from shoal.serve.batching.backend_interface import Backend, ForwardBatch, MachineEntry
from shoal.serve.nodes.active_requests import ActiveRequest, ActiveRequests
from shoal.serve.nodes.in_flight import Doubt, InFlightBatch, PendingForward
from shoal.serve.nodes.inquiry import Inquiry
from shoal.serve.nodes.layer_host import LayerRange, TokenBatch
from shoal.serve.nodes.messages import NodeCommand
from shoal.serve.nodes.output_checks import output_problem, rows_not_finite
from shoal.serve.nodes.placement import SERVER_NODE, LayerPlanner, LayerSize, NodePlacement, NodeState, Route
from shoal.serve.nodes.rerouting import Rerouting
from shoal.serve.nodes.running_inquiries import RunningInquiries
from shoal.serve.nodes.server_ends import ServerEnds
from shoal.serve.nodes.stage_dispatch import StageDispatch
from shoal.serve.nodes.trials import NodeTrials

_WAIT_S = 0.1
_REPLAN_EVERY = 256
"""Decoded batches after which the split is planned again."""


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
        self.can_rewind, self.can_verify, self.clock = can_rewind, can_rewind, clock
        self.ends = ServerEnds(ends)
        self.vocab_size = ends.vocab_size
        self.longest = ends.max_seq_len or LONGEST_UNBOUNDED
        planner = LayerPlanner(sizes, cache_tokens, even=even)
        # What machines send directly may arrive twice, so caches must be able to rewind
        self.placement = NodePlacement(planner, expected=expected, probes=can_rewind, tell=tell, clock=clock)
        self._pending: list[PendingForward] = []
        self.ignored_reports = 0
        """Reported failures of batches that the machine does not hold."""
        self._batches_done, self._weight_done = 0, 0.0
        """Batches decoded since the last plan, and how many batches of one request would have taken as long."""
        self._numbers, self._changed = itertools.count(1), threading.Condition(threading.RLock())
        self.trials = NodeTrials(self.placement, self.ends.embed, self.vocab_size, self._numbers, clock)
        self.requests = ActiveRequests(self.placement)
        self.dispatch = StageDispatch(self.placement, self.requests, self.ends, self._changed, clock)
        self.rerouting = Rerouting(self.placement, self.requests, self.dispatch, self._numbers, can_rewind=can_rewind)
        self.inquiries = RunningInquiries(self.placement, self.requests, self.dispatch, self._numbers)

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
                if request not in self.requests.active:
                    self.requests.active[request] = ActiveRequest(None)
                    self.requests.active[request].take_route(self.placement.current)
                active = self.requests.active[request]
                by_route.setdefault(active.route.number if active.route else 0, []).append((request, ids, len(active.ids)))
                active.ids += ids
                active.last = started
            for rows in by_route.values():
                requests, ids_of, positions = (tuple(column) for column in zip(*rows, strict=True))
                token_batch, route = TokenBatch(requests, positions, ids_of), self.requests.active[requests[0]].route or Route(0, ())
                self.dispatch.start(InFlightBatch(next(self._numbers), started, route, token_batch))

    def results(self) -> Iterator[tuple[ForwardBatch, Tensor | None]]:
        with self._changed:
            self._changed.wait_for(lambda: self.dispatch.finished, _WAIT_S)
        while self.dispatch.finished:  # only this thread takes from it
            in_flight, y_BLD = self.dispatch.finished.popleft()
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
            result_BX = self.ends.result(y_BLD, started.batch.output)
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

    def rewind(self, request: int, length: int) -> None:
        """Machines remove the tokens when they get the next ones, with their positions."""
        with self._changed:
            active = self.requests.active[request]
            active.rewind(length)
            if active.last is not None:
                active.last.lengths[request] = length

    def release(self, request: int) -> None:
        with self._changed:
            self.requests.release(request)

    def retain(self, request: int) -> bool:
        with self._changed:
            return self.can_rewind and self.requests.retain(request)

    @torch.inference_mode()
    def copy_prefix(self, request: int, retained: int, length: int) -> bool:
        """The machines copy the retained request's caches. The replacement of a lost machine reads the kept inputs instead."""
        with self._changed:
            kept, current = self.requests.retained.get(retained), self.placement.current
            if kept is None or kept.route is None or current is None:
                return False
            active = self.requests.active[request] = kept.beginning(length)
            active.take_route(kept.route)
            for stage in set(kept.route.stages) & set(current.stages):
                self.placement.send(stage.name, NodeCommand("share", stage.layers, requests=(request, retained), length=length))
            if kept.route != current:
                self.rerouting.restore(request, active, current, length)
            return True

    def discard_pending(self) -> None:
        with self._changed:
            self.dispatch.discard()
            self.inquiries.discard()
            self._pending.clear()

    def machines(self) -> list[MachineEntry]:
        with self._changed:
            return self.placement.machines(LayerSize(number_count(self.ends.modules), byte_count(self.ends.modules)))

    # --- machines join and leave ---------------------------------------------------------------------

    def add(self, node: NodeState) -> None:
        with self._changed:
            self.placement.add(node, is_on_trial=self.trials.needs_trial(node.name))
            self.rerouting.reroute()

    def remove(self, name: str) -> None:
        """Remove a machine. Its requests take another route."""
        with self._changed:
            self.trials.on_removed(name)
            if self.placement.remove(name):
                self.dispatch.on_removed(name)
                self.rerouting.reroute()

    def remove_faulty(self, name: str, why: str, *, has_wrong_outputs: bool = True) -> None:
        """Remove a machine for a fault. It must pass a trial to return. What was computed with wrong outputs of it is computed again."""
        with self._changed:
            node = self.placement.nodes.get(name)
            if node is None or not node.alive or name == SERVER_NODE:
                return
            self.trials.suspect(name, self._layers_of(node), why)
            self.placement.tell(f"{name} is removed: {why}")
            if has_wrong_outputs:
                self.requests.forget_outputs(node.join_number)
            self.remove(name)

    def _layers_of(self, node: NodeState) -> LayerRange:
        """The layers of a machine in the present route, or some that it has."""
        stages = self.placement.current.stages if self.placement.current is not None else ()
        own = [stage.layers for stage in stages if stage.name == node.name]
        return next(iter([*own, *sorted(node.assigned)]), LayerRange(0, 1))

    @torch.inference_mode()
    def tick(self) -> None:
        """Remove machines that are late, and start trials and measurements that are due. To be called several times a second."""
        with self._changed:
            now = self.clock()
            for name in self.trials.tick():
                self.remove_faulty(name, "it did not answer in its trial", has_wrong_outputs=False)
            for node in list(self.placement.nodes.values()):
                if node.alive and node.name != SERVER_NODE and (problem := self.dispatch.lateness_problem(node, now)) is not None:
                    self.remove_faulty(node.name, problem, has_wrong_outputs=False)

    def on_loaded(self, name: str, layers: LayerRange) -> None:
        with self._changed:
            if self.placement.on_loaded(name, layers):
                self.requests.drop_unused()

    def on_load_failed(self, name: str, layers: LayerRange, problem: str) -> None:
        with self._changed:
            self.trials.on_failed(name)
            self.placement.on_load_failed(name, layers, problem)
            self.rerouting.reroute()

    def on_probed(self, name: str, other: str, reached: bool) -> None:
        with self._changed:
            self.placement.on_probed(name, other, reached)

    # --- batches in flight ---------------------------------------------------------------------------

    @torch.inference_mode()
    def on_read(self, name: str, number: int, y_BLD: Tensor, seconds: float, handed_on: bool = False) -> None:
        """A machine reports the output of its stage: send it to the next stage, unless the machine did, or finish the batch. Reports on
        discarded batches are ignored."""
        with self._changed:
            in_flight = self.dispatch.in_flight.get(number) or self.dispatch.unreported.get(number)
            index = in_flight.stage_index(name) if in_flight is not None else -1
            if in_flight is None or index < 0:
                self.placement.nodes[name].timing.reported(number, self.clock(), self.clock())
                if self.trials.on_read(name, number, y_BLD, seconds):
                    self.requests.drop_unused()
                return
            token_batch = in_flight.sent[index]
            shape = (len(token_batch.requests), len(token_batch.ids[0]), self.ends.width)
            if (problem := output_problem(y_BLD, shape, self.ends.dtype)) is not None:
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
            self.dispatch.finish(in_flight, token_batch, y_BLD)
            self._count_decoded(in_flight, token_batch)
        else:
            self.requests.keep_inputs(stages[index + 1], in_flight.started, token_batch, y_BLD)
            if in_flight.doubted:
                self._inquire(in_flight)
            else:
                self.dispatch.send_on(in_flight, index, y_BLD, handed_on)
        if len(in_flight.reported) == len(stages):
            self.dispatch.unreported.pop(in_flight.number, None)

    def decline(self, name: str, number: int) -> None:
        """A machine cannot use what the previous one sent."""
        with self._changed:
            self.dispatch.decline(name, number)

    def _count_decoded(self, in_flight: InFlightBatch, token_batch: TokenBatch) -> None:
        """Plan again after many batches."""
        if in_flight.started is not None and in_flight.started.batch.decodes:
            self._batches_done += 1
            self._weight_done += self.placement.weight_of(token_batch)
        if self._batches_done >= _REPLAN_EVERY:
            self.replan(self._weight_done)
            self._batches_done, self._weight_done = 0, 0.0

    def replan(self, weight: float) -> None:
        """Plan again with the measured times of the machines: new requests may get a better split."""
        self.placement.replan()
        self.requests.drop_unused()

    @torch.inference_mode()
    def fail(self, name: str, number: int, problem: str) -> None:
        """A machine could not compute a batch. Reports of machines that do not hold the batch are ignored."""
        with self._changed:
            in_flight = self.dispatch.in_flight.get(number)
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
                self.dispatch.in_flight[in_flight.number] = in_flight
                requests = [in_flight.token_batch.requests[row] for row in rows]
                doubt = Doubt(requests, "the logits after its layers are not finite", y_BLD[rows])
                self._doubt(in_flight, len(in_flight.route.stages), doubt)

    def _doubt(self, in_flight: InFlightBatch, index: int, doubt: Doubt) -> None:
        """The output of a stage cannot be used for some requests. The batch waits until it is known why."""
        if in_flight.number in self.dispatch.in_flight:
            in_flight.doubted[index] = doubt
            self._inquire(in_flight)

    def _inquire(self, in_flight: InFlightBatch) -> None:
        if self.inquiries.inquire(in_flight):
            self.rerouting.reroute({in_flight.number})

    @torch.inference_mode()
    def on_recomputed(self, number: int, own_1LD: Tensor | None) -> None:
        """What the server computed for an inquiry or a trial; None: it cannot compute these layers."""
        with self._changed:
            inquiry = self.inquiries.take(number)
            if inquiry is None:
                self.trials.on_recomputed(number, own_1LD)
            elif inquiry.batch_number in self.dispatch.in_flight:
                self._conclude(inquiry, own_1LD)

    def _conclude(self, inquiry: Inquiry, own_1LD: Tensor | None) -> None:
        """Remove the machine at fault, look at the stage before, or end a request for which the model gives no finite numbers."""
        verdict, active = inquiry.judge(own_1LD), self.requests.active.get(inquiry.request)
        if verdict == "next":
            self.inquiries.recompute(inquiry)
            return
        if verdict == "text" and active is not None:
            active.is_not_finite = True
        elif verdict == "machine":
            stage = inquiry.current.stage
            if active is not None:
                active.forget()
            if self.placement.nodes[stage.name].join_number == stage.join_number:
                self.remove_faulty(stage.name, inquiry.fault)
        self.rerouting.reroute({inquiry.batch_number})
