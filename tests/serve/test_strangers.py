"""Strangers without a key who come in crowds to a server of answers: who asks something is answered all the same."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx
import pytest

from shoal.serve.api.app import Api
from shoal.serve.model_pool import ModelPool
from shoal.serve.server import ModelServer
from shoal.web import uvicorn_limits as connection_limits
from tests.support.processes import HANG_S
from tests.support.small_service import running, small_served


def address(service: ModelServer) -> tuple[str, int]:
    return "127.0.0.1", service.ports[0]


def is_healthy(service: ModelServer) -> bool:
    return httpx.get(f"http://127.0.0.1:{service.ports[0]}/health", timeout=HANG_S).status_code == 200


@pytest.mark.parametrize("words", [b"", b"GET /health HTTP/1.1\r\nHost: loc"], ids=["silent", "in the middle of a question"])
def test_strangers_who_take_all_places_keep_nobody_out(monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    monkeypatch.setattr(connection_limits, "MOST_CONNECTIONS", 16)
    with running(small_served()) as service, contextlib.ExitStack() as held:
        lines = [held.enter_context(socket.create_connection(address(service), HANG_S)) for _ in range(40)]
        for line in lines:
            with contextlib.suppress(OSError):
                line.sendall(words)
        assert is_healthy(service)
        with contextlib.suppress(ConnectionError):
            assert lines[0].recv(1) == b"", "who came first gave its place up"


def test_who_asks_nothing_is_shown_out_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "AUTHENTICATION_S", 0.0)
    with running(small_served()) as service, socket.create_connection(address(service), HANG_S) as silent:
        with contextlib.suppress(ConnectionError):
            assert silent.recv(1) == b""


def test_who_asked_something_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MOST_CONNECTIONS", 16)
    with running(small_served()) as service, httpx.Client(base_url=f"http://127.0.0.1:{service.ports[0]}", timeout=HANG_S) as client:
        service.server.config.timeout_keep_alive = HANG_S  # uvicorn ends who is silent for five seconds; here only a crowd could
        first = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")
        with contextlib.ExitStack() as held:
            for _ in range(11):
                held.enter_context(socket.create_connection(address(service), HANG_S))
            assert client.get("/health").extensions["network_stream"].get_extra_info("client_addr") == first


def test_however_many_ask_whether_the_server_is_ready_one_token_is_written_for_them() -> None:
    models = ModelPool.of_one(small_served(max_running=1, max_waiting=2), lambda text: None)
    api, engine = Api(models), models.first.engine

    async def ask() -> list[int]:
        asked = [asyncio.create_task(api.ready()) for _ in range(20)]
        await asyncio.sleep(0)  # all have asked
        await asyncio.sleep(0)
        assert len(engine.waiting) == 1
        while engine.busy:
            engine.step()
        return [answer.status_code for answer in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [200] * 20
