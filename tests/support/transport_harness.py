"""Servers and clients of every kind under one set of names, so that one suite can test them all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.transports import Client, Message, Request, Server, Unreachable
from shoal.transports.in_process import SCHEME, InProcessClient, InProcessServer
from shoal.transports.keys import new_keys, new_token
from shoal.transports.netem import PROFILES, NetemProxy
from shoal.transports.postgres import PostgresClient, PostgresServer
from shoal.transports.xmlrpc import XmlRpcClient
from shoal.transports.zeromq import ZmqClient
from tests.support.postgres_server import Database
from tests.support.servers import xmlrpc_server, zmq_server

KINDS = ("in-process", "plain", "unshared", "curve", "xmlrpc", "weather", "postgres")
"""ZeroMQ shares memory under `plain` and `curve`, where both ends are on this machine."""
OPEN = ("plain", "unshared")
"""Without encryption."""
LIMIT = 10_000_000
PATIENCE_S = 120.0
"""After this time something hangs. Much less passes where nothing does, also on a busy machine."""
TOKEN = new_token()
KEYS = new_keys()


class Harness:
    """Opens what a test needs and closes all of it afterwards."""

    def __init__(self, kind: str, database: Database | None = None) -> None:
        self.kind = kind
        self._database = database
        self.short_s = 0.5 if kind == "weather" else 0.15
        """Long enough for a question to arrive, short enough to wait for in vain."""
        self.at_once = 16 if kind == "postgres" else 70
        """Questions that clients may ask at the same time: in a database all of them are one student."""
        self._stack = contextlib.ExitStack()
        self._proxies: dict[str, NetemProxy] = {}

    def serve(self, address: str | None = None, *, limit: int = LIMIT, **options: Any) -> Server:
        """A server; at the address of an earlier one, where that is given."""
        options = {"token": TOKEN, "max_frame_bytes": limit, **options}
        port = int(address.rpartition(":")[2]) if address and self.kind != "in-process" else 0
        server: Server
        if self._database:
            del options["token"]
            server = PostgresServer(self._database.conninfo("coordinator"), **options)
        elif self.kind == "in-process":
            server = InProcessServer(address.removeprefix(SCHEME) if address else None, **options)
        elif self.kind == "xmlrpc":
            server = xmlrpc_server(port=port, **options)
        else:
            server = zmq_server(port=port, secret_key=None if self.kind in OPEN else KEYS.secret, **options)
        self._stack.callback(server.close)
        return server

    def connect(self, address: str, *, token: str = TOKEN, key: str = KEYS.public, limit: int = LIMIT) -> Client:
        client: Client
        if self._database:
            client = PostgresClient(self._database.conninfo("student"), max_frame_bytes=limit)
        elif self.kind == "in-process":
            client = InProcessClient(address, token=token, max_frame_bytes=limit)
        elif self.kind == "xmlrpc":
            client = XmlRpcClient(address, token=token, max_frame_bytes=limit)
        else:
            reached = self._through_the_weather(address) if self.kind == "weather" else address
            own_key, share = None if self.kind in OPEN else key, self.kind != "unshared"
            client = ZmqClient(reached, token=token, server_key=own_key, max_frame_bytes=limit, share=share)
        self._stack.callback(client.close)
        return client

    def _through_the_weather(self, address: str) -> str:
        if address not in self._proxies:
            self._proxies[address] = NetemProxy(address, PROFILES["good"], seed=5)
            self._stack.callback(self._proxies[address].close)
        return self._proxies[address].address

    def close(self) -> None:
        self._stack.close()


def echo(request: Request) -> Message:
    return Message({"echo": request.message.header}, request.message.frames)


@contextlib.contextmanager
def answering(server: Server, answer: Callable[[Request], Message] = echo) -> Iterator[None]:
    """A thread that answers whatever comes."""
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            for request in server.poll(PATIENCE_S):
                server.reply(request, answer(request))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        done.set()
        server.wake()
        thread.join()


class Calling:
    """A call in a thread of its own, and what became of it."""

    def __init__(self, client: Client, message: Message, timeout_s: float = PATIENCE_S) -> None:
        self._outcome: Message | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(client, message, timeout_s))
        self._thread.start()

    def _run(self, client: Client, message: Message, timeout_s: float) -> None:
        try:
            self._outcome = client.call(message, timeout_s)
        except Exception as problem:
            self._outcome = problem

    def outcome(self, timeout_s: float = PATIENCE_S) -> Message | Exception:
        self._thread.join(timeout_s)
        assert self._outcome is not None, "the call has not ended"
        return self._outcome

    def answer(self) -> Message:
        outcome = self.outcome()
        assert isinstance(outcome, Message), outcome
        return outcome


def take(server: Server, count: int = 1) -> list[Request]:
    """So many requests, however many polls that takes."""
    found: list[Request] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        found += server.poll(deadline - time.monotonic())
    assert len(found) == count
    return found


def call_until_answered(client: Client, message: Message, timeout_s: float = PATIENCE_S) -> Message:
    """As a worker does: ask again while there is no answer. It waits longer each time, as a slow machine may need."""
    deadline, wait_s = time.monotonic() + timeout_s, 1.0
    while True:
        try:
            return client.call(message, wait_s)
        except Unreachable:
            assert time.monotonic() < deadline, "no answer ever came"
            wait_s *= 2


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("this system does not tell how much memory a process holds")
    return int(statm.read_text().split()[1]) * 4096
