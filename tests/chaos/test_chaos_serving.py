"""A server under strange requests and clients that come and go: it never fails, and every place is free afterwards."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest

pytest.importorskip("fastapi", reason="serving needs fastapi: pip install 'shoal[serve]'")
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
        async with asyncio.timeout(chance.choice([0.01, 0.1, 0.5, 2.0, 60.0])), httpx.AsyncClient(timeout=120) as http:
            async with http.stream("POST", f"{address}/v1/completions", json=body) as answer:
                pieces, most = 0, chance.choice([1, 3, 20, 10**6])
                async for _ in answer.aiter_bytes():
                    pieces += 1
                    if pieces >= most:
                        break
                return str(answer.status_code)
    except TimeoutError:
        return "hung up"


def test_two_hundred_clients_that_hang_up_at_any_moment_leave_every_place_free() -> None:
    async def all_of_them(address: str) -> list[str]:
        return await asyncio.gather(*(client(address, number) for number in range(CLIENTS)))

    with running(small_served(max_running=8, max_waiting=100)) as service:
        told = asyncio.run(all_of_them(f"http://127.0.0.1:{service.ports[0]}"))
        assert set(told) <= {"200", "429", "hung up"}
        assert told.count("200") > 20
        until = time.monotonic() + 60
        while service.engine.busy and time.monotonic() < until:
            time.sleep(0.05)
        assert not service.engine.busy
        assert service.engine.backend.caches.requests == set(service.engine.prefixes.texts)
        answer = httpx.post(
            f"http://127.0.0.1:{service.ports[0]}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 3}, timeout=60
        )
        assert answer.json()["usage"]["completion_tokens"] == 3
