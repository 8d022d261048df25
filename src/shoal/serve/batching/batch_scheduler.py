"""Which tokens go through the model next: those of requests that decode, and chunks of prompts beside them (chunked prefill)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.serve.batching.backend_interface import Backend, ForwardBatch
from shoal.serve.batching.fair_order import FairOrder
from shoal.serve.batching.generation_job import GenerationJob
from shoal.serve.batching.prefill_budget import PrefillBudget
from shoal.serve.speculation import Speculation

_NUMBERS_AT_ONCE = 2**24
"""Bounds the logits at all tokens of a prompt, in numbers."""
_SHARING = 4
"""Where prompts of several requests are read, this part of a largest chunk is read at once: 128 tokens instead of 512 on a CPU, which is
hardly slower, and a request that comes meanwhile has its turn soon."""


class BatchScheduler:
    """Starts the next forward passes of the running requests."""

    def __init__(
        self, backend: Backend, order: FairOrder, prefill_budget: PrefillBudget, speculation: Speculation | None, clock: Callable[[], float]
    ) -> None:
        """`speculation`: None: no tokens are proposed."""
        self.backend, self.order, self.prefill_budget, self.speculation, self.clock = backend, order, prefill_budget, speculation, clock

    def start(self, running: Sequence[GenerationJob]) -> None:
        """Every microbatch whose last tokens are known gets the next ones. Beside requests that decode, the prefill budget bounds how much
        of the prompts is read; where none decodes, as much is read as keeps all machines busy."""
        decoding = [job for job in running if job.read == len(job.prompt_ids) and (job.written or (self.backend.ahead and job.started))]
        for group in _grouped(decoding, self.backend.microbatches):
            going = [job for job in group if job.started < job.max_tokens and not (job.constraint and job.pending and self.backend.ahead)]
            if going and not any(job.pending > self.backend.ahead for job in going):
                self._begin(self._next_tokens(going), going)
        unread = self.order.unread(running)
        self.prefill_budget.set_load(len(unread), len(decoding))
        budget = self.prefill_budget.tokens() if decoding else self.backend.largest_chunk * self.backend.microbatches
        if len({job.request for job in unread}) > 1:
            budget = min(budget, self.backend.largest_chunk // _SHARING)
        budget -= sum(job.reading for job in running)
        for job in unread:
            # A collector takes the chunks of a prompt in their order, and reports of machines may come in another
            while budget > 0 and job.read < len(job.prompt_ids) and not (job.collector and job.reading):
                budget -= self._read(job, running, min(budget, self.backend.largest_chunk))

    def _next_tokens(self, jobs: list[GenerationJob]) -> ForwardBatch:
        """The last token of each request, with proposed ones where that pays. Rows with fewer get zeros, which are removed."""
        numbers = tuple(job.number for job in jobs)
        last = tuple((job.written[-1] if job.written else 0,) for job in jobs)
        if self.speculation is None:
            return ForwardBatch(numbers, last, decodes=True)
        for job in jobs:
            job.proposal = job.propose(self.speculation.most)
        longest = min(self.backend.longest - len(job.prompt_ids) - len(job.written) + 1 for job in jobs)
        longest = min(longest, _NUMBERS_AT_ONCE // self.backend.vocab_size // len(jobs))
        width = self.speculation.width([job.proposal for job in jobs], longest)
        for job in jobs:
            job.proposal = job.proposal._replace(tokens=job.proposal.tokens[: width - 1])
        if width == 1:
            return ForwardBatch(numbers, last, decodes=True)
        filled = [(*job.proposal.tokens, *[0] * (width - 1 - len(job.proposal.tokens))) for job in jobs]
        ids = tuple(one + more for one, more in zip(last, filled, strict=True))
        return ForwardBatch(numbers, ids, decodes=True, output="logits")

    def _read(self, job: GenerationJob, running: Sequence[GenerationJob], budget: int) -> int:
        """Start to read at most `budget` tokens of a prompt, and of others. Return how many tokens that are."""
        if job.collector is not None and job.collector.output == "logits":
            budget = min(budget, max(self.backend.smallest_chunk, _NUMBERS_AT_ONCE // self.backend.vocab_size))
        if job.collector is None and self.backend.ragged and len(job.prompt_ids) - job.read <= budget:
            return self._read_whole(running, budget)
        chunk, fresh = job.prompt_ids[job.read : job.read + budget], job.read == 0
        whole = len(job.prompt_ids) == len(chunk)
        others = [one for one in running if one is not job and not one.read and one.collector is None]
        beside = [one for one in others if fresh and whole and len(one.prompt_ids) == len(chunk)]
        jobs = [job, *beside[: budget // len(chunk) - 1]] if job.collector is None else [job]
        for one in jobs:
            self._add_read(one, len(chunk))
        ids = tuple(tuple(one.prompt_ids[one.read - len(chunk) : one.read]) for one in jobs)
        output = None if job.collector is None else job.collector.output
        self._begin(ForwardBatch(tuple(one.number for one in jobs), ids, job.read == len(job.prompt_ids), output=output), jobs)
        return len(chunk) * len(jobs)

    def _read_whole(self, running: Sequence[GenerationJob], budget: int) -> int:
        """Start to read the rest of all prompts of which at most `budget` tokens are left together, in their order."""
        jobs: list[GenerationJob] = []
        ids: list[tuple[int, ...]] = []
        for job in self.order.unread(running):
            rest = () if job.collector else tuple(job.prompt_ids[job.read :])
            if rest and sum(map(len, ids)) + len(rest) <= budget:
                jobs.append(job)
                ids.append(rest)
                self._add_read(job, len(rest))
        self._begin(ForwardBatch(tuple(job.number for job in jobs), tuple(ids)), jobs)
        return sum(map(len, ids))

    def _add_read(self, job: GenerationJob, tokens: int) -> None:
        job.read += tokens
        job.reading += tokens
        self.order.add_read(job, tokens)

    def _begin(self, batch: ForwardBatch, jobs: list[GenerationJob]) -> None:
        if self.backend.ahead and batch.needs_logits:
            masks = tuple(None if job.constraint is None else job.constraint.mask() for job in jobs)
            batch = batch._replace(draws=tuple(job.draws.at(job.started) for job in jobs), masks=masks)
        begun_at = self.clock() if self.speculation is not None else 0.0
        for job in jobs:
            job.begun_at = begun_at
            job.pending += 1
            job.started += batch.needs_logits
        self.backend.start(batch)


def _grouped(decoding: list[GenerationJob], count: int) -> list[list[GenerationJob]]:
    """The requests in `count` microbatches of similar size. Each stays in its own, so that the joined caches stay as they are."""
    sizes = [sum(job.group == group for job in decoding) for group in range(count)]
    for job in decoding:
        least, has_one = sizes.index(min(sizes)), 0 <= job.group < count
        if not job.pending and not (has_one and sizes[job.group] <= sizes[least] + 1):
            if has_one:
                sizes[job.group] -= 1
            sizes[least] += 1
            job.group = least
    groups = [[job for job in decoding if job.group == group] for group in range(count)]
    return [group for group in groups if group]
