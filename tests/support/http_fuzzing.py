"""Bodies that no client would send, to the app itself, without a socket."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx

from shoal.serve.api.app import make_app
from shoal.serve.model_pool import ModelPool
from shoal.web.auth import AuthMiddleware
from tests.support.small_service import small_model, small_served

EXPECTED = {200, 400, 404, 413, 415, 429}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/completions", "/v1/embeddings")
FIELDS = ["model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "strategy", "n"]
FIELDS += ["repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "seed", "logprobs", "top_logprobs", "echo"]
FIELDS += [
    "stream",
    "stream_options",
    "user",
    "best_of",
    "tools",
    "input",
    "encoding_format",
    "pooling",
    "response_format",
    "role",
    "content",
]
WORDS = ["", "tiny", "user", "assistant", "greedy", "top_k_top_p", "stop", "text", "\ud800", "\0", "é" * 50, "a" * 5000, "1", "-1"]
NUMBERS = [0, 1, -1, 2, 7, 255, 256, 257, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1e-300, 1e300, 2.0]


def fuzz(seed: int, bodies: int) -> Counter[int]:
    """Send bodies, most of them wrong somewhere. Every answer is one that a client can understand, and every place is free at the end."""
    return asyncio.run(_fuzzed(seed, bodies))


async def _fuzzed(seed: int, bodies: int) -> Counter[int]:
    chance, seen = random.Random(seed), Counter[int]()
    faults: list[str] = []
    models = ModelPool.of_one(small_served(small_model(longest=24), max_new_tokens=4, max_running=4), faults.append)
    models.start()
    app: Any = AuthMiddleware(make_app(models), None)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for _ in range(bodies):
                raw, kind = body(chance), "text/plain" if chance.random() < 0.02 else "application/json"
                answer = await client.post(chance.choice(PATHS), content=raw, headers={"content-type": kind}, timeout=60)
                assert answer.status_code in EXPECTED, (answer.status_code, raw[:2000])
                if answer.status_code != 200:
                    assert answer.json()["error"]["message"], raw[:2000]
                seen[answer.status_code] += 1
    finally:
        models.close()
    assert not faults
    assert models.first.engine.backend.caches.requests == set(models.first.engine.prefixes.texts)
    return seen


def body(chance: random.Random) -> bytes:
    """A request that is right, with a few fields that are not; now and then no JSON at all."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": chance.randint(1, 6)}
    asked |= {"prompt": "ab"} if chance.random() < 0.5 else {"messages": [{"role": "user", "content": "hi"}]}
    for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
        name = chance.choice(FIELDS)
        asked[name] = nonsense(chance) if chance.random() < 0.7 else plausible(name, chance)
    raw = json.dumps(asked).encode()
    if chance.random() < 0.1:
        at = chance.randrange(len(raw))
        raw = chance.choice([raw[:at], raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :], b"[" * 5000, b"", b"NaN"])
    return raw


def plausible(name: str, chance: random.Random) -> Any:
    """A value that may be good in this field."""
    lists = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "prompt": [[1, 2], "ab"], "stop": ["\n", "a"]}
    known: dict[str, Any] = {**lists, "stream": True, "echo": True, "logprobs": chance.choice([True, 3]), "top_logprobs": 2, "n": 2}
    known |= {"logit_bias": {"97": 5}, "stream_options": {"include_usage": True}, "strategy": "top_p", "seed": 3, "temperature": 0}
    return known.get(name, chance.choice([0, 1, 0.5]))


def nonsense(chance: random.Random, depth: int = 0) -> Any:
    """Any value of JSON."""
    kind = chance.randrange(7 if depth < 3 else 4)
    if kind < 2:
        return chance.choice(NUMBERS)
    if kind == 2:
        return chance.choice(WORDS)
    if kind == 3:
        return chance.choice([None, True, False])
    if kind == 4:
        return [nonsense(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(FIELDS + WORDS): nonsense(chance, depth + 1) for _ in range(chance.randrange(4))}
