"""The description of the API at /openapi.json says what the server does, and /docs shows it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shoal.config.fields import Secret
from shoal.serve.server import ModelServer
from tests.support.processes import HANG_S
from tests.support.small_service import running, small_served

jsonschema = pytest.importorskip("jsonschema")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
OTHERS = ("/v1/embeddings", "/v1/models", "/v1/models/{model}", "/v1/status", "/tokenize", "/detokenize", "/health", "/ready", "/metrics")
KEY = "a-long-and-secret-key"


def url(service: ModelServer, path: str) -> str:
    return f"http://127.0.0.1:{service.ports[0]}{path}"


@pytest.fixture(scope="module")
def spec(service: ModelServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(url(service, "/openapi.json"), timeout=HANG_S).json()
    return found


def is_valid(spec: dict[str, Any], schema: dict[str, Any], value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator({**schema, "components": spec["components"]}).is_valid(value))


def response_schema(spec: dict[str, Any], path: str, status: int, kind: str = "application/json") -> dict[str, Any]:
    (operation,) = spec["paths"][path].values()
    found: dict[str, Any] = operation["responses"][str(status)]["content"][kind]["schema"]
    return found


def post(service: ModelServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url(service, path), json=body, timeout=HANG_S)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from references(one)


def test_every_route_is_described_and_every_reference_is_there(spec: dict[str, Any]) -> None:
    assert set(spec["paths"]) == {CHAT, TEXT, *OTHERS}
    known = {f"#/components/schemas/{name}" for name in spec["components"]["schemas"]}
    assert set(references(spec)) <= known
    assert not any("422" in operation["responses"] for methods in spec["paths"].values() for operation in methods.values())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ASK),
        (CHAT, ASK | {"n": 2, "logprobs": True, "top_logprobs": 3}),
        (TEXT, {"model": "tiny", "prompt": "ab", "max_tokens": 3}),
        (TEXT, {"model": "tiny", "prompt": ["ab", [97, 98]], "max_tokens": 3, "logprobs": 2, "echo": True}),
    ],
)
def test_answers_and_their_chunks_are_as_described(service: ModelServer, spec: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    answer = post(service, path, body)
    assert answer.status_code == 200
    assert is_valid(spec, response_schema(spec, path, 200), answer.json())
    stream = post(service, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    chunks = [json.loads(line.removeprefix("data: ")) for line in stream.text.splitlines() if line and not line.endswith("[DONE]")]
    assert len(chunks) > 2
    assert all(is_valid(spec, response_schema(spec, path, 200, "text/event-stream"), chunk) for chunk in chunks)


def test_other_answers_and_errors_are_as_described(service: ModelServer, spec: dict[str, Any]) -> None:
    for path in ("/v1/models", "/v1/status", "/health", "/ready"):
        answer = httpx.get(url(service, path), timeout=HANG_S)
        assert is_valid(spec, response_schema(spec, path, answer.status_code), answer.json()), path
    for status, body in ((400, ASK | {"n": 0}), (404, ASK | {"model": "gpt-9"})):
        answer = post(service, CHAT, body)
        assert answer.status_code == status
        assert is_valid(spec, response_schema(spec, CHAT, status), answer.json())


@pytest.mark.parametrize(
    ("path", "fields", "good"),
    [
        (CHAT, {}, True),
        (CHAT, {"temperature": None, "stop": "x", "seed": -1, "logit_bias": {"97": 2.5}}, True),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, True),
        (CHAT, {"user": 5, "metadata": {"a": 1}, "response_format": {"type": "text"}}, True),
        (CHAT, {"temperature": 2.5}, False),
        (CHAT, {"n": 9}, False),
        (CHAT, {"stop": ["a"] * 5}, False),
        (CHAT, {"messages": []}, False),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, False),
        (CHAT, {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "store": False, "service_tier": "auto"}, True),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, False),
        (CHAT, {"tool_choice": "sometimes"}, False),
        (CHAT, {"response_format": {"type": "json_object"}}, True),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}}, True),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}}, False),
        (CHAT, {"guided_choice": ["a", "b"]}, True),
        (CHAT, {"guided_choice": []}, False),
        (TEXT, {"guided_regex": "[ab]+"}, True),
        (CHAT, {"store": True}, False),
        (CHAT, {"stream_options": {"other": True}}, False),
        (CHAT, {"strategy": "beam"}, False),
        (TEXT, {"prompt": ["a", "b"]}, True),
        (TEXT, {"prompt": [1, 2, 3]}, True),
        (TEXT, {"prompt": []}, False),
        (TEXT, {"prompt": [1.5]}, False),
        (TEXT, {"logprobs": 6}, False),
    ],
)
def test_the_server_takes_the_bodies_that_its_description_allows(
    service: ModelServer, spec: dict[str, Any], path: str, fields: dict[str, Any], good: bool
) -> None:
    body = (ASK if path == CHAT else {"model": "tiny", "prompt": "a", "max_tokens": 2}) | fields
    schema = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert is_valid(spec, schema, body) is good
    assert (post(service, path, body).status_code == 200) is good


def test_a_message_that_a_client_sends_back_with_nulls_is_read(service: ModelServer) -> None:
    turns = [*ASK["messages"], {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}, *ASK["messages"]]
    assert post(service, CHAT, ASK | {"messages": turns}).status_code == 200


def test_the_key_is_described_where_one_is_needed(spec: dict[str, Any]) -> None:
    assert "securitySchemes" not in spec["components"]
    with running(small_served(api_key=Secret(KEY))) as service:
        secured = httpx.get(url(service, "/openapi.json"), timeout=HANG_S).json()
    assert secured["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    needing = {path for path, methods in secured["paths"].items() for operation in methods.values() if "security" in operation}
    assert needing == set(secured["paths"]) - {"/health", "/ready"}
    assert secured["paths"]["/v1/models"]["get"]["responses"]["401"]


def test_the_documentation_shows_every_operation_and_loads_nothing_from_elsewhere(browser: Any) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    faults: list[str] = []
    with running(small_served(api_key=Secret(KEY))) as service:
        page, home = browser.new_page(), url(service, "/")
        page.set_default_timeout(HANG_S * 1000)
        page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(home) else faults.append(request.url))
        answer = page.goto(url(service, "/docs"))
        sync_api.expect(page.locator(".operation")).to_have_count(11)
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        chat = page.locator(".operation").first
        assert "POST/v1/chat/completions" in chat.inner_text().replace(" ", "").replace("\n", "")
        assert "needs the key" in chat.inner_text()
        assert "number (0 to 2)" in chat.inner_text()
        page.close()
    assert not faults


def test_a_server_leaves_the_log_handlers_of_other_libraries_open() -> None:
    """absl's handler, which TensorBoard brings, closes standard error when it is closed."""
    closed: list[str] = []

    class Handler(logging.Handler):
        def close(self) -> None:
            closed.append("closed")
            super().close()

    handler = Handler()
    with running(small_served()):
        assert closed == []
    assert closed == []
    handler.close()
