"""No request takes so much time or memory that others wait for it."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from pydantic import BaseModel, ValidationError

from shoal.models.generation.decoding import LogitPenalties, TokenDraws, Warp, apply_penalties
from shoal.serve.api import json_body, requests, responses
from shoal.serve.api.json_body import read_json
from shoal.serve.api.requests import ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest, StrictModel
from shoal.serve.batching.generation_job import GenerationJob
from shoal.web.auth import RefusedError
from tests.support.processes import HANG_S
from tests.support.small_service import running, small_served

MANY = 20_000
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "a"}
UNKNOWN = {f"field{i}": 1 for i in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, TEXT | UNKNOWN),
        (CompletionRequest, TEXT | {"prompt": ["a"] * 3 + [["a"] * MANY]}),
        (CompletionRequest, TEXT | {"logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}),
        (CompletionRequest, TEXT | {"stop": [1] * MANY}),
        (CompletionRequest, TEXT | {"guided_choice": [1] * MANY}),
        (ChatRequest, CHAT | {"messages": [CHAT["messages"][0] | UNKNOWN]}),
        (ChatRequest, CHAT | {"messages": [{"role": "user", "content": 1}] * 9000}),
        (ChatRequest, CHAT | {"messages": [{"role": "user", "content": "a", "tool_calls": [1] * 128}] * 9000}),
        (ChatRequest, CHAT | {"tools": [{"type": "function", "function": UNKNOWN}]}),
        (EmbeddingRequest, {"model": "tiny", "input": [[1.5] * 10] * 2000}),
        (EmbeddingRequest, {"model": "tiny", "input": ["a", ["a"] * MANY]}),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}),
    ],
)
def test_a_body_with_many_faults_is_refused_for_its_first(kind: type[StrictModel], body: dict[str, Any]) -> None:
    """Each fault that pydantic finds takes some 10 µs, and 4 MB have room for a million."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(read_json(json.dumps(body).encode()))
    assert refused.value.error_count() < 10


def test_the_first_unknown_field_is_named_with_its_place() -> None:
    for body, param in ((CHAT | {"colour": 1}, "colour"), (CHAT | {"messages": [CHAT["messages"][0] | {"colour": 1}]}, "messages[0]")):
        with pytest.raises(ValidationError) as refused:
            ChatRequest.model_validate(body)
        (error,) = refused.value.errors()
        told = requests.refusal_of([error | {"loc": ("body", *error["loc"])}])
        assert (told.message, told.param, told.code) == ("colour is not offered by this server", param, "unsupported_parameter")


def test_a_body_of_many_arrays_is_refused_and_a_text_of_many_brackets_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "_MOST_CONTAINERS", 100)
    with pytest.raises(RefusedError, match="objects and arrays"):
        read_json(json.dumps(TEXT | {"user": [[]] * 100}).encode())
    with pytest.raises(RefusedError, match="objects and arrays"):
        read_json(json.dumps(TEXT | {"user": [{"a": [1]}] * 50}).encode())
    assert read_json(json.dumps(TEXT | {"prompt": "[" * 1000}).encode())["prompt"] == "[" * 1000


def test_a_body_is_read_without_searches_for_garbage() -> None:
    """With them a body of a million arrays stopped the server for two seconds."""
    searched: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        searched.append(phase)

    body = json.dumps(TEXT | {"user": [[]] * 50_000}).encode()
    gc.callbacks.append(note)
    try:
        read_json(body)
        read = len(searched)
        again = [[] for _ in range(2000)]
    finally:
        gc.callbacks.remove(note)
    assert read <= 2, "one search begins and ends at most"
    assert searched, f"it goes on after that: {len(again)} arrays"


@pytest.mark.parametrize("stream", [False, True])
def test_the_probabilities_of_many_tokens_are_written_beside_other_requests(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """64 prompts of 4,000 tokens stopped the server for ten seconds, eight answers of 2,000 tokens with 20 likely ones for thirteen."""
    threads, parts = list[str](), list[int]()

    def noted(write: Callable[..., str | None]) -> Callable[..., str | None]:
        def writes(*given: Any) -> str | None:
            threads.append(threading.current_thread().name)
            return write(*given)

        return writes

    def noted_part(response: BaseModel) -> str:
        text = response.model_dump_json(exclude_unset=True)
        parts.append(len(text))
        return text

    asked = CHAT | {"n": 8, "logprobs": True, "top_logprobs": 5} if not stream else TEXT | {"echo": True, "logprobs": 5, "stream": True}
    with running(small_served()) as service:
        monkeypatch.setattr(responses, "_json", noted_part)
        monkeypatch.setattr(responses.ResponseWriter, "whole", noted(responses.ResponseWriter.whole))
        monkeypatch.setattr(responses.ResponseWriter, "chunk", noted(responses.ResponseWriter.chunk))
        path = f"http://127.0.0.1:{service.ports[0]}/v1/" + ("completions" if stream else "chat/completions")
        answer = httpx.post(path, json=asked | {"max_tokens": 12, "seed": 1}, timeout=HANG_S)
    assert answer.status_code == 200
    assert "asyncio" in threads[0], "a thread of asyncio's own, not the one that serves"
    if not stream:
        assert sum(len(one["logprobs"]["content"]) for one in answer.json()["choices"]) == 8 * 12
        assert max(parts) < len(answer.text) / 50, "pydantic lets no other thread run while it writes"


class CountedSequence(list[int]):
    """Counts how many numbers were read."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            self.read += 1
            yield number


def test_penalties_read_each_token_of_a_text_once() -> None:
    """Eight answers to a prompt of 32,000 tokens kept all others waiting for 0.3 s with each of their tokens."""
    penalties = LogitPenalties(1.3, 0.5, 0.25, {4: 3.0})
    prompt, written = CountedSequence([3, 1, 4, 1, 5]), CountedSequence()
    one = GenerationJob(prompt, 100, TokenDraws(1, [1]), lambda event: False, Warp(1.0), penalties, written=written)
    for token in range(40):
        logits = torch.randn(16, generator=torch.Generator().manual_seed(token))
        assert torch.equal(one.penalized(logits), apply_penalties(logits, penalties, list(prompt), list(written)))
        prompt.read = written.read = 0
        one.penalized(logits)
        assert (prompt.read, written.read) == (0, 0)
        written.append(token % 7)
