"""The API as its clients see it: OpenAI's own, and plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import threading
import time
from itertools import pairwise

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.config.fields import Secret
from shoal.data.text.tokenizers.own import ByteTokenizer
from shoal.errors import ShoalError
from shoal.models.generation.decoding import Warp
from shoal.serve.api.completion import warp_for
from shoal.serve.api.json_body import read_json
from shoal.serve.api.requests import ChatRequest, CompletionRequest
from shoal.serve.backend import LocalBackend
from shoal.serve.server import ModelServer, require_key
from shoal.web.auth import RefusedError
from tests.support.http_fuzzing import fuzz
from tests.support.processes import HANG_S
from tests.support.small_service import running, small_model, small_served

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 5}


def url(service: ModelServer, port: int = 0) -> str:
    return f"http://127.0.0.1:{service.ports[port]}"


def chat(service: ModelServer, **fields) -> httpx.Response:
    return httpx.post(f"{url(service)}/v1/chat/completions", json=ASK | fields, timeout=HANG_S)


def get(service: ModelServer, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{url(service)}{path}", headers=headers, timeout=HANG_S)


def post(service: ModelServer, body: bytes, kind: str = "application/json") -> httpx.Response:
    return httpx.post(f"{url(service)}/v1/chat/completions", content=body, headers={"content-type": kind}, timeout=HANG_S)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def free(service: ModelServer) -> bool:
    """Whether every place is free again, soon: the engine's thread gives them back one after the other."""
    end = time.monotonic() + HANG_S
    while not (freed := _is_free(service)) and time.monotonic() < end:
        time.sleep(0.01)
    return freed


def _is_free(service: ModelServer) -> bool:
    return not service.engine.busy and service.engine.backend.caches.requests == set(service.engine.prefixes.texts)


@pytest.fixture(scope="module")
def client(service):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{url(service)}/v1", api_key="none", max_retries=0)


def test_the_openai_client_chats(client):
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3, n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 3 for token in tokens)


def test_a_stream_says_the_same_as_an_answer_at_once(client):
    whole = client.chat.completions.create(**ASK).choices[0].message.content
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 12
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_the_asynchronous_openai_client_chats_and_streams_at_once(service):
    openai = pytest.importorskip("openai")

    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{url(service)}/v1", api_key="none", max_retries=0) as client:
            whole, stream = await asyncio.gather(client.chat.completions.create(**ASK), client.chat.completions.create(**ASK, stream=True))
            streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(streamed)

    whole, streamed = asyncio.run(ask())
    assert whole == streamed
    assert len(whole) > 0


def test_several_completions_of_a_prompt_need_no_best_of(client):
    openai = pytest.importorskip("openai")
    asked = {"model": ASK["model"], "prompt": "Once", "max_tokens": 2}
    assert len(client.completions.create(**asked, n=2).choices) == 2
    assert len(client.completions.create(**asked, n=2, best_of=2).choices) == 2
    with pytest.raises(openai.BadRequestError, match="best_of is not offered: it must equal n"):
        client.completions.create(**asked, n=1, best_of=2)


def test_langchain_chats_and_streams(service):
    langchain = pytest.importorskip("langchain_openai")
    chat_model = langchain.ChatOpenAI(base_url=f"{url(service)}/v1", api_key="none", model="tiny", max_tokens=12, seed=5, max_retries=0)
    whole = chat_model.invoke("hello")
    assert whole.content == text_of(chat(service))
    assert whole.usage_metadata["output_tokens"] == 12
    assert "".join(piece.content for piece in chat_model.stream("hello")) == whole.content


def test_curl_prints_the_words_as_they_come(service):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl: apt-get install curl")
    words = [curl, "-sN", "-H", "Content-Type: application/json", "-d", json.dumps(ASK | {"stream": True})]
    words.append(f"{url(service)}/v1/chat/completions")
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    pieces = [line.removeprefix("data: ") for line in told.splitlines() if line]
    assert pieces[-1] == "[DONE]"
    assert "".join(json.loads(piece)["choices"][0]["delta"].get("content", "") for piece in pieces[:-1]) == text_of(chat(service))


def test_the_openai_client_completes_and_lists_models(client):
    answer = client.completions.create(model="tiny", prompt=["ab", [97, 98, 99]], max_tokens=5, temperature=0, logprobs=2, echo=True)
    assert [choice.text[:2] for choice in answer.choices] == ["ab", "ab"]
    told = answer.choices[0].logprobs
    assert [one is None for one in told.token_logprobs] == [True] + [False] * 6
    assert "".join(told.tokens) == answer.choices[0].text
    assert told.text_offset[0] == 0
    assert [after - before for before, after in pairwise(told.text_offset)] == [len(word) for word in told.tokens[:-1]]
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("most", [0, 1])
def test_an_echo_with_probabilities_scores_many_prompts(service, most):
    """As the harness of language models asks: token ids, and one token that it drops."""
    prompts = [[97 + i % 20, 98, 99, 100 + i % 3] for i in range(64)]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": most, "logprobs": 1, "echo": True, "temperature": 0}
    choices = ask(service, "/v1/completions", body).json()["choices"]
    with torch.no_grad():
        expected = service.engine.backend.model(torch.tensor(prompts)).double().log_softmax(-1)
    for ids, choice, logprobs_LV in zip(prompts, choices, expected, strict=True):
        told = choice["logprobs"]
        assert choice["text"][:4] == bytes(ids).decode()
        assert len(told["tokens"]) == len(told["top_logprobs"]) == 4 + most
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:4] == pytest.approx([logprobs_LV[i, ids[i + 1]].item() for i in range(3)], abs=1e-4)
        assert [max(one.values()) for one in told["top_logprobs"][1:4]] == pytest.approx(logprobs_LV[:3].amax(1).tolist(), abs=1e-4)


def test_a_stream_begins_with_the_probabilities_of_its_prompt(service):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "logprobs": 0, "echo": True, "seed": 1}
    whole = ask(service, "/v1/completions", body).json()["choices"][0]
    lines = ask(service, "/v1/completions", body | {"stream": True}).text.splitlines()
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line and not line.endswith("[DONE]")]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [one for part in parts for one in part["logprobs"][name]] == whole["logprobs"][name]


def test_the_openai_client_gets_embeddings(client, service):
    """It asks for base64 itself."""
    texts, model = ["hello", "a longer text " * 4, "hello"], service.engine.backend.model
    found = [one.embedding for one in client.embeddings.create(model="tiny", input=texts * 5).data]
    for text, vector in zip(texts * 5, found, strict=True):
        with torch.no_grad():
            mean_D = model.hidden(torch.tensor([[*text.encode()]]))[0].double().mean(0)
        assert vector == pytest.approx((mean_D / mean_D.norm()).tolist(), abs=1e-5)
    plain = ask(service, "/v1/embeddings", {"model": "tiny", "input": [*b"hello"], "pooling": "last"}).json()
    with torch.no_grad():
        last_D = model.hidden(torch.tensor([[*b"hello"]]))[0, -1].double()
    assert plain["data"][0]["embedding"] == pytest.approx((last_D / last_D.norm()).tolist(), abs=1e-5)
    assert plain["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert free(service)


@pytest.mark.parametrize("fields", [{"input": []}, {"input": [[]]}, {"input": [257]}, {"input": "a" * 300}, {"dimensions": 4}])
def test_what_has_no_embedding_is_refused(service, fields):
    refused = ask(service, "/v1/embeddings", {"model": "tiny", "input": "a"} | fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(next(iter(fields)))


def test_a_request_has_a_bounded_number_of_answers(service):
    asked = {"model": "tiny", "max_tokens": 1}
    for fields in ({"prompt": ["a"] * 65}, {"prompt": ["a"] * 33, "n": 2}):
        refused = ask(service, "/v1/completions", asked | fields)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"


def test_errors_reach_the_openai_client_in_its_own_classes(client):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**ASK | {"model": "gpt-9"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**ASK | {"max_tokens": 1000})
    assert long.value.code == "context_length_exceeded"
    assert "max_tokens may be at most" in str(long.value)
    with pytest.raises(openai.BadRequestError, match="start a new conversation, or shorten it"):
        client.chat.completions.create(**ASK | {"messages": [{"role": "user", "content": "a" * 5000}]})


def test_a_stop_word_ends_the_text_before_it(service):
    whole = text_of(chat(service, max_tokens=40))
    word = whole[10:13]
    stopped = chat(service, max_tokens=40, stop=[word]).json()["choices"][0]
    assert stopped["message"]["content"] == whole[: whole.index(word)]
    assert stopped["finish_reason"] == "stop"


def test_fields_of_a_request_replace_those_of_the_settings_one_by_one():
    served = small_served()
    read = lambda **fields: warp_for(ChatRequest.model_validate(ASK | fields), served)  # noqa: E731
    assert read() == Warp(1.0, 40, None, None)
    assert read(temperature=0.5) == Warp(0.5, 40, None, None)
    assert read(top_k=0, top_p=0.7, min_p=0.1) == Warp(1.0, None, 0.7, 0.1)
    assert read(strategy="top_k_top_p", top_k=3) == Warp(1.0, 3, 0.9, None)
    assert read(strategy="greedy").temperature == read(temperature=1e-40).temperature == 0


def test_the_seed_decides_the_text_and_without_one_it_differs(service):
    assert text_of(chat(service)) == text_of(chat(service)) != text_of(chat(service, seed=6))
    assert text_of(chat(service, seed=None)) != text_of(chat(service, seed=None))


def test_both_ports_serve_the_same(service):
    assert len(set(service.ports)) == 2
    answers = [httpx.post(f"{url(service, port)}/v1/chat/completions", json=ASK, timeout=HANG_S) for port in (0, 1)]
    assert text_of(answers[0]) == text_of(answers[1])


def test_health_readiness_and_figures(service, monkeypatch):
    monkeypatch.setattr("shoal.serve.api.app._READY_S", HANG_S)  # a moment is long enough on any machine
    assert get(service, "/health").json()["status"] == "ok"
    before = service.engine.tokens_written
    service.engine.wrote_at = float("-inf")  # what was written long ago says nothing
    ready = get(service, "/ready")
    assert ready.status_code == 200
    assert service.engine.tokens_written == before + 1
    assert get(service, "/ready").status_code == 200
    assert service.engine.tokens_written == before + 1, "a token went through a moment ago"
    figures = get(service, "/metrics").text
    assert 'shoal_requests_running{model="tiny"} 0' in figures
    assert f'shoal_written_tokens_total{{model="tiny"}} {max(before, service.engine.tokens_written)}' in figures


def test_a_model_that_does_not_work_is_not_ready(monkeypatch):
    def broken(self, work):
        raise RuntimeError("a machine is gone")

    monkeypatch.setattr(LocalBackend, "_read", broken)
    with running(small_served()) as service:
        assert get(service, "/ready").status_code == 503
        assert get(service, "/health").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"response_format": {"type": "json"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "not": {}}}}},
            "response_format",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "a" * 200_000}, "guided_regex"),
        ({"guided_choice": ["a"], "grammar": 'start: "a"'}, "guided_choice"),
        ({"grammar": "start: unknown"}, "grammar"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a"] * 9}, "stop"),
        ({"seed": True}, "seed"),
    ],
)
def test_a_fault_names_its_parameter(service, fields, param):
    answer = chat(service, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"model": NaN}', b"[" * 100_000, b'{"model": 1' + b"0" * 9999 + b"}"])
def test_a_body_that_is_no_request_is_refused(service, body):
    answer = post(service, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_half_a_character_is_refused_and_plain_text_is_no_request(service):
    body = json.dumps(ASK | {"messages": [{"role": "user", "content": "\ud800"}]}).encode()
    answer = post(service, body)
    assert answer.status_code == 400
    assert post(service, body, "text/plain").status_code == 415


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("DELETE", "/nothing.html", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/gpt-9", 404),
    ],
)
def test_a_path_that_no_route_has_is_refused_in_json(service, method, path, status):
    answer = httpx.request(method, f"{url(service)}{path}", timeout=HANG_S)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert ("allow" in answer.headers) is (status == 405)


def ask(service: ModelServer, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{url(service)}{path}", json=body, timeout=HANG_S)


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded(service, monkeypatch):
    encoded, encode = list[int](), ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: encoded.append(len(text)) or encode(self, text))
    for path, fields in (("completions", {"prompt": "a" * 3_000_000}), ("embeddings", {"input": "a" * 3_000_000})):
        answer = httpx.post(f"{url(service)}/v1/{path}", json={"model": "tiny", **fields}, timeout=HANG_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert chat(service, messages=[{"role": "user", "content": "a" * 3_000_000}]).json()["error"]["param"] == "messages"
    assert httpx.post(f"{url(service)}/tokenize", json={"prompt": "a" * 3_000_000}, timeout=HANG_S).status_code == 400
    assert max(encoded) < 100_000


def test_texts_become_tokens_and_tokens_texts(service):
    told = ask(service, "/tokenize", {"prompt": "h\u00e9"}).json()
    assert told == {"tokens": [104, 0xC3, 0xA9], "count": 3, "max_model_len": 256}
    assert ask(service, "/detokenize", {"model": "tiny", "tokens": told["tokens"]}).json() == {"prompt": "h\u00e9"}
    turns = ask(service, "/tokenize", {"messages": ASK["messages"]}).json()["tokens"]
    assert len(turns) == chat(service).json()["usage"]["prompt_tokens"]
    for path, body, param in (
        ("/tokenize", {}, ""),
        ("/tokenize", {"prompt": "a", "messages": ASK["messages"]}, ""),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, "model"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        refused = ask(service, path, body)
        assert refused.status_code == (404 if param == "model" else 400)
        assert refused.json()["error"]["param"] == (param or None)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1"]), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = [
    *ASK,
    "prompt",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "stream_options",
    "response_format",
    "tools",
    "tool_choice",
    "guided_choice",
    "grammar",
    "x",
]


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(FIELDS), anything, max_size=6), st.booleans())
def test_any_body_is_read_or_refused(fields, whole):
    for model in (ChatRequest, CompletionRequest):
        with contextlib.suppress(RefusedError, ValidationError):
            model.model_validate(read_json(json.dumps((ASK if whole else {}) | fields).encode()))


def test_a_client_that_hangs_up_frees_its_place(service):
    body = ASK | {"max_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{url(service)}/v1/chat/completions", json=body, timeout=HANG_S) as stream:
        next(stream.iter_lines())
    assert free(service)
    assert service.engine.tokens_written > 0
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url(service)}/v1/chat/completions", json=ASK | {"max_tokens": 230, "n": 8}, timeout=0.05)
    assert free(service)


def test_a_full_queue_says_when_to_come_again(monkeypatch):
    come, read, asked = threading.Event(), LocalBackend._read, itertools.count()

    def after_all_have_come(self, work):
        if next(asked):  # the first answer has begun, and does not end before the others have asked
            come.wait(HANG_S)
        return read(self, work)

    monkeypatch.setattr(LocalBackend, "_read", after_all_have_come)
    with running(small_served(max_running=1, max_waiting=1)) as service, contextlib.ExitStack() as ending:
        ending.callback(come.set)
        body = ASK | {"max_tokens": 200, "stream": True}
        with httpx.stream("POST", f"{url(service)}/v1/chat/completions", json=body, timeout=HANG_S) as first:
            lines = first.iter_lines()  # httpx hangs up when nobody holds this
            next(lines)
            with httpx.stream("POST", f"{url(service)}/v1/chat/completions", json=body, timeout=HANG_S):
                asked = {"model": "tiny", "input": "a", "prompt": ["a", "b", "c"], "messages": ASK["messages"]}
                for path, field in (("chat/completions", "messages"), ("completions", "prompt"), ("embeddings", "input")):
                    refused = ask(service, f"/v1/{path}", {"model": "tiny", field: asked[field]})
                    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                    error = refused.json()["error"]
                    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
                    assert "serving.max_waiting" in error["message"]
                assert len(service.engine.waiting) == 1, "of many prompts none waits where not all have room"
        come.set()
        assert free(service)


def test_an_answer_that_takes_too_long_is_ended():
    with running(small_served(small_model(4096), request_timeout_s=0.05)) as service:
        answer = chat(service, max_tokens=4000)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        assert free(service)


def test_with_a_key_only_its_holder_may_ask():
    key = "a-long-and-secret-key"
    with running(small_served(api_key=Secret(key))) as service:
        assert (chat(service).status_code, chat(service).json()["error"]["message"][:15]) == (401, "a key is needed")
        assert get(service, "/health").status_code == 200
        assert ask(service, "/tokenize", {"prompt": "a"}).status_code == 401
        wrong = get(service, "/v1/models", authorization="Bearer a-long-and-secret-kez")
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        assert wrong.json()["error"]["message"].startswith("the key is wrong")
        assert get(service, "/v1/models", authorization=f"Bearer {key}").status_code == 200


def test_pages_of_named_origins_may_ask_and_others_may_not():
    named, other, key = "https://chat.example", "https://evil.example", "a-long-and-secret-key"
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type,x-stainless-os"}
    with running(small_served(api_key=Secret(key), allow_origins=(named,))) as service:
        path = f"{url(service)}/v1/chat/completions"
        for origin, status in ((named, 200), (other, 400)):
            assert httpx.options(path, headers={"origin": origin} | wanted, timeout=HANG_S).status_code == status
        assert get(service, "/v1/models", origin=named).headers["access-control-allow-origin"] == named
        answers = [get(service, "/v1/models", origin=origin, authorization=f"Bearer {key}") for origin in (named, other)]
        assert [answer.headers.get("access-control-allow-origin") for answer in answers] == [named, None]
        assert "access-control-allow-credentials" not in answers[0].headers


def test_without_an_origin_no_page_of_another_site_may_ask(service):
    answer = get(service, "/v1/models", origin="https://chat.example")
    assert "access-control-allow-origin" not in answer.headers


def test_without_a_key_nobody_from_elsewhere_is_let_in(service):
    for host in ("0.0.0.0", "192.168.1.5", "::"):
        with pytest.raises(ShoalError, match="a key is needed"):
            require_key(host, None)
    with pytest.raises(ShoalError, match="16 letters"):
        require_key("0.0.0.0", "short")
    answer = get(service, "/v1/models", host="evil.example:8080")
    assert answer.status_code == 403
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")


def test_no_body_is_answered_with_a_fault_of_the_servers():
    fuzz(seed=1, bodies=500)
