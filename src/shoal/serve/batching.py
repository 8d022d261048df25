"""Continuous batching: in each step every running request gets a token, and a part of a new prompt is read beside them (chunked prefill).

The engine has no thread, clock or socket of its own. `step` does what can be done now; `server.py` calls it. Requests are added and
cancelled by other threads, through `submit` and `cancel`.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.generation.decoding import (
    NO_PENALTIES,
    LogitPenalties,
    NotFiniteError,
    TokenDraws,
    Warp,
    apply_penalties,
    choose,
    finite_rows,
)
from shoal.serve.batched_kv_caches import PrefixCache
from shoal.serve.constraints import TokenConstraint, apply_constraints
from shoal.serve.speculation import NO_PROPOSAL, Proposal, Proposer, Speculation

_PREFILL_SHARE = 0.75
"""Prefill budget per decode step, as a share of decode time: a token then takes 1.75 times as long on the mean; twice is the goal. Where
more prompts wait than requests decode, each prompt counts as much as a request; else many would wait long for the sake of a few."""
_MOST_PROMPTS_PER_DECODER = 4.0
"""Waiting prompts that count for each request that decodes: they make its tokens slower, and never stop them."""
_NUMBERS_AT_ONCE, _ROWS_AT_ONCE = 2**24, 64
"""Bounds the logits at all tokens of a prompt: numbers in memory, and rows whose probabilities are computed together."""
_MOST_DEBT = 4.0
"""Tokens' time for which no prompt is read after a chunk that took longer than expected."""


class ForwardBatch(NamedTuple):
    """Tokens for one forward pass: a chunk of one prompt, the rest of several prompts, or one token of each of several requests, each with
    as many proposed ones."""

    requests: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]
    """Of each request; the same number of each, unless the backend takes prompts of different lengths."""
    needs_logits: bool = True
    """False: more of this prompt follows, so the next token is not chosen yet."""
    decodes: bool = False
    """The ids are the last chosen tokens, which a backend that chooses them has itself."""
    draws: tuple[float, ...] = ()
    """The random numbers of the next tokens, for a backend that chooses them."""
    masks: tuple[Tensor | None, ...] = ()
    """The tokens that are allowed next, a bit for each, for such a backend; None: all."""
    output: PromptOutput | None = None
    """What the result has at every token of each row, as [B, L, …]; None: it has the logits of the next tokens alone."""


_SHARING = 4
"""Where prompts of several requests are read, this part of a largest chunk is read at once: 128 tokens instead of 512 on a CPU, which is
hardly slower, and a request that comes meanwhile has its turn soon."""
PromptOutput = Literal["logits", "hidden"]


@dataclass
class MachineEntry:
    """A machine that holds layers of the model."""

    name: str
    parameters: int
    layers: tuple[int, int] | None
    """The first and the last; None: all of them."""
    alive: bool
    weight_bytes: int
    memory_bytes: int
    """Free memory when it joined."""
    token_s: float
    """Seconds that its layers take for one token; 0: none was read yet."""
    tokens: int
    """Tokens that it has read."""
    has_ends: bool
    """Whether it embeds tokens and has the output matrix."""


class Backend(Protocol):
    """A language model that keeps a KV cache for each request, by number: on one machine (`backend.py`) or on several (`nodes/`)."""

    longest: int
    """Tokens that one request may have, prompt and answer together."""
    vocab_size: int
    ahead: int = 0
    """Steps that are started before the tokens of the earlier ones are known. Above 0 the backend chooses the tokens."""
    smallest_chunk: int = 8
    """Least number of tokens of a prompt that are read at once. Fewer cost almost as much: SmolLM2-135M on one slow core reads 2 or 4
    tokens in 0.21 s, and 8 in 0.26 s."""
    largest_chunk: int = 512
    """Tokens of prompts that are read at once where no request waits for a token meanwhile."""
    ragged: bool = False
    """Whether prompts of different lengths are read together."""
    can_verify: bool = False
    """Whether it reads several tokens of each of several answers, gives the logits at each, and removes the wrong ones with `rewind`."""

    @property
    def microbatches(self) -> int:
        """Batches under way that keep all machines busy."""

    def prepare(self) -> None:
        """Do what the first requests would else wait for."""

    def admit(self, job: GenerationJob) -> bool:
        """Reserve the memory of a request. False: it must wait until others have ended."""
        return True

    def start(self, batch: ForwardBatch) -> None:
        """Begin a forward pass. Batches of one request are read in the order in which they were started."""

    def results(self) -> Iterator[tuple[ForwardBatch, Tensor | ChosenTokens | None]]:
        """Finished batches, with the logits [B, V] of the next tokens, the output at all tokens [B, L, …], or the tokens, where they are
        needed. Waits a moment where none is done."""

    def rewind(self, request: int, length: int) -> None:
        """Remove all tokens of a request after the first `length`. Called only where `can_verify`."""
        assert self.can_verify

    def retain(self, request: int) -> bool:
        """Keep the caches of an ended request for prompts that begin like it. False: they cannot be shared, and must be released."""

    def copy_prefix(self, request: int, retained: int, length: int) -> bool:
        """Begin a new request with a copy of the first tokens of a retained one. False: its caches are gone."""

    def release(self, request: int) -> None:
        """Free the caches of a request."""

    def discard_pending(self) -> None:
        """Forget all batches that were started and are not finished."""

    def machines(self) -> list[MachineEntry]:
        """Which machine holds which layers."""

    def close(self) -> None:
        """Disconnect from other machines."""


def moving_average(before: float, now: float) -> float:
    """An exponential moving average of durations; `before` 0: there was none."""
    return now if not before else 0.7 * before + 0.3 * now


class TokenLogprob(NamedTuple):
    """A token and the logarithm of its probability."""

    token: int
    logprob: float


class GeneratedToken(NamedTuple):
    """One token of an answer."""

    token: int
    logprob: float | None = None
    """None where the request did not ask for it."""
    others: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this position."""
    is_end: bool = False
    """Whether it ends the text and has no text itself. Such tokens are reported only with the log-probabilities of the prompt."""


class PromptCollector(ABC):
    """Takes what the model computes at the tokens of one prompt, in their order."""

    output: PromptOutput

    @abstractmethod
    def add(self, values_LX: Tensor) -> None:
        """Take the values at the next tokens. Raises NotFiniteError."""


class PromptLogprobs(PromptCollector):
    """The log-probability of each token of a prompt after those before it, and of the likeliest tokens there. The first has none."""

    output = "logits"

    def __init__(self, ids: Sequence[int], count: int) -> None:
        """`count`: how many likely tokens are reported."""
        self.ids, self.count = ids, count
        self.found = [GeneratedToken(ids[0])]

    def add(self, values_LX: Tensor) -> None:
        if not finite_rows(values_LX).all():
            raise NotFiniteError
        for logits_RV in torch.split(values_LX, _ROWS_AT_ONCE):
            tokens = self.ids[len(self.found) : len(self.found) + len(logits_RV)]  # after the last token of the prompt comes none
            self.found += _with_logprobs(logits_RV[: len(tokens)], tokens, self.count)


class ChosenTokens(NamedTuple):
    """The next tokens, as a backend chose them."""

    tokens: list[int]
    """−1 where the logits were not finite."""
    logprobs: list[tuple[float, list[TokenLogprob]]] | None
    """Of each token, and of the most likely ones; None: no request needs them."""
    values_1LX: Tensor | None = None
    """The batch's output at all tokens, where there is one. Then more of the prompt may follow, and no token is chosen yet."""


EndReason = Literal["stop", "length", "timeout", "cancelled", "failed", "not_finite", "grammar"]
"""`not_finite`: the model itself gives no finite numbers for this text; with several machines, the server has computed them itself.
`grammar`: no token of the vocabulary continues the text as its grammar demands, or the grammar became too complex."""


class Finished(NamedTuple):
    """The last event of a job."""

    reason: EndReason


JobEvent = GeneratedToken | Finished


@dataclass
class GenerationJob:
    """One answer to generate. `on_event` is called in the engine's thread; it returns true when the text is to end."""

    prompt_ids: Sequence[int]
    max_tokens: int
    draws: TokenDraws
    on_event: Callable[[JobEvent], bool]
    warp: Warp
    penalties: LogitPenalties = NO_PENALTIES
    eos_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    """How many likely tokens are reported beside each token; None: no probabilities at all."""
    deadline: float = float("inf")
    constraint: TokenConstraint | None = None
    """The grammar that the answer follows."""
    collector: PromptCollector | None = None
    """Takes what is computed at the tokens of the prompt, of which nothing comes from the prefix cache then."""
    adapter: str = ""
    """The name of the LoRA adapter that changes the weights; empty: none."""
    number: int = -1
    request: int = -1
    """The number of the first job of its request."""
    read: int = 0
    """Tokens of the prompt that the model has read, or is reading."""
    reused: int = 0
    """Tokens of the prompt that came from the prefix cache."""
    cached: int = 0
    """Tokens that the caches of this job hold for certain."""
    pending: int = 0
    """Batches of this job that were started and are not finished."""
    started: int = 0
    """Tokens whose choice was started."""
    reading: int = 0
    """Tokens of the prompt that the model is reading."""
    group: int = -1
    """The microbatch in which it is decoded; −1: none yet."""
    written: list[int] = field(default_factory=list)
    proposal: Proposal = NO_PROPOSAL
    """What is being verified."""
    proposer: Proposer | None = None
    begun_at: float = float("-inf")
    """When the last batch of this job was started."""

    def propose(self, most: int) -> Proposal:
        """Propose at most `most` next tokens."""
        if self.proposer is None:
            self.proposer = Proposer(self.prompt_ids)
        self.proposer.extend(self.written[len(self.proposer) - len(self.prompt_ids) :])
        found = self.proposer.propose(min(most, self.max_tokens - len(self.written) - 1))
        if found.tokens and self.constraint is not None:
            return found._replace(tokens=found.tokens[: self.constraint.accepted(found.tokens)])
        return found

    def continues_as_proposed(self, position: int) -> bool:
        """Whether the last token is the proposed one of this position."""
        return self.proposal.tokens[position : position + 1] == (self.written[-1],)


def probe_job(on_event: Callable[[JobEvent], bool], deadline: float) -> GenerationJob:
    """A job of one token, which shows whether the model works."""
    return GenerationJob([0], 1, TokenDraws(0, [0]), on_event, Warp(0.0), deadline=deadline)


def is_answer(event: JobEvent) -> bool:
    """Whether the first event of a probe shows that the model works."""
    return not isinstance(event, Finished) or event.reason == "stop"


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
        self.speculation = speculation if backend.can_verify else None
        self._cancelled: set[int] = set()
        self._next_number = 0
        self._order = _FairOrder(most_running)
        self._prefill_budget = _PrefillBudget(backend.smallest_chunk, backend.largest_chunk)

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
        self._start()
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

    def _start(self) -> None:
        """Every microbatch whose last tokens are known gets the next ones. Beside requests that decode, the prefill budget bounds how much
        of the prompts is read; where none decodes, as much is read as keeps all machines busy."""
        decoding = [
            job for job in self.running if job.read == len(job.prompt_ids) and (job.written or (self.backend.ahead and job.started))
        ]
        for group in _grouped(decoding, self.backend.microbatches):
            going = [job for job in group if job.started < job.max_tokens and not (job.constraint and job.pending and self.backend.ahead)]
            if going and not any(job.pending > self.backend.ahead for job in going):
                self._begin(self._next_tokens(going), going)
        unread = self._order.unread(self.running)
        self._prefill_budget.set_load(len(unread), len(decoding))
        budget = self._prefill_budget.tokens() if decoding else self.backend.largest_chunk * self.backend.microbatches
        if len({job.request for job in unread}) > 1:
            budget = min(budget, self.backend.largest_chunk // _SHARING)
        budget -= sum(job.reading for job in self.running)
        for job in unread:
            # A collector takes the chunks of a prompt in their order, and reports of machines may come in another
            while budget > 0 and job.read < len(job.prompt_ids) and not (job.collector and job.reading):
                budget -= self._read(job, min(budget, self.backend.largest_chunk))

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

    def _read(self, job: GenerationJob, budget: int) -> int:
        """Start to read at most `budget` tokens of a prompt, and of others. Return how many tokens that are."""
        if job.collector is not None and job.collector.output == "logits":
            budget = min(budget, max(self.backend.smallest_chunk, _NUMBERS_AT_ONCE // self.backend.vocab_size))
        if job.collector is None and self.backend.ragged and len(job.prompt_ids) - job.read <= budget:
            return self._read_whole(budget)
        chunk, fresh = job.prompt_ids[job.read : job.read + budget], job.read == 0
        whole = len(job.prompt_ids) == len(chunk)
        others = [one for one in self.running if one is not job and not one.read and one.collector is None]
        beside = [one for one in others if fresh and whole and len(one.prompt_ids) == len(chunk)]
        jobs = [job, *beside[: budget // len(chunk) - 1]] if job.collector is None else [job]
        for one in jobs:
            self._add_read(one, len(chunk))
        ids = tuple(tuple(one.prompt_ids[one.read - len(chunk) : one.read]) for one in jobs)
        output = None if job.collector is None else job.collector.output
        self._begin(ForwardBatch(tuple(one.number for one in jobs), ids, job.read == len(job.prompt_ids), output=output), jobs)
        return len(chunk) * len(jobs)

    def _read_whole(self, budget: int) -> int:
        """Start to read the rest of all prompts of which at most `budget` tokens are left together, in their order."""
        jobs: list[GenerationJob] = []
        ids: list[tuple[int, ...]] = []
        for job in self._order.unread(self.running):
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
        self._order.add_read(job, tokens)

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

    def _finish(self, batch: ForwardBatch, result: Tensor | ChosenTokens | None, start: float) -> None:
        by_number = {job.number: job for job in self.running}
        rows = [(by_number[number], row) for row, number in enumerate(batch.requests) if number in by_number]
        reads = any(job.reading for job, _ in rows)
        verifies = batch.decodes and batch.output is not None
        for job, row in rows:
            job.pending -= 1
            job.cached += 0 if verifies else len(batch.ids[row])
            job.reading -= len(batch.ids[row]) if reads else 0
        if self.speculation is not None:
            self._time(self.speculation, batch, [job for job, _ in rows])
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
            rows = zip(jobs, scores_BV, strict=True)
            scores_BV = torch.stack([apply_penalties(logits_V, job.penalties, job.prompt_ids, job.written) for job, logits_V in rows])
        scores_BV = apply_constraints(scores_BV, [job.constraint for job in jobs])
        try:
            tokens = choose(scores_BV, [job.warp for job in jobs], [job.draws.at(len(job.written)) for job in jobs]).tolist()
        except NotFiniteError as problem:
            self._end_not_finite(jobs, logits_BV, finite_rows(scores_BV).tolist(), problem)
            return
        self.wrote_at = self.clock()
        for job, logits_V, token in zip(jobs, logits_BV, tokens, strict=True):
            count = job.top_logprobs
            self._take(job, GeneratedToken(token) if count is None else _with_logprobs(logits_V[None], [token], count)[0])

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
        if wanted and self.speculation is not None:
            self.backend.rewind(job.number, job.cached)
        if wanted and self.backend.retain(job.number):
            unused = self.prefixes.add(job.number, [*job.prompt_ids, *job.written][: job.cached], job.adapter)
        for number in unused:
            self.backend.release(number)


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


def _with_logprobs(logits_RV: Tensor, tokens: Sequence[int], count: int) -> list[GeneratedToken]:
    """Each token with its log-probability, and those of the `count` likeliest tokens."""
    logprobs_RV = logits_RV.double().log_softmax(-1)
    own = logprobs_RV.gather(1, torch.tensor(tokens, device=logits_RV.device, dtype=torch.long)[:, None])[:, 0].tolist()
    best = logprobs_RV.topk(min(count, logprobs_RV.shape[1]))
    rows = zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [GeneratedToken(token, logprob, tuple(map(TokenLogprob, ids, values))) for token, logprob, ids, values in rows]


class _PrefillBudget:
    """How much of the prompts is read beside requests that decode: on the mean, `_PREFILL_SHARE` of the time for their tokens.

    A chunk of any size costs the time to go through all weights: so it takes about as long as a token, and not every token has one.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest, self._largest = smallest, largest
        self.decode_s = 0.0
        """For one step of decoding."""
        self.prefill_s = 0.0
        """For one token of a prompt."""
        self.credit_s = 0.0
        """How much longer prompts may be read. Decoding adds to it, and prefill takes from it."""
        self._prompts_per_decoder = 1.0
        """From 1 to `_MOST_PROMPTS_PER_DECODER`."""

    def set_load(self, unread: int, decoding: int) -> None:
        self._prompts_per_decoder = min(_MOST_PROMPTS_PER_DECODER, max(1.0, unread / max(1, decoding)))

    def tokens(self) -> int:
        """Tokens of prompts that may be read beside the next step."""
        if self.credit_s < 0:
            return 0
        if not self.decode_s or not self.prefill_s:
            return self._smallest
        return int(min(self._largest, max(self._smallest, self._prompts_per_decoder * self.decode_s / self.prefill_s)))

    def add_prefill(self, tokens: int, seconds: float) -> None:
        self.credit_s = max(self.credit_s - seconds, -_MOST_DEBT * self._prompts_per_decoder * self.decode_s)
        if tokens >= self._smallest:
            self.prefill_s = moving_average(self.prefill_s, seconds / tokens)

    def add_decode(self, seconds: float) -> None:
        self.credit_s = min(self.credit_s, 0.0) + _PREFILL_SHARE * self._prompts_per_decoder * seconds
        self.decode_s = moving_average(self.decode_s, seconds)


class _FairOrder:
    """The order in which requests get places and are read. One with many answers or long prompts lets others through.

    Holds: a request never has all places, if there are several; of waiting requests the one with the fewest places gets the next one; of
    prompts that are not read yet, that of the request of which the fewest tokens were read comes first, and every second time the oldest.
    """

    def __init__(self, most_running: int) -> None:
        self._most_of_one = max(1, most_running - 1)
        self._tokens: Counter[int] = Counter()
        self._is_oldest_first = False

    def next(self, waiting: Iterable[GenerationJob], running: Iterable[GenerationJob]) -> GenerationJob | None:
        """The job that gets the next place; None: none of them may have it."""
        places = Counter(job.request for job in running)
        allowed = [job for job in waiting if places[job.request] < self._most_of_one]
        return min(allowed, key=lambda job: places[job.request], default=None)

    def unread(self, running: Iterable[GenerationJob]) -> list[GenerationJob]:
        """The jobs whose prompts are not read yet, the next one first. `running`: the oldest first."""
        found = [job for job in running if job.read < len(job.prompt_ids)]
        self._tokens = Counter({job.request: self._tokens[job.request] for job in found})
        self._is_oldest_first = not self._is_oldest_first
        return found if self._is_oldest_first else sorted(found, key=lambda job: self._tokens[job.request])

    def add_read(self, job: GenerationJob, tokens: int) -> None:
        self._tokens[job.request] += tokens
