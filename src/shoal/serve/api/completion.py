"""From a request that was checked to the pieces of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from shoal import data
from shoal.models.generation.decoding import LogitPenalties, TokenDraws, Warp, warp_of
from shoal.serve.api.requests import Asked
from shoal.serve.batching import BatchingEngine, Finished, GeneratedToken, GenerationJob, JobEvent, QueueFullError
from shoal.serve.load_model import ServedModel
from shoal.web.auth import RefusedError

_LEAST_SHARE = 1e-9
"""A request may say top_p 0, and means the most likely token."""


class Piece(NamedTuple):
    """Some text of one choice; the last piece has a reason why it is the last."""

    choice: int
    text: str
    written: GeneratedToken | None
    reason: str | None = None


class Stops:
    """Lets text through up to the first stop word. What may be the beginning of one waits until that is clear."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [word for word in words if word]
        self._waiting = ""
        self.found = False

    def add(self, text: str) -> str:
        """The part of the text so far that is certain not to belong to a stop word."""
        self._waiting += text
        starts = [at for word in self._words if (at := self._waiting.find(word)) >= 0]
        if starts:
            self.found = True
            return self._take(min(starts))
        return self._take(len(self._waiting) - self._beginning())

    def finish(self) -> str:
        """What waited for the rest of a stop word that never came."""
        return "" if self.found else self._take(len(self._waiting))

    def _beginning(self) -> int:
        """How many of the last letters may begin a stop word."""
        longest = min(len(self._waiting), max((len(word) - 1 for word in self._words), default=0))
        return next((n for n in range(longest, 0, -1) if any(word.startswith(self._waiting[-n:]) for word in self._words)), 0)

    def _take(self, count: int) -> str:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


class Listener:
    """Turns a choice's tokens into text, in the engine's thread, and says when a stop word has come."""

    def __init__(self, choice: int, text: data.StreamedText, stops: Stops, deliver: Callable[[Piece], None]) -> None:
        self.choice, self.text, self.stops, self.deliver = choice, text, stops, deliver

    def __call__(self, heard: JobEvent) -> bool:
        if isinstance(heard, Finished):
            rest = "" if self.stops.found else self.stops.add(self.text.finish()) + self.stops.finish()
            self.deliver(Piece(self.choice, rest, None, heard.reason))
            return True
        self.deliver(Piece(self.choice, self.stops.add(self.text.add(heard.token)), heard))
        return self.stops.found


class Answer:
    """All choices of one request. Whoever leaves it, whatever the reason, frees their places in the engine."""

    def __init__(self, engine: BatchingEngine, served: ServedModel, asked: Asked, prompts: Sequence[list[int]]) -> None:
        self.engine, self.served, self.asked, self.prompts = engine, served, asked, prompts
        self.tokens = 0
        self.open = len(prompts) * asked.n
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._jobs: list[GenerationJob] = []

    def begin(self) -> None:
        """Raises RefusedError where too many wait."""
        count = self.asked.n
        self._jobs = [self._job(i * count + choice, choice, ids) for i, ids in enumerate(self.prompts) for choice in range(count)]
        try:
            self.engine.submit(*self._jobs)
        except QueueFullError:
            raise RefusedError(429, "too many requests wait already; try again soon", kind="rate_limit_error", code="queue_full") from None

    def leave(self) -> None:
        if self.open:
            self.engine.cancel([job.number for job in self._jobs])

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come. Raises RefusedError where an answer ended before its end."""
        while self.open:
            piece = await self._pieces.get()
            self.tokens += piece.written is not None
            self.open -= piece.reason is not None
            if piece.reason == "timeout":
                raise RefusedError(504, "the answer took longer than serving.request_timeout_s", kind="server_error", code="timeout")
            if piece.reason in ("cancelled", "failed"):
                raise RefusedError(503, "the server could not finish this answer; try again", kind="server_error", code=piece.reason)
            yield piece

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompts that were not read again: each prompt's first choice tells."""
        return sum(job.reused for job in self._jobs[:: self.asked.n])

    def _deliver(self, piece: Piece) -> None:
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the server has ended, and nobody waits for this any more
            self.open = 0

    def _job(self, index: int, choice: int, ids: list[int]) -> GenerationJob:
        asked, settings = self.asked, self.served.settings
        words = [*asked.stop, *(self.served.template.stop_words if asked.messages is not None else ())]
        return GenerationJob(
            ids,
            answer_length(asked, settings.max_new_tokens, len(ids), self.engine.stages.longest),
            TokenDraws(asked.seed, ids, choice),
            Listener(index, data.StreamedText(self.served.tokenizer, ids), Stops(words), self._deliver),
            warp_for(asked, self.served),
            LogitPenalties(
                settings.decoding.repetition_penalty if asked.repetition_penalty is None else asked.repetition_penalty,
                asked.presence_penalty,
                asked.frequency_penalty,
                asked.logit_bias,
            ),
            self.served.eos_ids,
            asked.top_logprobs,
            self.engine.clock() + settings.request_timeout_s,
        )


def warp_for(asked: Asked, served: ServedModel) -> Warp:
    """The file's way of decoding, each of its values replaced where the request has one."""
    decoding = served.settings.decoding
    warp = warp_of(decoding if asked.strategy is None else decoding.replace(active=asked.strategy))
    changes: dict[str, float | int | None] = {}
    if asked.temperature is not None:
        changes["temperature"] = asked.temperature
    if asked.top_p is not None:
        changes["top_p"] = max(asked.top_p, _LEAST_SHARE)
    if asked.top_k is not None:
        changes["top_k"] = asked.top_k if asked.top_k > 0 else None
    if asked.min_p is not None:
        changes["min_p"] = asked.min_p
    return warp._replace(**changes)  # type: ignore[arg-type]


def answer_length(asked: Asked, usual: int, prompt: int, longest: int) -> int:
    """Tokens that the answer may have. Raises RefusedError where the model has no room for them."""
    wanted = asked.max_tokens or 1
    if prompt + wanted > longest:
        message = f"this model's context is {longest} tokens; the prompt has {prompt}, and the answer may have {wanted}"
        raise RefusedError(400, message, param="messages" if asked.messages is not None else "prompt", code="context_length_exceeded")
    return asked.max_tokens or min(usual, longest - prompt)


def prompts_of(asked: Asked, served: ServedModel, vocab_size: int) -> list[list[int]]:
    """The ids of the request's prompts. Raises RefusedError."""
    for token in asked.logit_bias:
        if token >= vocab_size:
            raise RefusedError(400, f"token {token} is not in the vocabulary of {vocab_size}", param="logit_bias")
    if asked.messages is not None:
        try:
            text = served.template.prompt(asked.messages)
        except Exception as error:
            raise RefusedError(400, str(error), param="messages") from None
        return [served.tokenizer.encode(text)]
    return [_ids(prompt, served, vocab_size) for prompt in asked.prompts or []]


def _ids(prompt: str | list[int], served: ServedModel, vocab_size: int) -> list[int]:
    if isinstance(prompt, list):
        if not all(0 <= token < vocab_size for token in prompt):
            raise RefusedError(400, f"prompt has a token that is not in the vocabulary of {vocab_size}", param="prompt")
        return prompt
    ids = [*served.start_ids, *served.tokenizer.encode(prompt)]
    return ids or [served.tokenizer.eos_id or 0]
