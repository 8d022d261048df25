"""Generation of the answer to one request: its prompts as token ids, its jobs in the engine, and the text that they produce."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from shoal import data
from shoal.data.text.conversations import messages_of
from shoal.models.generation.decoding import LogitPenalties, TokenDraws, Warp, warp_of
from shoal.serve.api.grammars import ToolUse
from shoal.serve.api.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Prompt,
    TokenizeRequest,
    ToolDefinition,
)
from shoal.serve.batching.backend_interface import Backend
from shoal.serve.batching.batching_engine import BatchingEngine, QueueFullError
from shoal.serve.batching.generation_job import EndReason, Finished, GeneratedToken, GenerationJob, JobEvent
from shoal.serve.batching.token_logprobs import PromptLogprobs
from shoal.serve.constraints import TokenConstraint
from shoal.serve.load_model import ServedModel
from shoal.serve.tool_formats import arguments_schema
from shoal.serve.tool_parser import CallPiece, MarkedText, ToolCallParser
from shoal.web.auth import RefusedError

_LEAST_TOP_P = 1e-9
"""A request may say top_p 0, and means the most likely token."""
_LEAST_TEMPERATURE = 1e-6
"""A lower one chooses the most likely token, as 0 does: a GPU cannot divide by every smaller number."""
_LETTERS_PER_TOKEN, _LEAST_LETTERS = 8, 1 << 14
"""Of a text with more letters for each token of the context, the beginning is encoded first. English has four to five for a token."""
_MOST_LETTERS = 1 << 18
"""Of a text that is only to be encoded: that takes half a second, and requests that come meanwhile wait."""
_INTERVAL_S = 0.04
"""Between two events of a stream, at least: an event takes the processor as long as some tokens take a fast GPU."""


class TextDelta(NamedTuple):
    """New text of one choice."""

    choice: int
    text: str
    tokens: tuple[GeneratedToken, ...]
    finish_reason: EndReason | None = None
    """Set in the last delta of a choice."""
    calls: tuple[CallPiece, ...] = ()


class StopWordFilter:
    """Passes text on up to the first stop word. Text that may be the beginning of one is held back until that is clear."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = [word for word in words if word]
        self._held_back = ""
        self.found = False

    def add(self, text: str) -> str:
        """The part of the text so far that is certain not to belong to a stop word."""
        self._held_back += text
        starts = [at for word in self.words if (at := self._held_back.find(word)) >= 0]
        if starts:
            self.found = True
            return self._take(min(starts))
        return self._take(len(self._held_back) - self._partial_word())

    def finish(self) -> str:
        """Text that was held back for the rest of a stop word that did not come."""
        return "" if self.found else self._take(len(self._held_back))

    def _partial_word(self) -> int:
        """How many of the last letters may begin a stop word."""
        longest = min(len(self._held_back), max((len(word) - 1 for word in self.words), default=0))
        return next((n for n in range(longest, 0, -1) if any(word.startswith(self._held_back[-n:]) for word in self.words)), 0)

    def _take(self, count: int) -> str:
        taken, self._held_back = self._held_back[:count], self._held_back[count:]
        return taken


class ChoiceDecoder:
    """Turns the tokens of one choice into text, in the engine's thread; true when a stop word has ended it.

    On a fast GPU a token takes less time than a message about it. So tokens that come within `interval` seconds are delivered together, and
    where no stop word can end the text they are decoded together, too.
    """

    def __init__(
        self,
        choice: int,
        text: data.StreamedText | MarkedText,
        stops: StopWordFilter,
        parser: ToolCallParser | None,
        deliver: Callable[[TextDelta], None],
        clock: Callable[[], float],
        interval: float,
    ) -> None:
        """`parser`: finds calls of tools in the text; None: there are no tools."""
        self.choice, self.text, self.stops, self.parser, self.deliver = choice, text, stops, parser, deliver
        self.clock, self.interval = clock, interval
        self._next = clock() if interval != float("inf") else interval
        self._tokens: list[GeneratedToken] = []
        self._undecoded: list[int] = []
        self._text = ""
        self._calls: list[CallPiece] = []

    def __call__(self, event: JobEvent) -> bool:
        if isinstance(event, Finished):
            self._decode()
            self._take("" if self.stops.found else self.stops.add(self.text.finish()) + self.stops.finish())
            if self.parser is not None:
                self._keep(*self.parser.finish())
            self._deliver(event.reason)
            return True
        self._tokens.append(event)
        if not event.is_end:
            self._undecoded.append(event.token)
        is_due = self.interval == 0 or self.clock() >= self._next
        if is_due or self.stops.words or self.parser is not None:
            self._decode()
        if is_due:
            self._deliver(None)
            self._next = self.clock() + self.interval
        return self.stops.found or (self.parser is not None and self.parser.is_done)

    def _decode(self) -> None:
        if self._undecoded:
            self._take(self.stops.add(self.text.add(*self._undecoded)))
            self._undecoded.clear()

    def _take(self, text: str) -> None:
        self._keep(*((text, ()) if self.parser is None else self.parser.add(text)))

    def _keep(self, text: str, calls: Sequence[CallPiece]) -> None:
        self._text += text
        self._calls += calls

    def _deliver(self, reason: EndReason | None) -> None:
        self.deliver(TextDelta(self.choice, self._text, tuple(self._tokens), reason, tuple(self._calls)))
        self._text = ""
        self._tokens.clear()
        self._calls.clear()


class Generation:
    """All choices of one request. `cancel` must be called at the end, whatever the reason: it frees their places in the engine."""

    def __init__(
        self,
        engine: BatchingEngine,
        served: ServedModel,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        tools: ToolUse | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        """`tools`: that the answer may call; `constraint`: its grammar. Raises RefusedError where too many requests wait."""
        self.engine, self.served, self.request, self.prompts = engine, served, request, prompts
        self.tools, self._constraint = tools, constraint
        self.tokens = 0
        self.unfinished = len(prompts) * request.n
        self._loop = asyncio.get_running_loop()
        self._deltas: asyncio.Queue[TextDelta] = asyncio.Queue()
        count = request.n
        self._jobs = [self._job(i * count + choice, choice, ids) for i, ids in enumerate(prompts) for choice in range(count)]
        submit(engine, self._jobs)

    def cancel(self) -> None:
        if self.unfinished:
            self.engine.cancel([job.number for job in self._jobs])

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """The text of all choices as it comes. Raises RefusedError where an answer could not be completed."""
        while self.unfinished:
            delta = await self._deltas.get()
            self.tokens += len(delta.tokens)
            self.unfinished -= delta.finish_reason is not None
            raise_unfinished(delta.finish_reason)
            yield delta

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompts that were in the prefix cache: the number is that of each prompt's first choice."""
        return sum(job.reused for job in self._jobs[:: self.request.n])

    def prompt_logprobs(self, index: int) -> Sequence[GeneratedToken]:
        """The tokens of the prompt of a choice, if their log-probabilities were asked for."""
        collector = self._jobs[index].collector
        return collector.found if isinstance(collector, PromptLogprobs) else ()

    def _deliver(self, delta: TextDelta) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deltas.put_nowait, delta)
        except RuntimeError:  # the server has ended
            self.unfinished = 0

    def _job(self, index: int, choice: int, ids: list[int]) -> GenerationJob:
        request, settings = self.request, self.served.settings
        words = [*request.stop, *(self.served.stop_words if request.is_chat else ())]
        text, tools = data.StreamedText(self.served.tokenizer, ids), self.tools
        repetition = request.repetition_penalty
        return GenerationJob(
            ids,
            answer_length(request, settings.max_new_tokens, len(ids), self.engine.backend.longest),
            TokenDraws(request.seed, ids, choice),
            ChoiceDecoder(
                index,
                text if tools is None else MarkedText(text, tools.form),
                StopWordFilter(words),
                None if tools is None else tools.parser(),
                self._deliver,
                self.engine.clock,
                _INTERVAL_S if request.stream else float("inf"),
            ),
            warp_for(request, self.served),
            LogitPenalties(
                settings.decoding.repetition_penalty if repetition is None else repetition,
                request.presence_penalty,
                request.frequency_penalty,
                request.logit_bias,
            ),
            self.served.eos_ids,
            request.logprob_count,
            self.engine.clock() + settings.request_timeout_s,
            constraint=None if self._constraint is None else self._constraint.copy(),
            collector=self._collector(ids),
            adapter=self.served.adapter,
        )

    def _collector(self, ids: list[int]) -> PromptLogprobs | None:
        """Collects the log-probabilities of an echoed prompt."""
        count = self.request.logprob_count
        if count is None or not (isinstance(self.request, CompletionRequest) and self.request.echo):
            return None
        return PromptLogprobs(ids, count)


def submit(engine: BatchingEngine, jobs: Sequence[GenerationJob]) -> list[int]:
    """Give the jobs of one request to the engine. Raises RefusedError where too many requests wait."""
    try:
        return engine.submit(*jobs)
    except QueueFullError:
        most = engine.most_running + engine.most_waiting
        message = f"too many answers wait already (serving.max_waiting is {engine.most_waiting}); try again soon"
        if len(jobs) > most:
            message = f"this request has {len(jobs)} answers, and {most} at most run or wait here (serving.max_running and "
            message += "serving.max_waiting); send fewer prompts in one request"
        raise RefusedError(429, message, kind="rate_limit_error", code="queue_full") from None


def raise_unfinished(reason: EndReason | None) -> None:
    """Raises RefusedError for the end of an answer that could not be completed."""
    if reason == "timeout":
        raise RefusedError(504, "the answer took longer than serving.request_timeout_s", kind="server_error", code="timeout")
    if reason == "not_finite":
        message = "the model computes no finite numbers for this text: its weights are damaged, or its training diverged"
        raise RefusedError(503, message, kind="server_error", code="not_finite")
    if reason == "grammar":
        message = "no token of the model's vocabulary continues the answer as its grammar demands, or the grammar is too complex"
        raise RefusedError(400, message, code="grammar_failed")
    if reason in ("cancelled", "failed"):
        raise RefusedError(503, "the server could not finish this answer; try again", kind="server_error", code=reason)


def warp_for(request: GenerationRequest, served: ServedModel) -> Warp:
    """The decoding of the server's settings, each value replaced where the request has one."""
    decoding = served.settings.decoding
    warp = warp_of(decoding if request.strategy is None else decoding.replace(active=request.strategy))
    changes = request.model_dump(include={"temperature", "top_p", "top_k", "min_p"}, exclude_none=True)
    if "top_p" in changes:
        changes["top_p"] = max(changes["top_p"], _LEAST_TOP_P)
    if changes.get("temperature", 1) < _LEAST_TEMPERATURE:
        changes["temperature"] = 0.0
    if changes.get("top_k", 1) <= 0:
        changes["top_k"] = None
    return warp._replace(**changes)


def answer_length(request: GenerationRequest, usual: int, prompt: int, longest: int) -> int:
    """Tokens that the answer may have. Raises RefusedError where the model's context is too short for them."""
    wanted = 1 if request.token_limit is None else request.token_limit
    if prompt + wanted > longest:
        what = "conversation" if request.is_chat else "prompt"
        message = f"this model's context is {longest} tokens, and this {what} has {prompt}"
        if prompt < longest:
            message += f": max_tokens may be at most {longest - prompt}, not {wanted}"
        else:
            message += ": start a new conversation, or shorten it" if request.is_chat else ": shorten it"
        raise RefusedError(400, message, param="messages" if request.is_chat else "prompt", code="context_length_exceeded")
    return min(usual, longest - prompt) if request.token_limit is None else request.token_limit


def prompt_ids(request: GenerationRequest, served: ServedModel, backend: Backend, tools: Sequence[ToolDefinition] = ()) -> list[list[int]]:
    """The token ids of the request's prompts. `tools`: that a conversation describes. Raises RefusedError."""
    for token in request.logit_bias:
        if token >= backend.vocab_size:
            raise RefusedError(400, f"token {token} is not in the vocabulary of {backend.vocab_size}", param="logit_bias")
    if isinstance(request, CompletionRequest):
        return [encode_prompt(prompt, served, backend, "prompt") for prompt in request.prompt]
    assert isinstance(request, ChatRequest)
    return [_encode(_conversation(request.messages, served, tools), served, backend.longest, "messages")]


def tokens_of(request: TokenizeRequest, served: ServedModel) -> list[int]:
    """The token ids of a text or a conversation. Raises RefusedError."""
    is_chat = request.messages is not None
    text = _conversation(request.messages, served) if request.messages is not None else request.prompt or ""
    if len(text) > _MOST_LETTERS:
        raise RefusedError(400, f"a text of at most {_MOST_LETTERS:,} letters becomes tokens", param="messages" if is_chat else "prompt")
    return [*(served.start_ids if request.add_special_tokens and not is_chat else ()), *served.encode(text)]


def _encode(text: str, served: ServedModel, longest: int, param: str) -> list[int]:
    """The token ids of a text. Of one that is far too long only the beginning is encoded: others wait for the tokenizer meanwhile. Raises
    RefusedError."""
    most = max(_LETTERS_PER_TOKEN * longest, _LEAST_LETTERS)
    if len(text) > most and len(served.encode(text[:most])) > longest:
        message = f"this model's context is {longest} tokens, and {param} has more: shorten it"
        raise RefusedError(400, message, param=param, code="context_length_exceeded")
    return served.encode(text)


def check_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises RefusedError for an id that the model does not have."""
    if not all(0 <= token < vocab_size for token in tokens):
        raise RefusedError(400, f"{param} has a token that is not in the vocabulary of {vocab_size}", param=param)


def _conversation(messages: Sequence[ChatMessage], served: ServedModel, tools: Sequence[ToolDefinition] = ()) -> str:
    """The text of a conversation. Raises RefusedError."""
    try:
        turns = [one.model_dump(exclude_none=True) for one in messages]
        return served.template.prompt(messages_of(turns, "messages", "this request"), [*map(_described, tools)] or None)
    except Exception as error:
        raise RefusedError(400, str(error), param="messages") from None


def _described(tool: ToolDefinition) -> dict[str, Any]:
    """A tool as templates read it."""
    function = tool.function.model_dump(exclude={"strict"}, exclude_none=True)
    return {"type": "function", "function": {**function, "parameters": arguments_schema(tool.function.parameters)}}


def encode_prompt(prompt: Prompt, served: ServedModel, backend: Backend, param: str) -> list[int]:
    """The token ids of a prompt, of which there is at least one. Raises RefusedError."""
    if isinstance(prompt, list):
        check_tokens(prompt, backend.vocab_size, param)
        return prompt
    ids = [*served.start_ids, *_encode(prompt, served, backend.longest, param)]
    return ids or [served.tokenizer.eos_id or 0]
