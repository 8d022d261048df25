"""Calls, formats, streams and embeddings by the helpers of clients: openai's own, LangChain's and LiteLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

pytest.importorskip("openai")
pytest.importorskip("llguidance", reason="answers by a grammar need llguidance: pip install 'shoal[serve]'")

import openai

from shoal.data import load_tokenizer
from tests.serve.test_api import url
from tests.support.chat_folders import write_tokenizer
from tests.support.small_service import running, small_served_with_tools

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1400, "seed": 5}


class Place(BaseModel):
    """Where something is."""

    city: Annotated[str, Field(max_length=8)]
    unit: Literal["km", "miles"]


class Trip(BaseModel):
    """A journey."""

    days: Annotated[int, Field(ge=1, le=20)]
    stops: Annotated[list[Place], Field(max_length=2)]
    note: Annotated[str, Field(max_length=5)] | None


class Size(TypedDict):
    """A size, which LangChain sends as a schema that does not forbid further fields."""

    small: bool
    kind: Literal["a", "b"]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A random model with the template of Qwen 2.5."""
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("model"), "qwen25")))
    with running(small_served_with_tools(tokenizer, 4096)) as service:
        yield f"{url(service)}/v1"


@pytest.fixture(scope="module")
def client(base_url: str) -> Any:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def test_openai_parses_answers_and_calls_into_models(client: Any) -> None:
    parsed = client.chat.completions.parse(**ASK, response_format=Trip).choices[0].message.parsed
    assert isinstance(parsed, Trip)
    with client.chat.completions.stream(**ASK, response_format=Trip) as stream:
        events = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    assert {"content.delta", "content.done"} <= set(events)
    called = {"tools": [openai.pydantic_function_tool(Place)], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.chat.completions.parse(**ASK, **called).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Place)
    with client.chat.completions.stream(**ASK, **called) as stream:
        events = [event.type for event in stream]
        (again,) = stream.get_final_completion().choices[0].message.tool_calls
    assert again.function.parsed_arguments == call.function.parsed_arguments
    assert "tool_calls.function.arguments.done" in events


def test_of_several_tools_only_those_that_are_allowed_are_called(client: Any) -> None:
    tools = [openai.pydantic_function_tool(one) for one in (Place, Trip)]
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "Place"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    for seed in range(3):
        answer = client.chat.completions.create(**ASK | {"seed": seed}, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        assert [one.function.name for one in answer.choices[0].message.tool_calls] == ["Place"]
    allowed["tools"][0]["function"]["name"] = "Other"
    with pytest.raises(openai.BadRequestError, match="none of the tools"):
        client.chat.completions.create(**ASK, tools=tools, tool_choice=choice)


def test_langchain_calls_tools_and_fills_schemas(base_url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=base_url, api_key="none", model="tiny", max_tokens=1400, seed=5, max_retries=0)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Trip, method=method).invoke("hello"), Trip)
    assert set(model.with_structured_output(Size).invoke("hello")) == {"small", "kind"}
    named = model.bind_tools([Place, Trip], tool_choice="Place")
    answer = named.invoke("hello")
    assert [one["name"] for one in answer.tool_calls] == ["Place"]
    joined = None
    for piece in named.stream("hello"):
        joined = piece if joined is None else joined + piece
    assert [one["args"] for one in joined.tool_calls] == [one["args"] for one in answer.tool_calls]
    history = [("user", "hello"), answer, {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "here"}]
    assert model.bind(max_tokens=4).invoke(history).usage_metadata["output_tokens"] == 4
    embeddings = langchain.OpenAIEmbeddings(base_url=base_url, api_key="none", model="tiny", check_embedding_ctx_length=False)
    assert [len(one) for one in embeddings.embed_documents(["a", "b c"])] == [32, 32]


def test_litellm_calls_tools_and_sends_answers_back(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("mcp", reason="LiteLLM reads tools with it")
    asked = ASK | {"model": "openai/tiny", "api_base": base_url, "api_key": "none", "num_retries": 0}
    assert Trip.model_validate_json(litellm.completion(**asked, response_format=Trip).choices[0].message.content)
    called = {"tools": [openai.pydantic_function_tool(Place)], "tool_choice": "required", "parallel_tool_calls": False}
    answer = litellm.completion(**asked, **called).choices[0].message
    pieces = list(litellm.completion(**asked, **called, stream=True))
    streamed = litellm.stream_chunk_builder(pieces, messages=ASK["messages"]).choices[0].message
    assert [one.function.arguments for one in streamed.tool_calls] == [one.function.arguments for one in answer.tool_calls]
    for one in (answer, streamed):
        history = [*ASK["messages"], one, {"role": "tool", "tool_call_id": one.tool_calls[0].id, "content": "here"}]
        assert litellm.completion(**asked | {"messages": history, "max_tokens": 4}).usage.completion_tokens == 4
    assert len(litellm.embedding("openai/tiny", ["a", "b"], api_base=base_url, api_key="none").data) == 2


def test_what_clients_add_to_requests_and_answers_is_accepted(client: Any) -> None:
    said: Any = {"role": "assistant", "content": "x", "annotations": [], "provider_specific_fields": {"refusal": None}, "audio": None}
    messages = [*ASK["messages"], said, *ASK["messages"]]
    added = {"modalities": ["text"], "prompt_cache_key": "k", "safety_identifier": "s", "store": False, "service_tier": "auto"}
    assert client.chat.completions.create(**ASK | {"messages": messages, "max_tokens": 2}, **added, tools=[], tool_choice="none").usage
