"""Many requests through one model: all that run get a token in each step, and a new prompt is read in pieces beside them.

The engine has no thread, clock or socket of its own. `step` does what is to be done now; `server.py` calls it. Requests come and go from
other threads, through `submit` and `cancel`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.models.generation.decoding import NO_PENALTIES, LogitPenalties, TokenDraws, Warp, apply_penalties, choose
from shoal.serve.backend import Backend, ForwardBatch, moving_average
from shoal.serve.prefix_cache import PrefixCache

_SMALLEST_PIECE = 8
"""Fewer cost almost as much: SmolLM2-135M on one slow core reads 2 or 4 tokens in 0.21 s, and 8 in 0.26 s."""
_SHARE = 0.75
"""Time for reading beside writing, of the time for writing: a token then takes 1.75 times as long on the mean, and twice is the goal. Where
more prompts wait than requests write, each prompt counts as much as a request: else many would wait long so that a few are never slower."""
_MOST_CROWD = 4.0
"""So many prompts at most count for each request that writes: a crowd makes its tokens slower, and never stops it."""
_MOST_OWED = 4.0
"""Tokens' time for which no prompt is read after a piece that took longer than expected."""
_LARGEST_PIECE = 512
"""Tokens of a prompt that are read at once where nobody waits for a token meanwhile."""


class TokenLogprob(NamedTuple):
    """A token and the logarithm of its probability."""

    token: int
    logprob: float


class GeneratedToken(NamedTuple):
    """One token of an answer."""

    token: int
    logprob: float | None = None
    """Null where the request did not ask."""
    others: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this place."""


class Finished(NamedTuple):
    """The last thing a request hears."""

    reason: str
    """`stop`, `length`, `timeout`, `cancelled` or `failed`."""


JobEvent = GeneratedToken | Finished


@dataclass
class GenerationJob:
    """One answer that is asked for. `hear` is called in the engine's thread; it returns true when the text is to end."""

    prompt_ids: Sequence[int]
    max_tokens: int
    draws: TokenDraws
    hear: Callable[[JobEvent], bool]
    warp: Warp
    penalties: LogitPenalties = NO_PENALTIES
    eos_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    """How many of the most likely tokens are told with each token; null: no probabilities at all."""
    deadline: float = float("inf")
    number: int = -1
    read: int = 0
    """Tokens of the prompt that the model has read, or is reading."""
    reused: int = 0
    """Tokens of the prompt that came from a kept text."""
    cached: int = 0
    """Tokens that the caches of this job hold for certain."""
    under_way: int = 0
    """Works of this job that were started and are not finished."""
    reading: int = 0
    """Tokens of the prompt that the model is reading."""
    group: int = -1
    """The requests that it is decoded with; −1: none yet."""
    written: list[int] = field(default_factory=list)


class QueueFullError(Exception):
    """As many requests wait as may."""


class BatchingEngine:
    """Requests in the order they came: some run, the others wait."""

    def __init__(self, stages: Backend, *, most_running: int, most_waiting: int, clock: Callable[[], float], kept_tokens: int = 0) -> None:
        """`kept_tokens`: how many tokens of ended requests stay in the caches for prompts that begin like them."""
        self.stages, self.most_running, self.most_waiting, self.clock = stages, most_running, most_waiting, clock
        self.arrived = threading.Condition()
        self.waiting: deque[GenerationJob] = deque()
        self.running: list[GenerationJob] = []
        self.tokens_written = 0
        self.wrote_at = float("-inf")
        """When the last token went through the model."""
        self.tokens_read = 0
        self.tokens_reused = 0
        self.prefixes = PrefixCache(kept_tokens)
        self._gone: set[int] = set()
        self._next_number = 0
        self._pace = _PrefillBudget()

    def submit(self, *jobs: GenerationJob) -> list[int]:
        """Take in the choices of one request, all or none. Raises FullError."""
        with self.arrived:
            if len(self.waiting) + len(jobs) > self.most_waiting + max(0, self.most_running - len(self.running)):
                raise QueueFullError
            for job in jobs:
                job.number, self._next_number = self._next_number, self._next_number + 1
                self.waiting.append(job)
            self.arrived.notify_all()
        return [job.number for job in jobs]

    def cancel(self, numbers: Sequence[int]) -> None:
        """Nobody wants these answers any more: they end before the next token."""
        with self.arrived:
            self._gone |= set(numbers)
            self.arrived.notify_all()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self._gone)

    def step(self) -> None:
        """Start what can be started: a token for every request that waits for none, and a piece of the first prompt that is not read yet.
        Then take what is finished."""
        self._end_those_gone()
        with self.arrived:
            while self.waiting and len(self.running) < self.most_running:
                self.running.append(self.waiting.popleft())
                self._reuse(self.running[-1])
        self._start()
        start = self.clock()
        for work, logits_BV in self.stages.finished():
            self._finish(work, logits_BV, start)
            start = self.clock()

    def _reuse(self, job: GenerationJob) -> None:
        """What a kept text has of the prompt's beginning is not read again."""
        found = self.prefixes.longest(job.prompt_ids)
        if found is None:
            return
        resting, length = found
        if self.stages.share(job.number, resting, length):
            job.read = job.cached = job.reused = length
            self.tokens_reused += length
        else:
            self.prefixes.forget(resting)

    def _start(self) -> None:
        """Every group of requests whose last tokens are there gets the next ones. Beside those that write, so much of prompts is read as
        they can bear; where nobody writes, as much as keeps all machines busy."""
        writing = [job for job in self.running if job.read == len(job.prompt_ids) and job.written]
        for group in _grouped(writing, self.stages.groups):
            if not any(job.under_way for job in group):
                self._begin(ForwardBatch(tuple(job.number for job in group), tuple((job.written[-1],) for job in group)), group)
        self._pace.weigh(sum(job.read < len(job.prompt_ids) for job in self.running), len(writing))
        room = self._pace.piece() if writing else _LARGEST_PIECE * self.stages.groups
        room -= sum(job.reading for job in self.running)
        for job in self.running:
            while room > 0 and job.read < len(job.prompt_ids):
                room -= self._read(job, min(room, _LARGEST_PIECE))

    def _read(self, job: GenerationJob, room: int) -> int:
        """Start to read so much of a prompt, and whole prompts of the same length beside it, such as those of a request's other choices."""
        piece, fresh = job.prompt_ids[job.read : job.read + room], job.read == 0
        whole = len(job.prompt_ids) == len(piece)
        beside = [one for one in self.running if fresh and whole and one is not job and not one.read and len(one.prompt_ids) == len(piece)]
        jobs = [job, *beside[: room // len(piece) - 1]]
        for one in jobs:
            one.read += len(piece)
            one.reading += len(piece)
        ids = tuple(tuple(one.prompt_ids[one.read - len(piece) : one.read]) for one in jobs)
        self._begin(ForwardBatch(tuple(one.number for one in jobs), ids, job.read == len(job.prompt_ids)), jobs)
        return len(piece) * len(jobs)

    def _begin(self, work: ForwardBatch, jobs: list[GenerationJob]) -> None:
        for job in jobs:
            job.under_way += 1
        self.stages.start(work)

    def _finish(self, work: ForwardBatch, logits_BV: Tensor | None, start: float) -> None:
        by_number = {job.number: job for job in self.running}
        rows = [(by_number[number], row) for row, number in enumerate(work.requests) if number in by_number]
        reads = any(job.reading for job, _ in rows)
        for job, _ in rows:
            job.under_way -= 1
            job.cached += len(work.ids[0])
            job.reading -= len(work.ids[0]) if reads else 0
        if reads:
            self.tokens_read += sum(map(len, work.ids))
        if logits_BV is not None and work.ends and rows:
            whole = len(rows) == len(work.requests)
            self._choose([job for job, _ in rows], logits_BV if whole else logits_BV[[row for _, row in rows]])
        if reads:
            self._pace.read(sum(map(len, work.ids)), self.clock() - start)
        else:
            self._pace.wrote(self.clock() - start)

    def fail(self) -> None:
        """Something broke in the middle of a step: end every request that it touched."""
        self.stages.drop()
        for job in list(self.running):
            self._end(job, "failed")

    def _end_those_gone(self) -> None:
        now = self.clock()
        with self.arrived:
            gone, self._gone = self._gone, set()
            dropped = [job for job in self.waiting if job.number in gone or job.deadline < now]
            self.waiting = deque(job for job in self.waiting if job not in dropped)
        for job in dropped:
            job.hear(Finished("cancelled" if job.number in gone else "timeout"))
        for job in list(self.running):
            if job.number in gone or job.deadline < now:
                self._end(job, "cancelled" if job.number in gone else "timeout")

    @torch.inference_mode()
    def _choose(self, jobs: list[GenerationJob], logits_BV: Tensor) -> None:
        scores_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
        if any(job.penalties != NO_PENALTIES for job in jobs):
            rows = zip(jobs, scores_BV, strict=True)
            scores_BV = torch.stack([apply_penalties(logits_V, job.penalties, job.prompt_ids, job.written) for job, logits_V in rows])
        tokens = choose(scores_BV, [job.warp for job in jobs], [job.draws.at(len(job.written)) for job in jobs]).tolist()
        self.wrote_at = self.clock()
        for job, logits_V, token in zip(jobs, logits_BV, tokens, strict=True):
            self.tokens_written += 1
            self._take(job, logits_V, token)

    def _take(self, job: GenerationJob, logits_V: Tensor, token: int) -> None:
        if token in job.eos_ids:
            self._end(job, "stop")
            return
        job.written.append(token)
        if job.hear(_written(logits_V, token, job.top_logprobs)):
            self._end(job, "stop")
        elif len(job.written) >= job.max_tokens:
            self._end(job, "length")

    def _end(self, job: GenerationJob, reason: str) -> None:
        self.running.remove(job)
        self._keep(job, reason)
        job.hear(Finished(reason))

    def _keep(self, job: GenerationJob, reason: str) -> None:
        """Keep the caches of a request that ended in order, as far as there is room; those of others are forgotten."""
        gone = [job.number]
        if reason in ("stop", "length") and not job.under_way and self.prefixes.most_tokens and self.stages.rest(job.number):
            gone = self.prefixes.add(job.number, [*job.prompt_ids, *job.written][: job.cached])
        for number in gone:
            self.stages.release(number)


def _grouped(writing: list[GenerationJob], count: int) -> list[list[GenerationJob]]:
    """Requests in as many groups as keep all machines busy, of about the same size. A request stays in its group, so that the joined caches
    of the groups stay as they are."""
    sizes = [sum(job.group == group for job in writing) for group in range(count)]
    for job in writing:
        least, has_one = sizes.index(min(sizes)), 0 <= job.group < count
        if not job.under_way and not (has_one and sizes[job.group] <= sizes[least] + 1):
            if has_one:
                sizes[job.group] -= 1
            sizes[least] += 1
            job.group = least
    groups = [[job for job in writing if job.group == group] for group in range(count)]
    return [group for group in groups if group]


def _written(logits_V: Tensor, token: int, count: int | None) -> GeneratedToken:
    if count is None:
        return GeneratedToken(token)
    logprobs_V = logits_V.double().log_softmax(-1)
    best = logprobs_V.topk(min(count, len(logprobs_V)))
    others = tuple(TokenLogprob(int(i), float(p)) for i, p in zip(best.indices, best.values, strict=True))
    return GeneratedToken(token, float(logprobs_V[token]), others)


class _PrefillBudget:
    """How much of prompts is read beside those that write: on the mean, so much as takes `_SHARE` of the time for their tokens.

    Whatever its size, a piece costs the time to go through all weights: so it takes about as long as a token, and not every token has one.
    """

    def __init__(self) -> None:
        self.token_s = 0.0
        self.reading_s = 0.0
        """For one token of a prompt."""
        self.credit_s = 0.0
        """How much longer prompts may be read. What was written adds to it, and what was read takes from it."""
        self._crowd = 1.0
        """How many prompts wait for each request that writes; from 1 to `_MOST_CROWD`."""

    def weigh(self, unread: int, writing: int) -> None:
        self._crowd = min(_MOST_CROWD, max(1.0, unread / max(1, writing)))

    def piece(self) -> int:
        if self.credit_s < 0:
            return 0
        if not self.token_s or not self.reading_s:
            return _SMALLEST_PIECE
        return int(min(_LARGEST_PIECE, max(_SMALLEST_PIECE, self._crowd * self.token_s / self.reading_s)))

    def read(self, tokens: int, seconds: float) -> None:
        self.credit_s = max(self.credit_s - seconds, -_MOST_OWED * self._crowd * self.token_s)
        if tokens >= _SMALLEST_PIECE:
            self.reading_s = moving_average(self.reading_s, seconds / tokens)

    def wrote(self, seconds: float) -> None:
        self.credit_s = min(self.credit_s, 0.0) + _SHARE * self._crowd * seconds
        self.token_s = moving_average(self.token_s, seconds)
