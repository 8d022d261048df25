"""Request bodies of the HTTP API, as pydantic models. Every refusal names its parameter, in OpenAI's form."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from shoal.web.auth import RefusedError

MOST_CHOICES, MOST_PROMPTS = 8, 64
MOST_STOPS = 4
MOST_BIASES = 300
_MOST_CALLS, _MOST_TOOLS, _MOST_CHOICE_TEXTS = 128, 128, 1000
_MOST_MESSAGES, _MOST_DETOKENIZED = 10_000, 1 << 16
_LARGEST_SEED = 2**63
_MOST_TOKENS = 10**9
_ROLES = ("system", "developer", "user", "assistant", "tool")


class StrictModel(BaseModel):
    """A value of the wrong type is refused and never converted; so is a field that is not declared.

    Holds: only few faults of a body are looked for. pydantic would make an error of each, and 4 MB have room for a million: half a minute
    in which nothing else is answered. So lists end with their first fault (`fail_fast`), and objects with their first unknown field.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_no_other_fields(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            other = next((name for name in value if name not in _names_of(cls)), None)
            if other is not None:
                raise PydanticCustomError("unknown_field", "{name} is not offered", {"name": other})
        return value


@functools.cache
def _names_of(model: type[BaseModel]) -> frozenset[str]:
    """The names of the fields as clients write them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class MessageTextPart(StrictModel):
    type: Literal["text"]
    text: str


def _joined_parts(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        return value
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in value):
        raise ValueError("this server reads parts of type text only")
    return "".join(part["text"] for part in value)


class CalledFunction(StrictModel):
    name: str
    arguments: str = Field(description="A JSON object, as a text.")


class ToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_joined_parts, json_schema_input_type=str | list[MessageTextPart])] = None
    tool_calls: list[ToolCall] | None = Field(
        default=None, max_length=_MOST_CALLS, fail_fast=True, description="What an assistant called before."
    )
    tool_call_id: str | None = Field(default=None, description="Of a tool's answer: the call that it answers.")
    name: str | None = Field(default=None, description="Accepted and not used.")
    annotations: Any = Field(default=None, description="Accepted and not used: clients send whole answers back.")
    provider_specific_fields: Any = Field(default=None, description="Accepted and not used: LiteLLM adds it to answers.")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Clients send an assistant's answer back with fields that are null, such as `refusal` and `tool_calls`."""
        if not isinstance(value, Mapping) or value.get("role") not in _ROLES:
            raise ValueError(f"a message must have a role: one of {', '.join(_ROLES)}")
        if value.get("content") is None and not (value["role"] == "assistant" and value.get("tool_calls")):
            raise ValueError("a message must have a content; an assistant's may have tool_calls instead")
        return {name: one for name, one in value.items() if one is not None}


class StreamOptions(StrictModel):
    include_usage: bool | None = Field(default=None, description="Send the token counts in a last chunk.")
    include_obfuscation: bool | None = Field(default=None, description="Accepted and not used.")


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class NamedJsonSchema(StrictModel):
    name: str = Field(max_length=64, description="Accepted and not used.")
    description: str | None = Field(default=None, description="Accepted and not used.")
    content: dict[str, Any] | None = Field(default=None, alias="schema", description="What the answer fits. Absent: any JSON.")
    strict: bool | None = Field(default=None, description="The answer always fits.")


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: NamedJsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionDefinition(StrictModel):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="The JSON schema of the arguments, which are an object.")
    strict: bool | None = Field(default=None, description="A call's arguments always fit, also where the model chooses whether to call.")

    @field_validator("parameters")
    @classmethod
    def _is_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type", "object") != "object":
            raise ValueError("parameters must be the schema of an object: their type is object")
        return value


class ToolDefinition(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(StrictModel):
    name: ToolName


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class SomeTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1, max_length=_MOST_TOOLS, fail_fast=True)


class SomeToolsChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedToolChoice | SomeToolsChoice, Field(discriminator="type")]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


DecodingStrategy = Literal["greedy", "sampling", "top_k", "top_p", "top_k_top_p"]
StopWord = Annotated[str, Field(min_length=1, max_length=256)]
StopWords = Annotated[list[StopWord], Field(max_length=MOST_STOPS, fail_fast=True)]
TokenId = Annotated[int, Field(strict=False, ge=0, lt=10**9)]
"""In JSON the key of an object is a string, so here a number is read from one."""
GuidedChoice = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=_MOST_CHOICE_TEXTS, fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _few(biases: Any) -> Any:
    if isinstance(biases, Mapping) and len(biases) > MOST_BIASES:
        raise ValueError(f"at most {MOST_BIASES} tokens may have a bias, and here are {len(biases)}")
    return biases


Biases = Annotated[dict[TokenId, Bias], BeforeValidator(_few), Field(max_length=MOST_BIASES)]


def chosen_tools(choice: ToolChoice) -> list[str] | None:
    """The names of the tools that an answer may call; None: all."""
    if isinstance(choice, str):
        return None
    return [one.function.name for one in (choice.allowed_tools.tools if isinstance(choice, SomeToolsChoice) else [choice])]


class GenerationRequest(StrictModel):
    """Fields that chats and completions have in common. Where one is absent or null, the server's setting applies."""

    is_chat: ClassVar[bool]

    model: str = Field(min_length=1, description="The name that GET /v1/models lists.")
    max_tokens: int | None = Field(default=None, ge=1, le=_MOST_TOKENS, description="The most tokens that an answer may have.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 chooses the most likely token.")
    top_p: float | None = Field(default=None, ge=0, le=1, description="Draw from the likeliest tokens that have this share together.")
    top_k: int | None = Field(default=None, ge=-1, le=10**9, description="Draw from this many tokens; 0 or -1: from all.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="Leave out tokens below this share of the likeliest one's.")
    strategy: DecodingStrategy | None = Field(default=None, description="One of the decoding strategies of `serving.decoding`.")
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="Weakens tokens that occurred; 1: off.")
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, description="Subtracted from the logits of tokens that were generated.")
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, description="The same, times how often the token was generated.")
    logit_bias: Biases = Field(default={}, description="Added to the logits of these token ids.")
    n: int = Field(default=1, ge=1, le=MOST_CHOICES, description="Answers to write for each prompt.")
    stop: Annotated[StopWords, BeforeValidator(_as_list, json_schema_input_type=StopWord | StopWords)] = Field(
        default=[], description="Texts that end an answer. They are not part of it."
    )
    seed: int | None = Field(default=None, ge=-_LARGEST_SEED, lt=_LARGEST_SEED, description="The same seed and request give the same text.")
    stream: bool = Field(default=False, description="Send the answer as server-sent events while it is written.")
    stream_options: StreamOptions = Field(default=StreamOptions(), description="Only with `stream`.")
    guided_regex: str | None = Field(default=None, min_length=1, description="A regular expression that the whole answer matches.")
    guided_choice: GuidedChoice | None = Field(default=None, description="The answer is one of these texts.")
    grammar: str | None = Field(
        default=None, min_length=1, description="A grammar that the answer follows, in the Lark form of llguidance."
    )
    user: Any = Field(default=None, description="Accepted and not used.")
    metadata: Any = Field(default=None, description="Accepted and not used.")
    safety_identifier: Any = Field(default=None, description="Accepted and not used.")
    prompt_cache_key: Any = Field(default=None, description="Accepted and not used.")

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """How many likely tokens are reported beside each token; None: no probabilities."""
        raise NotImplementedError


class ChatRequest(GenerationRequest):
    is_chat = True

    messages: list[ChatMessage] = Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True, description="The conversation so far.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=_MOST_TOKENS, description="The same as max_tokens, and taken before it."
    )
    logprobs: bool = Field(default=False, description="Report the log probability of each token.")
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="Likely tokens to report beside each token.")
    response_format: ResponseFormat | None = Field(default=None, description="Text, any JSON object, or JSON that fits a schema.")
    tools: list[ToolDefinition] = Field(
        default=[], max_length=_MOST_TOOLS, fail_fast=True, description="Functions that the answer may call."
    )
    tool_choice: ToolChoice = Field(
        default="auto", description="Whether the answer calls tools: none, as the model likes, at least one, the named, or some."
    )
    parallel_tool_calls: bool = Field(default=True, description="Whether an answer may have several calls, if the model's template has.")
    store: Literal[False] = Field(default=False, description="The server stores no conversation.")
    service_tier: str | None = Field(default=None, description="Accepted and not used.")
    modalities: list[Literal["text"]] = Field(default=["text"], max_length=1, fail_fast=True, description="Answers are texts.")

    @field_validator("tools")
    @classmethod
    def _have_different_names(cls, value: list[ToolDefinition]) -> list[ToolDefinition]:
        if len({one.function.name for one in value}) < len(value):
            raise ValueError("tools must have different names")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _is_a_tool(cls, value: ToolChoice, others: ValidationInfo) -> ToolChoice:
        names = [one.function.name for one in others.data.get("tools", [])]
        if value == "required" and not names:
            raise ValueError("tool_choice required needs tools")
        for one in chosen_tools(value) or ():
            if one not in names:
                raise ValueError(f"tool_choice names {one!r}, which is none of the tools")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, others: ValidationInfo) -> int | None:
        if value is not None and not others.data.get("logprobs"):
            raise ValueError("top_logprobs needs logprobs to be true")
        return value

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Prompt = str | Annotated[list[int], Field(min_length=1, fail_fast=True)]
"""A text, or its token ids."""
Prompts = Annotated[list[Prompt], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]

Inputs = Annotated[list[Prompt], Field(min_length=1, max_length=2048, fail_fast=True)]


def _as_prompts(value: Any) -> Any:
    is_one = not isinstance(value, list) or (value and all(type(one) is int for one in value))
    return [value] if is_one else value


class CompletionRequest(GenerationRequest):
    is_chat = False

    prompt: Annotated[Prompts, BeforeValidator(_as_prompts, json_schema_input_type=Prompt | Prompts)] = Field(
        description="One prompt or several; each is a text, or a list of token ids."
    )
    max_tokens: int | None = Field(
        default=None, ge=0, le=_MOST_TOKENS, description="The most tokens that an answer may have. 0: the prompt is read, for `echo`."
    )
    logprobs: int | None = Field(default=None, ge=0, le=5, description="Likely tokens to report beside each token.")
    echo: bool = Field(default=False, description="Begin each answer with its prompt. With `logprobs`, its tokens are reported, too.")
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES, description="Must equal n.")

    @field_validator("prompt")
    @classmethod
    def _bounded(cls, value: list[Prompt], others: ValidationInfo) -> list[Prompt]:
        if len(value) * others.data.get("n", 1) > MOST_PROMPTS:
            raise ValueError(f"a request may have {MOST_PROMPTS} answers at most: prompts times n")
        return value

    @field_validator("best_of")
    @classmethod
    def _equals_n(cls, value: int | None, others: ValidationInfo) -> int | None:
        if value is not None and value != others.data.get("n"):
            raise ValueError("best_of is not offered: it must equal n")
        return value

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs


class EmbeddingRequest(StrictModel):
    model: str = Field(min_length=1, description="The name that GET /v1/models lists.")
    texts: Annotated[Inputs, BeforeValidator(_as_prompts, json_schema_input_type=Prompt | Inputs)] = Field(
        alias="input", description="One text or several; each is a text, or a list of token ids."
    )
    encoding_format: Literal["float", "base64"] = Field(default="float", description="base64: of 32-bit floats.")
    pooling: Literal["mean", "last"] = Field(default="mean", description="The mean over all tokens, or the last token.")
    user: Any = Field(default=None, description="Accepted and not used.")


class TokenizeRequest(StrictModel):
    """A text or a conversation, and no more than one of them."""

    model: str | None = Field(default=None, description="The name that GET /v1/models lists.")
    prompt: str | None = Field(default=None, description="The text.")
    messages: list[ChatMessage] | None = Field(
        default=None, min_length=1, max_length=_MOST_MESSAGES, fail_fast=True, description="The conversation."
    )
    add_special_tokens: bool = Field(default=True, description="Begin a text with the token that the model expects before it.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("give prompt or messages, one of both")
        return self


class DetokenizeRequest(StrictModel):
    model: str | None = Field(default=None, description="The name that GET /v1/models lists.")
    tokens: list[int] = Field(max_length=_MOST_DETOKENIZED, fail_fast=True, description="Token ids.")


_INSTEAD = {
    "guided_json": "response_format with a json_schema",
    "guided_grammar": "grammar",
    "structured_outputs": "response_format, guided_regex, guided_choice or grammar",
    "format": "response_format",
    "functions": "tools",
    "function_call": "tool_choice",
    "best_of": "n",
    "num_predict": "max_tokens",
}
"""Fields of other servers and of earlier clients, and what to give here."""

_REQUESTS = (ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest, ChatMessage)
_FIELDS = {field.alias or name for request in _REQUESTS for name, field in request.model_fields.items()}


def refusal_of(errors: Sequence[Mapping[str, Any]]) -> RefusedError:
    """What the client is answered for the first of pydantic's errors."""
    error = errors[0]
    param, kind = _param(error["loc"]), error["type"]
    if kind == "missing":
        return RefusedError(400, f"you must provide {param}", param=param)
    if kind == "unknown_field":
        name = str(error["ctx"]["name"])[:100]
        param, instead = _param((*error["loc"], name)) or name, f": give {_INSTEAD[name]}" if name in _INSTEAD else ""
        return RefusedError(400, f"{name} is not offered by this server{instead}", param=param, code="unsupported_parameter")
    text = str(error["msg"]).removeprefix("Value error, ")
    return RefusedError(400, text if text.startswith(param) else f"{param}: {text[:1].lower()}{text[1:]}", param=param or None)


def _param(place: Sequence[str | int]) -> str:
    """The place of an error as a client would write it, such as `messages[0].content`; unions and dictionaries add parts of their own."""
    found = ""
    for part in place[1:]:  # the first is "body"
        if isinstance(part, int):
            found += f"[{part}]"
        elif part in _FIELDS:
            found += f".{part}" if found else part
        else:
            break
    return found
