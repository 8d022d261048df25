"""Responses of the HTTP API in OpenAI's form, as pydantic models. A field that is not set is left out of the JSON."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast, get_args

from pydantic import BaseModel

from shoal.config.schema.serving import Serving
from shoal.data import StreamedText, Tokenizer, TokenTexts
from shoal.models.generation.decoding import warp_of
from shoal.serve.api.completion import Generation, TextDelta
from shoal.serve.api.requests import CalledFunction, CompletionRequest, DecodingStrategy
from shoal.serve.batching.backend_interface import MachineEntry
from shoal.serve.batching.generation_job import GeneratedToken
from shoal.serve.tool_parser import CallPiece
from shoal.web.auth import RefusedError

FinishReason = Literal["stop", "length", "tool_calls"]


class LikelyToken(BaseModel):
    token: str
    logprob: float | None
    bytes: list[int]


class TokenWithLogprobs(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    content: list[TokenWithLogprobs]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompleteCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    """Null where the answer calls tools and says nothing beside that."""
    refusal: None
    tool_calls: list[CompleteCall] = []


class FunctionDelta(BaseModel):
    name: str = ""
    arguments: str


class CallDelta(BaseModel):
    """A part of a call: the first one has id, type and name."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class AssistantDelta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    tool_calls: list[CallDelta] = []


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunkChoice(BaseModel):
    index: int
    delta: AssistantDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class _Response(BaseModel):
    id: str
    created: int
    model: str


class ChatCompletion(_Response):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(_Response):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextCompletion(_Response):
    """An answer, or a chunk of one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["shoal"] = "shoal"
    parent: str | None = None
    """The model that this adapter changes."""
    loaded: bool
    """Whether it is in memory; the first request that names it loads it."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Tokenized(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    """Tokens that a prompt and its answer may have together."""


class Detokenized(BaseModel):
    prompt: str


class MethodDefaults(BaseModel):
    """What a decoding strategy uses where a request names no value; null: no such limit."""

    temperature: float
    top_k: int | None
    top_p: float | None


class Defaults(BaseModel):
    """What requests get that name no value."""

    strategy: str
    max_tokens: int
    strategies: dict[str, MethodDefaults]


def defaults_of(settings: Serving) -> Defaults:
    decoding, strategies = settings.decoding, {}
    for name in get_args(DecodingStrategy):
        warp = warp_of(decoding.replace(active=name))
        strategies[name] = MethodDefaults(temperature=warp.temperature, top_k=warp.top_k, top_p=warp.top_p)
    return Defaults(strategy=decoding.active, max_tokens=settings.max_new_tokens, strategies=strategies)


class Status(BaseModel):
    model: str
    models: list[ModelEntry]
    """All models and adapters."""
    machines: list[MachineEntry]
    max_running: int | None
    """Answers that are generated at once; null: the model is not loaded."""
    max_running_reason: str
    running: int
    waiting: int
    tokens: int
    defaults: Defaults


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    model: str


class Readiness(BaseModel):
    status: Literal["ready", "not ready"]
    running: int
    waiting: int


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class ResponseWriter:
    """Writes one answer: a chat's or a completion's, whole or in chunks."""

    def __init__(self, generation: Generation, model: str, tokenizer: Tokenizer, texts: TokenTexts) -> None:
        """`texts`: of single tokens."""
        self.generation, self.request, self.tokenizer, self.texts = generation, generation.request, tokenizer, texts
        id = f"{'chatcmpl' if self.request.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head: dict[str, Any] = {"id": id, "created": int(time.time()), "model": model}
        self._decoded: dict[int, StreamedText] = {}
        """By choice: decodes the tokens whose probabilities were written."""
        self._text_lengths: Counter[int] = Counter()
        """By choice: the characters of these tokens."""
        self._begun: set[int] = set()
        """Choices of which a chunk was written."""
        self._calling: set[int] = set()
        """Choices that have called a tool."""

    def whole(self, deltas: Sequence[TextDelta]) -> str:
        """The answer to a request that does not stream."""
        count = len(self.generation.prompts) * self.request.n
        by_choice = [[delta for delta in deltas if delta.choice == i] for i in range(count)]
        usage = self._usage()
        if self.request.is_chat:
            chats = [self._chat_choice(i, parts) for i, parts in enumerate(by_choice)]
            return _filled(_json(ChatCompletion(**self._head, object="chat.completion", choices=[], usage=usage)), "choices", chats)
        texts = [_json(self._text_choice(i, parts, is_first=True)) for i, parts in enumerate(by_choice)]
        return _filled(_json(TextCompletion(**self._head, object="text_completion", choices=[], usage=usage)), "choices", texts)

    def has_prompt(self, delta: TextDelta) -> bool:
        """Whether the chunk of this delta reports the probabilities of a whole prompt."""
        return delta.choice not in self._begun and bool(self.generation.prompt_logprobs(delta.choice))

    def chunk(self, delta: TextDelta) -> str | None:
        """The events of a delta; None where it says nothing to the client. The reason for a chat's end has an event of its own, as OpenAI
        sends it: its client would miss the end of a call that begins and ends in one event."""
        if self.request.is_chat and delta.finish_reason is not None and (delta.text or delta.calls):
            words, end = delta._replace(finish_reason=None), TextDelta(delta.choice, "", (), delta.finish_reason)
            return f"{self.chunk(words)}{self.chunk(end)}"
        is_first = delta.choice not in self._begun
        if not (delta.text or delta.calls or delta.finish_reason or is_first or self.request.logprob_count is not None):
            return None
        self._begun.add(delta.choice)
        if self.request.is_chat:
            choice: ChatChunkChoice | CompletionChoice = self._chat_chunk_choice(delta, is_first)
        else:
            choice = self._text_choice(delta.choice, [delta], is_first)
        return self._chunk([choice], **({"usage": None} if self.request.stream_options.include_usage else {}))

    def usage_chunk(self) -> str:
        return self._chunk([], usage=self._usage())

    def _chunk(self, choices: list[Any], **usage: Any) -> str:
        kind = ChatCompletionChunk if self.request.is_chat else TextCompletion
        return _event(kind(**self._head, object=kind.model_fields["object"].default, choices=choices, **usage))

    def _usage(self) -> Usage:
        prompt, written = sum(map(len, self.generation.prompts)), self.generation.tokens
        details = PromptTokensDetails(cached_tokens=self.generation.reused_tokens)
        return Usage(prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written, prompt_tokens_details=details)

    def _chat_choice(self, index: int, deltas: Sequence[TextDelta]) -> str:
        text, calls = "".join(delta.text for delta in deltas), _whole_calls(deltas)
        called: dict[str, Any] = {"tool_calls": calls} if calls else {}
        message = AssistantMessage(role="assistant", content=None if calls and not text else text, refusal=None, **called)
        logprobs = None if self.request.logprob_count is None else ChatLogprobs(content=[], refusal=None)
        choice = _json(ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=_reason(deltas[-1], calls)))
        return choice if logprobs is None else _filled(choice, "content", map(_json, self._likely_tokens(deltas)))

    def _chat_chunk_choice(self, delta: TextDelta, is_first: bool) -> ChatChunkChoice:
        if delta.calls:
            self._calling.add(delta.choice)
        role = {"role": "assistant"} if is_first else {}
        content = {"content": delta.text or (None if self.generation.tools else "")} if delta.text or is_first else {}
        called = {"tool_calls": _call_deltas(delta.calls)} if delta.calls else {}
        said = AssistantDelta.model_validate({**role, **content, **called})
        reason = _reason(delta, delta.choice in self._calling)
        return ChatChunkChoice(index=delta.choice, delta=said, logprobs=self._chat_logprobs([delta]), finish_reason=reason)

    def _text_choice(self, index: int, deltas: Sequence[TextDelta], is_first: bool) -> CompletionChoice:
        text, reason = (self._echo(index) if is_first else "") + "".join(delta.text for delta in deltas), _reason(deltas[-1])
        tokens = [*(self.generation.prompt_logprobs(index) if is_first else ()), *_tokens(deltas)]
        return CompletionChoice(index=index, text=text, logprobs=self._text_logprobs(index, tokens), finish_reason=reason)

    def _echo(self, index: int) -> str:
        has_echo = isinstance(self.request, CompletionRequest) and self.request.echo
        return self.tokenizer.decode(self.generation.prompts[index // self.request.n]) if has_echo else ""

    def _chat_logprobs(self, deltas: Sequence[TextDelta]) -> ChatLogprobs | None:
        if self.request.logprob_count is None:
            return None
        return ChatLogprobs(content=[*self._likely_tokens(deltas)], refusal=None)

    def _likely_tokens(self, deltas: Sequence[TextDelta]) -> Iterator[TokenWithLogprobs]:
        for token in _tokens(deltas):
            others = [self._likely(*other) for other in token.others]
            yield TokenWithLogprobs.model_validate(self._likely(token.token, token.logprob) | {"top_logprobs": others})

    def _text_logprobs(self, index: int, tokens: Sequence[GeneratedToken]) -> CompletionLogprobs | None:
        if self.request.logprob_count is None:
            return None
        return CompletionLogprobs(
            tokens=[self.texts[one.token] for one in tokens],
            token_logprobs=[one.logprob for one in tokens],
            top_logprobs=[None if one.logprob is None else self._by_text(one) for one in tokens],
            text_offset=[self._offset(index, one) for one in tokens],
        )

    def _offset(self, index: int, token: GeneratedToken) -> int:
        """Where in the text of a choice its next token begins. Parts of a character begin where the character does."""
        if index not in self._decoded:
            prompt = [] if self.generation.prompt_logprobs(index) else self.generation.prompts[index // self.request.n]
            self._decoded[index] = StreamedText(self.tokenizer, prompt)
        at = self._text_lengths[index]
        self._text_lengths[index] += 0 if token.is_end else len(self._decoded[index].add(token.token))
        return at

    def _by_text(self, token: GeneratedToken) -> dict[str, float]:
        """Tokens with the same text, such as parts of a character, are one entry, with the probability of the likelier one."""
        found: dict[str, float] = {}
        for other in token.others:
            text = self.texts[other.token]
            found[text] = max(other.logprob, found.get(text, -math.inf))
        return found

    def _likely(self, token: int, logprob: float | None) -> dict[str, Any]:
        """The fields of a LikelyToken; a model for each of 20 tokens would take ten times as long."""
        text = self.texts[token]
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}


def _tokens(deltas: Sequence[TextDelta]) -> list[GeneratedToken]:
    return [token for delta in deltas for token in delta.tokens]


def _whole_calls(deltas: Sequence[TextDelta]) -> list[CompleteCall]:
    pieces = [piece for delta in deltas for piece in delta.calls]
    texts: dict[int, str] = {}
    for piece in pieces:
        texts[piece.number] = texts.get(piece.number, "") + piece.arguments
    return [
        CompleteCall(id=one.id, type="function", function=CalledFunction(name=one.name, arguments=texts[one.number]))
        for one in pieces
        if one.id is not None and one.name is not None
    ]


def _call_deltas(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """The parts of calls in one chunk, those of one call joined."""
    found: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        part = found.setdefault(piece.number, {"index": piece.number, "function": {"arguments": ""}})
        if piece.name is not None:
            part |= {"id": piece.id, "type": "function"}
            part["function"] = {"name": piece.name, **part["function"]}
        part["function"]["arguments"] += piece.arguments
    return [*found.values()]


def _reason(delta: TextDelta, called: object = False) -> FinishReason | None:
    """`called`: whether the answer calls tools. `Generation.deltas` raises where an answer ended for any other reason."""
    return "tool_calls" if called and delta.finish_reason == "stop" else cast(FinishReason | None, delta.finish_reason)


def _json(response: BaseModel) -> str:
    return response.model_dump_json(exclude_unset=True)


def _filled(response: str, field: str, parts: Iterable[str]) -> str:
    """The JSON of a response with these parts in its first empty list of this name. They are written one by one: no other thread runs
    while pydantic writes, and objects of all tokens at once would be searched for garbage again and again."""
    before, mark, after = response.partition(f'"{field}":[')
    assert mark
    return f"{before}{mark}{','.join(parts)}{after}"


def error_event(error: RefusedError) -> str:
    return f"data: {json.dumps(error.body(), ensure_ascii=False)}\n\n"


def _event(response: BaseModel) -> str:
    return f"data: {_json(response)}\n\n"
