"""A server under strange requests and clients that come and go: it never fails, and every place is free afterwards."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

pytest.importorskip("fastapi", reason="serving needs fastapi: pip install 'shoal[serve]'")
from shoal.transports import connection_limits
from shoal.web import uvicorn_limits
from tests.support.eventually import HANG_S, eventually
from tests.support.http_fuzzing import fuzz
from tests.support.small_service import running, small_served

CLIENTS = 200


@pytest.mark.parametrize("seed", range(2, 7))
def test_ten_thousand_strange_bodies_are_answered_and_refused(seed: int) -> None:
    seen = fuzz(seed, 2_000)
    assert seen[200] > 100
    assert seen[400] > 500


async def client(address: str, number: int) -> str:
    """Ask, and hang up at any moment: before the answer, in the middle of it, or not at all."""
    chance = random.Random(number)
    body = {"model": "tiny", "prompt": "a" * chance.randint(1, 60), "max_tokens": chance.randint(1, 80), "stream": chance.random() < 0.7}
    await asyncio.sleep(chance.random() * 2)
    try:
        async with asyncio.timeout(chance.choice([0.01, 0.1, 0.5, 2.0, HANG_S])), httpx.AsyncClient(timeout=HANG_S) as http:
            async with http.stream("POST", f"{address}/v1/completions", json=body) as answer:
                pieces, most = 0, chance.choice([1, 3, 20, 10**6])
                async for _ in answer.aiter_bytes():
                    pieces += 1
                    if pieces >= most:
                        break
                return str(answer.status_code)
    except TimeoutError:
        return "hung up"


def test_two_hundred_clients_that_hang_up_at_any_moment_leave_every_place_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients share one loop: on a busy machine it may take them long to send, and nobody here is to be cut off for that."""
    monkeypatch.setattr(connection_limits, "AUTHENTICATION_S", HANG_S)
    for limit in ("AUTHENTICATION_S", "BODY_S", "READING_S"):
        monkeypatch.setattr(uvicorn_limits, limit, HANG_S)

    async def all_of_them(address: str) -> list[str]:
        return await asyncio.gather(*(client(address, number) for number in range(CLIENTS)))

    with running(small_served(max_running=8, max_waiting=100)) as service:
        told = asyncio.run(all_of_them(f"http://127.0.0.1:{service.ports[0]}"))
        assert set(told) <= {"200", "429", "hung up"}
        assert told.count("200") > 20
        eventually(lambda: not service.engine.busy)
        assert service.engine.backend.caches.requests == set(service.engine.prefixes.texts)
        answer = httpx.post(
            f"http://127.0.0.1:{service.ports[0]}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 3}, timeout=HANG_S
        )
        assert answer.json()["usage"]["completion_tokens"] == 3
