"""Continuous batching: in each step every running request gets a token, and a part of a new prompt is read beside them (chunked prefill).

The engine has no thread, clock or socket of its own. `step` does what can be done now; `loaded_model.py` calls it. Requests are added and
cancelled by other threads, through `submit` and `cancel`.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.generation.decoding import NO_PENALTIES, NotFiniteError, choose, finite_rows
from shoal.serve.batched_kv_caches import PrefixCache
from shoal.serve.batching.backend_interface import Backend, ChosenTokens, ForwardBatch
from shoal.serve.batching.batch_scheduler import BatchScheduler
from shoal.serve.batching.fair_order import FairOrder
from shoal.serve.batching.generation_job import EndReason, Finished, GeneratedToken, GenerationJob
from shoal.serve.batching.prefill_budget import PrefillBudget
from shoal.serve.batching.token_logprobs import with_logprobs
from shoal.serve.constraints import apply_constraints
from shoal.serve.speculation import Speculation


class QueueFullError(Exception):
    """The queue of waiting requests is full."""


class BatchingEngine:
    """Requests: some answers are generated, the others wait."""

    def __init__(
        self,
        backend: Backend,
        *,
        most_running: int,
        most_waiting: int,
        clock: Callable[[], float],
        kept_tokens: int = 0,
        warn: Callable[[str], None] = lambda text: None,
        speculation: Speculation | None = None,
    ) -> None:
        """`kept_tokens`: how many tokens of ended requests stay in the prefix cache. `speculation`: None: no tokens are proposed."""
        self.backend, self.most_running, self.most_waiting, self.clock, self._warn = backend, most_running, most_waiting, clock, warn
        self.arrived = threading.Condition()
        self.waiting: deque[GenerationJob] = deque()
        self.running: list[GenerationJob] = []
        self.tokens_written = 0
        self.wrote_at = float("-inf")
        """When the last token went through the model."""
        self.tokens_read = 0
        self.tokens_reused = 0
        self.tokens_proposed, self.tokens_accepted = 0, 0
        self._finished_at = float("-inf")
        """When the last batch was finished. It may have been started some steps before."""
        self.prefixes = PrefixCache(kept_tokens)
        self._cancelled: set[int] = set()
        self._next_number = 0
        self._order = FairOrder(most_running)
        self._prefill_budget = PrefillBudget(backend.smallest_chunk, backend.largest_chunk)
        self.scheduler = BatchScheduler(backend, self._order, self._prefill_budget, speculation if backend.can_verify else None, clock)

    def submit(self, *jobs: GenerationJob) -> list[int]:
        """Add the choices of one request, all or none. Raises QueueFullError."""
        with self.arrived:
            if len(self.waiting) + len(jobs) > self.most_waiting + max(0, self.most_running - len(self.running)):
                raise QueueFullError
            first = self._next_number
            for job in jobs:
                job.number, job.request, self._next_number = self._next_number, first, self._next_number + 1
                self.waiting.append(job)
            self.arrived.notify_all()
        return [job.number for job in jobs]

    def cancel(self, numbers: Sequence[int]) -> None:
        """End these jobs before their next token."""
        with self.arrived:
            self._cancelled |= set(numbers)
            self.arrived.notify_all()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self._cancelled)

    def step(self) -> None:
        """Start a token for every request that waits for none, and a chunk of the first prompt that is not read yet. Take the results."""
        self._end_cancelled()
        with self.arrived:
            while len(self.running) < self.most_running:
                job = self._order.next(self.waiting, self.running)
                if job is None or not self._admit(job):
                    break
                self.waiting = deque(one for one in self.waiting if one is not job)
                self.running.append(job)
                self._reuse(job)
        self.scheduler.start(self.running)
        start = self.clock()
        for batch, logits_BV in self.backend.results():
            self._finish(batch, logits_BV, start)
            start = self.clock()

    def _admit(self, job: GenerationJob) -> bool:
        """Reserve the memory of a job; kept texts make way for it."""
        while not self.backend.admit(job):
            oldest = self.prefixes.forget_oldest()
            if oldest is None:
                return False
            self.backend.release(oldest)
        return True

    def _reuse(self, job: GenerationJob) -> None:
        """Take the beginning of the prompt from the prefix cache."""
        found = self.prefixes.longest(job.prompt_ids, job.adapter) if job.collector is None else None
        if found is None:
            return
        retained, length = found
        if self.backend.copy_prefix(job.number, retained, length):
            job.read = job.cached = job.reused = length
            self.tokens_reused += length
        else:
            self.prefixes.forget(retained)

    def _finish(self, batch: ForwardBatch, result: Tensor | ChosenTokens | None, start: float) -> None:
        by_number = {job.number: job for job in self.running}
        rows = [(by_number[number], row) for row, number in enumerate(batch.requests) if number in by_number]
        reads = any(job.reading for job, _ in rows)
        verifies = batch.decodes and batch.output is not None
        for job, row in rows:
            job.pending -= 1
            job.cached += 0 if verifies else len(batch.ids[row])
            job.reading -= len(batch.ids[row]) if reads else 0
        if self.scheduler.speculation is not None:
            self._time(self.scheduler.speculation, batch, [job for job, _ in rows])
        if reads:
            self.tokens_read += sum(map(len, batch.ids))
        if isinstance(result, Tensor) and verifies:
            self._verify(rows, result)
        elif batch.output is not None and result is not None:
            self._collect([job for job, _ in rows], result, batch.needs_logits)
        elif isinstance(result, ChosenTokens):
            self._take_chosen(rows, result)
        elif result is not None and batch.needs_logits and rows:
            whole = len(rows) == len(batch.requests)
            self._choose([job for job, _ in rows], result if whole else result[[row for _, row in rows]])
        if reads:
            self._prefill_budget.add_prefill(sum(map(len, batch.ids)), self.clock() - start)
        else:
            self._prefill_budget.add_decode(self.clock() - start)

    def _time(self, speculation: Speculation, batch: ForwardBatch, jobs: list[GenerationJob]) -> None:
        """Report how long a step of answers took, from its start or from the end of the batch before it, whichever was later."""
        before, self._finished_at = self._finished_at, self.clock()
        if batch.decodes and jobs:
            seconds = self._finished_at - max(before, jobs[0].begun_at)
            speculation.observe(len(batch.requests), len(batch.ids[0]), seconds)

    def _take_chosen(self, rows: list[tuple[GenerationJob, int]], chosen: ChosenTokens) -> None:
        """Take the tokens that the backend chose."""
        self.wrote_at = self.clock()
        for job, row in rows:
            token = chosen.tokens[row]
            if token < 0:
                self._warn(f"a request ended: {NotFiniteError()}")
                self._end(job, "not_finite")
                continue
            generated = GeneratedToken(token)
            if chosen.logprobs is not None and job.top_logprobs is not None:
                logprob, others = chosen.logprobs[row]
                generated = GeneratedToken(token, logprob, tuple(others[: job.top_logprobs]))
            self._take(job, generated)

    def _verify(self, rows: list[tuple[GenerationJob, int]], logits_BLV: Tensor) -> None:
        """Choose the next tokens one after the other, in each row for as long as they are the proposed ones. What was read of the others is
        removed."""
        going, accepted = rows, Counter[int]()
        for position in range(logits_BLV.shape[1]):
            for job, _ in going:
                job.cached += 1
            self._choose([job for job, _ in going], logits_BLV[[row for _, row in going], position])
            running = {job.number for job in self.running}
            going = [(job, row) for job, row in going if job.number in running and job.continues_as_proposed(position)]
            accepted.update(job.number for job, _ in going)
            if not going:
                break
        for job, _ in rows:
            self._count(job, accepted[job.number])
            if job.number in running:
                job.started = len(job.written)
                self.backend.rewind(job.number, job.cached)

    def _count(self, job: GenerationJob, accepted: int) -> None:
        """Count the proposed tokens that were verified."""
        assert job.proposer is not None
        proposed = len(job.proposal.tokens)
        job.proposer.learn(job.proposal.match, accepted, min(proposed, accepted + 1))
        self.tokens_proposed += proposed
        self.tokens_accepted += accepted

    def _collect(self, jobs: list[GenerationJob], result: Tensor | ChosenTokens, is_last: bool) -> None:
        """Take what was computed at the tokens of a prompt. `is_last`: it was the last of its chunks."""
        values_1LX = result.values_1LX if isinstance(result, ChosenTokens) else result
        for job in jobs:
            assert job.collector is not None
            assert values_1LX is not None
            try:
                job.collector.add(values_1LX[0])
            except NotFiniteError as problem:
                self._warn(f"a request ended: {problem}")
                self._end(job, "not_finite")
                continue
            if is_last and job.max_tokens == 0:
                self.wrote_at = self.clock()
                self._end(job, "length")
            elif is_last and isinstance(result, ChosenTokens):
                self._take_chosen([(job, 0)], result)
            elif is_last:
                self._choose([job], values_1LX[:, -1])

    def fail(self) -> None:
        """End all running requests after an error in the middle of a step."""
        self.backend.discard_pending()
        for job in list(self.running):
            self._end(job, "failed")

    def _end_cancelled(self) -> None:
        now = self.clock()
        with self.arrived:
            cancelled, self._cancelled = self._cancelled, set()
            dropped = [job for job in self.waiting if job.number in cancelled or job.deadline < now]
            self.waiting = deque(job for job in self.waiting if job not in dropped)
        for job in dropped:
            job.on_event(Finished("cancelled" if job.number in cancelled else "timeout"))
        for job in list(self.running):
            if job.number in cancelled or job.deadline < now:
                self._end(job, "cancelled" if job.number in cancelled else "timeout")

    @torch.inference_mode()
    def _choose(self, jobs: list[GenerationJob], logits_BV: Tensor) -> None:
        scores_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
        if any(job.penalties != NO_PENALTIES for job in jobs):
            scores_BV = torch.stack([job.penalized(logits_V) for job, logits_V in zip(jobs, scores_BV, strict=True)])
        scores_BV = apply_constraints(scores_BV, [job.constraint for job in jobs])
        try:
            tokens = choose(scores_BV, [job.warp for job in jobs], [job.draws.at(len(job.written)) for job in jobs]).tolist()
        except NotFiniteError as problem:
            self._end_not_finite(jobs, logits_BV, finite_rows(scores_BV).tolist(), problem)
            return
        self.wrote_at = self.clock()
        for job, logits_V, token in zip(jobs, logits_BV, tokens, strict=True):
            count = job.top_logprobs
            self._take(job, GeneratedToken(token) if count is None else with_logprobs(logits_V[None], [token], count)[0])

    def _end_not_finite(self, jobs: list[GenerationJob], logits_BV: Tensor, finite: list[bool], problem: ShoalError) -> None:
        """End the jobs whose logits are not finite; the others get their tokens."""
        for job, is_finite in zip(jobs, finite, strict=True):
            if not is_finite:
                self._warn(f"a request ended: {problem}")
                self._end(job, "not_finite")
        rows = [row for row, is_finite in enumerate(finite) if is_finite]
        if rows:
            self._choose([jobs[row] for row in rows], logits_BV[rows])

    def _take(self, job: GenerationJob, generated: GeneratedToken) -> None:
        if job.max_tokens == 0:
            self._end(job, "length")
            return
        if job.constraint is not None and job.constraint.is_over:  # it was not yet when the step was started
            self._end(job, "grammar" if job.constraint.has_failed else "stop")
            return
        self.tokens_written += 1
        if generated.token in job.eos_ids:
            if job.collector is not None:
                job.on_event(generated._replace(is_end=True))
            self._end(job, "stop")
            return
        job.written.append(generated.token)
        if job.constraint is not None:
            job.constraint.advance(generated.token)
        if job.on_event(generated):
            self._end(job, "stop")
        elif job.constraint is not None and job.constraint.is_over:
            self._end(job, "grammar" if job.constraint.has_failed else "stop")
        elif len(job.written) >= job.max_tokens:
            self._end(job, "length")

    def _end(self, job: GenerationJob, reason: EndReason) -> None:
        self.running.remove(job)
        self._retain(job, reason)
        job.on_event(Finished(reason))

    def _retain(self, job: GenerationJob, reason: EndReason) -> None:
        """Keep the caches of a request that ended in order, as far as the prefix cache has capacity; release those of others."""
        unused = [job.number]
        settled = not job.pending or self.backend.ahead  # a step that was started ahead appends after the text
        wanted = reason in ("stop", "length") and settled and self.prefixes.most_tokens > 0
        if wanted and self.scheduler.speculation is not None:
            self.backend.rewind(job.number, job.cached)
        if wanted and self.backend.retain(job.number):
            unused = self.prefixes.add(job.number, [*job.prompt_ids, *job.written][: job.cached], job.adapter)
        for number in unused:
            self.backend.release(number)
