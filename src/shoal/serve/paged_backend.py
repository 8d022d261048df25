"""A model that is whole on one GPU, decoded with paged KV caches: the GPU chooses the tokens, and a step is started before the tokens of
the last one are read.

Shapes: R rows of a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.models.generation.decoding import NO_PENALTIES
from shoal.models.generation.paged_cache import PAGE
from shoal.models.generation.paged_decoding import MOST_READ, READ_RUNGS, PagedDecoder, StepChoices, StepKind, can_page, computing
from shoal.models.generation.side_texts import SideTexts
from shoal.serve.backend import LONGEST_UNBOUNDED, machine_entry, refuse_unserved
from shoal.serve.batching.backend_interface import Backend, ChosenTokens, ForwardBatch, MachineEntry, moving_average
from shoal.serve.batching.generation_job import GenerationJob, TokenLogprob
from shoal.serve.nodes.layer_host import memory_for_layers
from shoal.serve.serving_memory import cache_token_bytes

_SHARE_OF_MEMORY = 0.75
"""Of the memory that is free beside the weights. The rest is for activations, and for what is recorded."""


class _InFlight(NamedTuple):
    """A batch whose work was started."""

    batch: ForwardBatch
    copies: list[Tensor] | None
    """Where its results are copied to; None: more of the prompt follows."""
    done: Any
    """The event after the copies; None: they are there."""
    x_1LD: Tensor | None
    """The residual stream at all tokens, on the device; None: the batch has no output there."""


class PagedBackend(Backend):
    """The whole model on this machine, with paged caches."""

    microbatches, ahead = 1, 1
    smallest_chunk, largest_chunk, ragged = READ_RUNGS[1], MOST_READ, True

    def __init__(self, model: Any, *, most_running: int, kept_tokens: int, memory_bytes: float | None = None) -> None:
        """`kept_tokens`: tokens of ended requests that may stay. Their pages are in the same pool, and make way for requests.
        `memory_bytes`: beside the weights; null: most of what is free."""
        refuse_unserved(model)
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.memory_bytes = memory_for_layers(self.device) if memory_bytes is None else int(memory_bytes)
        self.token_s, self.tokens = 0.0, 0
        self.vocab_size: int = model.vocab_size
        most = paged_tokens(model, self.memory_bytes)
        self.longest: int = min(model.max_seq_len or LONGEST_UNBOUNDED, most)
        tokens = min(most, most_running * self.longest + kept_tokens)
        self.decoder = PagedDecoder(model, rows=most_running, longest=self.longest, tokens=tokens)
        self._slots: dict[int, int] = {}
        self._kinds: dict[int, StepKind] = {}
        self._retained: dict[int, list[int]] = {}
        """The pages of ended requests."""
        self._in_flight: deque[_InFlight] = deque()
        self._starts = False
        """Whether a batch was started since the last results were asked for."""
        self._last = 0.0

    def prepare(self) -> None:
        """Record the steps for all numbers of requests, which takes some seconds each when it is done for the first time."""
        if self.decoder.records:
            self.decoder.record_all()

    def admit(self, job: GenerationJob) -> bool:
        """Reserve the pages of a request. False: not enough are free."""
        slot = self.decoder.open(len(job.prompt_ids) + job.max_tokens, job.warp, job.penalties, job.prompt_ids)
        if slot is None:
            return False
        self._slots[job.number] = slot
        self._kinds[job.number] = StepKind(job.penalties != NO_PENALTIES, job.top_logprobs is not None, job.constraint is not None)
        return True

    def start(self, batch: ForwardBatch) -> None:
        slots = [self._slots[request] for request in batch.requests]
        kinds = [self._kinds[request] for request in batch.requests]
        kind = StepKind(*(any(column) for column in zip(*kinds, strict=True)))
        if batch.needs_logits:
            self.decoder.mask(slots, batch.masks)
        result: StepChoices | None
        if batch.decodes:
            result, x_1LD = self.decoder.step(slots, batch.draws, kind), None
        else:
            given = slots, batch.ids, batch.draws if batch.needs_logits else None, kind
            result, x_1LD = self.decoder.read_whole(*given) if batch.output else (self.decoder.read(*given), None)
        self._in_flight.append(self._copied(batch, result, x_1LD))
        self._starts = True

    def _copied(self, batch: ForwardBatch, result: StepChoices | None, x_1LD: Tensor | None) -> _InFlight:
        """Copy the results to the CPU, without waiting for them."""
        given = [] if result is None else [result.tokens_R, *(result.likely or ())]
        if self.device.type != "cuda":
            return _InFlight(batch, None if result is None else [one.clone() for one in given], None, x_1LD)
        copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True) for one in given]
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self.device))
        return _InFlight(batch, None if result is None else copies, done, x_1LD)

    def results(self) -> Iterator[tuple[ForwardBatch, ChosenTokens | None]]:
        """Finished batches. The last one that was started stays under way, unless nothing was started after it."""
        left, self._starts = self.ahead if self._starts else 0, False
        while len(self._in_flight) > left:
            batch, copies, done, x_1LD = self._in_flight.popleft()
            if done is not None:
                done.synchronize()
            now = time.perf_counter()
            self.tokens += sum(map(len, batch.ids))
            if batch.decodes:
                self.token_s = moving_average(self.token_s, min(now - self._last, 1.0))
            self._last = now
            chosen = None if copies is None else _chosen(copies)
            yield batch, chosen if x_1LD is None else (chosen or ChosenTokens([], None))._replace(values_1LX=self._output(batch, x_1LD))

    def _output(self, batch: ForwardBatch, x_1LD: Tensor) -> Tensor:
        """The batch's output at all tokens. It is computed only now, so that there are logits of one batch at a time."""
        with computing(self.model):
            values_1LX: Tensor = self.model.last_hidden(x_1LD) if batch.output == "hidden" else self.model.logits(x_1LD)
        return values_1LX

    def discard_pending(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._in_flight.clear()

    def retain(self, request: int) -> bool:
        self._retained[request] = self.decoder.close(self._slots.pop(request), keep=True)
        return True

    def copy_prefix(self, request: int, retained: int, length: int) -> bool:
        self.decoder.begin_with(self._slots[request], self._retained[retained], length)
        return True

    def release(self, request: int) -> None:
        self._kinds.pop(request, None)
        if request in self._slots:
            self.decoder.close(self._slots.pop(request))
        if request in self._retained:
            self.decoder.pool.give_back(self._retained.pop(request))

    def machines(self) -> list[MachineEntry]:
        return [machine_entry(self.model, self.memory_bytes, self.token_s, self.tokens)]

    def close(self) -> None:
        """No other machine takes part."""


def paged_tokens(model: Any, memory_bytes: float) -> int:
    """Tokens for whose pages there is memory."""
    return max(PAGE, int(_SHARE_OF_MEMORY * memory_bytes) // cache_token_bytes(model))


def is_paged(model: Any, beside: SideTexts | None) -> bool:
    """Whether a model that is whole on this machine is decoded with pages."""
    return beside is None and bool(next(model.parameters()).is_cuda) and can_page(model)


def _chosen(copies: Sequence[Tensor]) -> ChosenTokens:
    tokens = copies[0].tolist()
    if len(copies) == 1:
        return ChosenTokens(tokens, None)
    own, ids, best = (one.tolist() for one in copies[1:])
    rows = zip(own, ids, best, strict=True)
    return ChosenTokens(tokens, [(p, [*map(TokenLogprob, likely, values)]) for p, likely, values in rows])
