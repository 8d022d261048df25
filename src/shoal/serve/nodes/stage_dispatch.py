"""Sends batches of tokens through the stages of their routes, and knows which are under way.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.serve.nodes.active_requests import ActiveRequest, ActiveRequests
from shoal.serve.nodes.in_flight import InFlightBatch
from shoal.serve.nodes.layer_host import TokenBatch
from shoal.serve.nodes.messages import NodeCommand
from shoal.serve.nodes.node_timing import work_of
from shoal.serve.nodes.placement import NodePlacement, NodeState, RouteStage
from shoal.serve.nodes.server_ends import ServerEnds

_RESEND_SHARE = 0.25
"""Share of a machine's deadline after which the server sends what another machine claims to have sent."""


class StageDispatch:
    """The batches under way. The caller holds the lock of `changed`, except where it takes from `finished`."""

    def __init__(
        self,
        placement: NodePlacement,
        requests: ActiveRequests,
        ends: ServerEnds,
        changed: threading.Condition,
        clock: Callable[[], float],
    ) -> None:
        """`changed` is notified when a batch is finished."""
        self.placement, self.requests, self.ends, self._changed, self._clock = placement, requests, ends, changed, clock
        self.in_flight: dict[int, InFlightBatch] = {}
        self.unreported: dict[int, InFlightBatch] = {}
        """Finished batches of which some stages have not reported yet."""
        self.finished: deque[tuple[InFlightBatch, Tensor | None]] = deque()
        """Finished batches with the hidden states after the last layer; None: all their requests have ended."""

    def discard(self) -> None:
        """Forget all batches."""
        self.in_flight.clear()
        self.unreported.clear()
        self.finished.clear()

    def on_removed(self, name: str) -> None:
        """A machine was removed: it reports nothing any more."""
        self.unreported = {number: one for number, one in self.unreported.items() if not one.route.uses_node(name)}

    def start(self, in_flight: InFlightBatch) -> None:
        """Embed the tokens and send them to the first stage. Without a route they wait for one."""
        self.in_flight[in_flight.number] = in_flight
        if in_flight.route.stages:
            self.send_to_stage(in_flight, 0, in_flight.token_batch, self.ends.embed(in_flight.token_batch))

    def send_to_stage(self, in_flight: InFlightBatch, index: int, token_batch: TokenBatch, x_BLD: Tensor) -> None:
        """Send a batch to a stage, from where machines send it on directly as far as they can. Ended requests are left out."""
        rows = [i for i, request in enumerate(token_batch.requests) if self.requests.is_wanted(request)]
        if len(rows) < len(token_batch.requests):
            x_BLD, token_batch = x_BLD[rows], token_batch.select(rows)
            self._drop_rows(in_flight, token_batch)
        if not rows:
            return
        requests = [self.requests.active[request] for request in token_batch.requests]
        direct = not any(active.through_server for active in requests)
        in_flight.token_batch, next_hops = token_batch, self.placement.next_hops(in_flight.route.stages[index:]) if direct else ()
        for active in requests if next_hops else ():
            active.was_sent_directly = True
        in_flight.sent |= dict.fromkeys(range(index, index + 1 + len(next_hops)), token_batch)
        stage = in_flight.route.stages[index]
        self._note_sent(in_flight, index)
        self.placement.send(stage.name, NodeCommand("read", stage.layers, in_flight.number, token_batch, x_BLD, next_hops=next_hops))

    def send_on(self, in_flight: InFlightBatch, index: int, y_BLD: Tensor, handed_on: bool) -> None:
        """Send the output of a stage to the next one, unless that has it already."""
        after, stages = index + 1, in_flight.route.stages
        if after in in_flight.sent and not handed_on:
            # The next machine did not accept it: from now on the server sends it
            self.placement.reachable.pop((stages[index].join_number, stages[after].join_number), None)
        if any(later >= after for later in in_flight.reported) or in_flight.number not in self.in_flight:
            return
        if handed_on and after in in_flight.sent and after not in in_flight.declined:
            in_flight.direct_inputs[after] = y_BLD
            self._note_sent(in_flight, after)
        else:
            self.send_to_stage(in_flight, after, in_flight.sent[index], y_BLD)

    def decline(self, name: str, number: int) -> None:
        """A machine cannot use what the previous one sent: the server sends it again, after the commands that must precede it."""
        in_flight = self.in_flight.get(number)
        index = in_flight.stage_index(name) if in_flight is not None else -1
        if in_flight is None or index < 0:
            return
        if index in in_flight.direct_inputs:
            self.send_to_stage(in_flight, index, in_flight.sent[index], in_flight.direct_inputs.pop(index))
        else:
            in_flight.declined.add(index)

    def finish(self, in_flight: InFlightBatch, token_batch: TokenBatch, y_BLD: Tensor) -> None:
        """A batch has passed all its stages."""
        del self.in_flight[in_flight.number]
        in_flight.token_batch = token_batch
        if len(in_flight.reported) < len(in_flight.route.stages):
            self.unreported[in_flight.number] = in_flight
        if in_flight.started is not None:
            self.finished.append((in_flight, y_BLD))
            self._changed.notify_all()

    def input_of(self, stage: RouteStage, active: ActiveRequest, token_batch: TokenBatch, length: int) -> Tensor | None:
        """The input of a stage for the first tokens of a request; None: the server has not kept it."""
        return self.ends.embed(token_batch) if stage.layers.first == 0 else active.kept_input(stage.layers.first, length)

    def lateness_problem(self, node: NodeState, now: float) -> str | None:
        """Why a machine is too late. What another machine may not have sent to it is sent again before."""
        waiting = [
            (since, in_flight.number, index)
            for in_flight in (*self.in_flight.values(), *self.unreported.values())
            for index, since in in_flight.since.items()
            if index not in in_flight.reported and in_flight.route.stages[index].join_number == node.join_number
        ]
        if not waiting:
            return "it did not load its layers in time" if node.timing.is_late_to_load(now) else None
        since, number, index = min(waiting)
        in_flight = self.in_flight.get(number)
        if in_flight is not None and index in in_flight.direct_inputs:
            if node.timing.is_late(since, now, _RESEND_SHARE):  # perhaps the previous machine never sent it
                self.placement.close_direct_paths(in_flight.route.stages[index - 1 : index + 1])
                self.send_to_stage(in_flight, index, in_flight.sent[index], in_flight.direct_inputs.pop(index))
            return None
        return f"it did not answer within {node.timing.allowed_s():.0f} s" if node.timing.is_late(since, now) else None

    def _note_sent(self, in_flight: InFlightBatch, index: int) -> None:
        """A stage has its input: its deadline begins."""
        stage, in_flight.since[index] = in_flight.route.stages[index], self._clock()
        work = work_of(in_flight.sent[index], self.placement.planner.cost_of(stage.layers))
        self.placement.nodes[stage.name].timing.sent(in_flight.number, work)

    def _drop_rows(self, in_flight: InFlightBatch, left: TokenBatch) -> None:
        """Leave out the requests that ended: their logits are not used, and become zeros. Where the model gives no finite numbers for a
        request, its logits become NaN, which ends it."""
        gone = set(in_flight.token_batch.requests) - set(left.requests)
        if in_flight.started is not None:
            for request in gone:
                number = float("nan") if request in self.requests.active else 0.0
                everywhere = () if in_flight.started.batch.output is None else (len(in_flight.token_batch.ids[0]),)
                in_flight.started.logits[request] = torch.tensor(number, device=self.ends.device).expand(
                    *everywhere, self.ends.modules.vocab_size
                )
        if not left.requests:
            self.in_flight.pop(in_flight.number, None)
            if in_flight.started is not None:
                self.finished.append((in_flight, None))
                self._changed.notify_all()
