"""The inquiries under way: for each, the server computes again what it doubts, stage by stage.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.serve.nodes.active_requests import ActiveRequests
from shoal.serve.nodes.in_flight import InFlightBatch
from shoal.serve.nodes.inquiry import Inquiry, StageEvidence
from shoal.serve.nodes.layer_host import TokenBatch
from shoal.serve.nodes.messages import NodeCommand
from shoal.serve.nodes.placement import SERVER_NODE, NodePlacement
from shoal.serve.nodes.stage_dispatch import StageDispatch

_MOST_DOUBTS = 4
"""Inquiries about one request; after that it ends."""


class RunningInquiries:
    """Starts inquiries about outputs that cannot be used."""

    def __init__(self, placement: NodePlacement, requests: ActiveRequests, dispatch: StageDispatch, numbers: Iterator[int]) -> None:
        """`numbers`: numbers for commands."""
        self.placement, self.requests, self.dispatch, self._numbers = placement, requests, dispatch, numbers
        self._inquiries: dict[int, Inquiry] = {}
        """By the number of the command that recomputes a stage."""

    def discard(self) -> None:
        """Forget all inquiries."""
        self._inquiries.clear()

    def take(self, number: int) -> Inquiry | None:
        """The inquiry that waits for the result of this command."""
        return self._inquiries.pop(number, None)

    def inquire(self, in_flight: InFlightBatch) -> bool:
        """Begin with the first stage whose output cannot be used, as soon as its input is known. True: there is nothing to inquire, and
        the batch must start again."""
        index = min(in_flight.doubted)
        if any(earlier not in in_flight.reported for earlier in range(index)):
            return False
        doubt = in_flight.doubted[index]
        request = next((one for one in doubt.requests if self.requests.is_wanted(one)), None)
        if request is not None:
            active = self.requests.active[request]
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
                self.recompute(Inquiry(in_flight.number, request, ids, doubt.problem, evidence))
                return False
        return True

    def recompute(self, inquiry: Inquiry) -> None:
        """Let the server compute a stage."""
        number, (stage, x_1LD, _) = next(self._numbers), inquiry.current
        self._inquiries[number] = inquiry
        token_batch = TokenBatch((inquiry.request,), (0,), (inquiry.ids,))
        self.placement.send(SERVER_NODE, NodeCommand("recompute", stage.layers, number, token_batch, x_1LD))

    def _evidence(self, in_flight: InFlightBatch, index: int, request: int) -> list[StageEvidence] | None:
        """What the stages up to this one computed of a request, the latest first. None: the server does not know the inputs of all."""
        active, stages, doubt = self.requests.active[request], in_flight.route.stages, in_flight.doubted[index]
        if active.was_sent_directly or not active.computed_by <= in_flight.route.join_numbers:
            return None
        length = in_flight.position_of(request) + len(in_flight.token_batch.ids[0])
        token_batch = TokenBatch((request,), (0,), (tuple(active.ids[:length]),))
        inputs = [self.dispatch.input_of(stage, active, token_batch, length) for stage in stages[: index + 1]]
        known = [x_1LD for x_1LD in inputs if x_1LD is not None]
        if len(known) < len(inputs):
            return None
        last = doubt.y_BLD[doubt.requests.index(request)][None] if doubt.y_BLD is not None else None
        return [StageEvidence(*one) for one in zip(stages, known, [*known[1:], last], strict=False)][::-1]
