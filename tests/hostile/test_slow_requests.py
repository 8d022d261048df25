"""Clients that send or read slowly, on purpose: each is cut off in time, and keeps nobody else at its address out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi", reason="serving needs fastapi: pip install 'shoal[serve]'")
pytest.importorskip("uvicorn", reason="serving needs uvicorn: pip install 'shoal[serve]'")

from shoal.config.fields import Secret
from shoal.dashboard import app as dashboard_app
from shoal.dashboard.server import DashboardServer
from shoal.runs.folder.run_reader import RunFolder
from shoal.serve.server import ModelServer
from shoal.transports import Message, addresses
from shoal.transports.metrics_page import MetricsPage, _MetricsHandler
from shoal.transports.request_rate import SLOWEST_BYTES_PER_S, overdue_at
from shoal.transports.xmlrpc import XmlRpcClient, XmlRpcServer
from shoal.transports.xmlrpc import server as xmlrpc
from shoal.web import uvicorn_limits
from tests.support.eventually import HANG_S, eventually
from tests.support.servers import xmlrpc_server
from tests.support.small_service import running, small_served
from tests.support.transport_harness import TOKEN, answering

CROWD = 800
"""More than one address may have."""
KEY = "a key of sixteen letters"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
GUARDED_POST = POST.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n")
RPC = f"POST /RPC2 HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 90000\r\n\r\n".encode()
UNFINISHED = [POST, GUARDED_POST, GUARDED_POST + b"{", b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """This process holds both ends of the connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * CROWD:
        pytest.skip(f"this machine lets a process open no more than {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * CROWD), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(held: contextlib.ExitStack, port: int, words: bytes = b"") -> socket.socket:
    line = held.enter_context(socket.create_connection(("127.0.0.1", port), HANG_S))
    with contextlib.suppress(OSError):
        line.sendall(words)
    return line


def has_ended(line: socket.socket) -> bool:
    """Whether the server closes the connection, after whatever it answers."""
    with contextlib.suppress(ConnectionError):
        while line.recv(1 << 16):
            pass
    return True


def send_until_cut_off(line: socket.socket) -> int:
    """Send single bytes until the server has enough of it; how many it took."""
    for count in range(100 * HANG_S):
        try:
            line.sendall(b" ")
        except OSError:
            return count
        time.sleep(0.01)  # this is how slowly the client sends
    raise AssertionError("the server waited for ever")


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[DashboardServer]:
    folder.mkdir()
    (folder / "config.yaml").write_text("dialect: shoal\n")
    status = {"schema": 2, "at": time.time(), "pid": os.getpid(), "state": "running", "version": 1, "strategy": "x", "members": []}
    (folder / "status.json").write_text(json.dumps(status))
    server = DashboardServer([RunFolder(folder)], "127.0.0.1", [0], None, public=False)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture
def coordinator() -> Iterator[XmlRpcServer]:
    made = xmlrpc_server(token=TOKEN, max_frame_bytes=100_000)
    with answering(made):
        yield made
    made.close()


# --- the rule ------------------------------------------------------------------------------------------


def test_single_bytes_put_off_no_deadline_and_a_slow_link_is_waited_for() -> None:
    assert overdue_at(100.0, 10.0, received=0) == 110.0
    assert overdue_at(100.0, 10.0, received=50) < 110.001
    assert overdue_at(100.0, 10.0, received=60 * SLOWEST_BYTES_PER_S) == 170.0


# --- bodies that never arrive -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "crowd"), [(64, 80), pytest.param(uvicorn_limits.MOST_CONNECTIONS, CROWD, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_bodies_that_never_arrive_keep_nobody_at_their_address_out(monkeypatch: pytest.MonkeyPatch, most: int, crowd: int) -> None:
    monkeypatch.setattr(uvicorn_limits, "MOST_CONNECTIONS", most)
    with running(small_served(api_key=Secret(KEY))) as service, contextlib.ExitStack() as held:
        for number in range(crowd):
            connect(held, service.ports[0], UNFINISHED[number % len(UNFINISHED)])
        base, headers = f"http://127.0.0.1:{service.ports[0]}", {"Authorization": f"Bearer {KEY}"}
        for _ in range(3):
            assert httpx.get(base + "/health", timeout=HANG_S).status_code == 200
            assert httpx.post(base + "/v1/chat/completions", json=CHAT, headers=headers, timeout=HANG_S).status_code == 200


@pytest.mark.parametrize("words", [POST, POST + b"{"], ids=["nothing", "one byte"])
def test_a_body_that_does_not_arrive_in_time_ends_its_connection(monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    monkeypatch.setattr(uvicorn_limits, "BODY_S", 0.1)
    with running(small_served()) as service, contextlib.ExitStack() as held:
        assert has_ended(connect(held, service.ports[0], words))


@pytest.mark.parametrize("words", [POST, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "], ids=["body", "headers"])
def test_single_bytes_do_not_keep_a_request_open(monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    monkeypatch.setattr(uvicorn_limits, "BODY_S", 0.2)
    monkeypatch.setattr(uvicorn_limits, "AUTHENTICATION_S", 0.2)
    with running(small_served()) as service, contextlib.ExitStack() as held:
        assert send_until_cut_off(connect(held, service.ports[0], words)) < 1000, "the body never became complete"


def test_headers_of_a_second_request_have_a_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(small_served()) as service, contextlib.ExitStack() as held:
        line = connect(held, service.ports[0], b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(uvicorn_limits, "AUTHENTICATION_S", 0.2)
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        line.recv(1 << 16)
        send_until_cut_off(line)


# --- answers that are not read ------------------------------------------------------------------------------


def ask_without_reading(held: contextlib.ExitStack, port: int) -> None:
    """Ask for so much that the server stops reading, since it cannot write."""
    line = held.enter_context(socket.socket())
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.settimeout(0.1)
    line.connect(("127.0.0.1", port))
    with contextlib.suppress(TimeoutError, ConnectionError):
        while True:
            line.sendall(50 * b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")


def test_who_does_not_read_its_answers_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_limits, "READING_S", 0.2)
    with running(small_served()) as service, contextlib.ExitStack() as held:
        ask_without_reading(held, service.ports[0])
        eventually(lambda: not service.server.server_state.connections)
        assert is_healthy(service)


def test_readers_that_stand_still_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_limits, "MOST_CONNECTIONS", 4)
    with running(small_served()) as service, contextlib.ExitStack() as held:
        for _ in range(3):
            ask_without_reading(held, service.ports[0])
        eventually(lambda: is_healthy(service))


def is_healthy(service: ModelServer) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{service.ports[0]}/health", timeout=HANG_S).status_code == 200
    return False


# --- streams of the dashboard -------------------------------------------------------------------------------


def test_no_more_streams_are_open_than_the_limit_however_many_ask_at_once(tmp_path: Path) -> None:
    async def statuses(port: int, count: int) -> list[int]:
        async def ask() -> tuple[int, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return int((await reader.readline()).split()[1]), writer

        found = await asyncio.gather(*(ask() for _ in range(count)))
        for _, writer in found:
            writer.transport.abort()
        return [status for status, _ in found]

    with watching(tmp_path / "run") as server:
        limit = dashboard_app._MOST_STREAMS
        for _ in range(2):  # the second crowd finds all places free again
            answers = asyncio.run(statuses(server.port, limit + 60))
            assert (answers.count(200), answers.count(503)) == (limit, 60)
            eventually(lambda: asyncio.run(statuses(server.port, 1)) == [200])
            eventually(lambda: not server.server.server_state.connections)


# --- the coordinator ------------------------------------------------------------------------------------------


TWO_REQUESTS = f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\nPOST".encode()


@pytest.mark.parametrize("words", [RPC, RPC + b"<", TWO_REQUESTS], ids=["no body", "a body that begins", "a second request"])
def test_workers_that_send_slowly_are_cut_off_also_with_the_token(
    coordinator: XmlRpcServer, monkeypatch: pytest.MonkeyPatch, words: bytes
) -> None:
    monkeypatch.setattr(xmlrpc._XmlRpcHandler, "timeout", 0.2)
    with contextlib.ExitStack() as held:
        line = connect(held, addresses.parse(coordinator.address).port, words)
        send_until_cut_off(line)
        eventually(lambda: not coordinator.connections.all())


def test_workers_whose_bodies_never_arrive_keep_no_other_worker_out(coordinator: XmlRpcServer) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(xmlrpc.MOST_CONNECTIONS + 20):
            connect(held, addresses.parse(coordinator.address).port, RPC)
        worker = XmlRpcClient(coordinator.address, token=TOKEN, max_frame_bytes=100_000)
        assert worker.call(Message({"still": "here"}), HANG_S).header["echo"] == {"still": "here"}
        worker.close()


def test_a_reader_of_the_figures_that_sends_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_MetricsHandler, "timeout", 0.2)
    page = MetricsPage("127.0.0.1", 0, TOKEN, lambda: "figures 1\n")
    with contextlib.ExitStack() as held:
        send_until_cut_off(connect(held, addresses.parse(page.address).port, b"GET /metrics HTTP/1.1\r\nX-Slow: "))
    page.close()
