"""The HTTP side: what a stranger, a broken client or a crafted document gets."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import xmlrpc.client
from collections.abc import Iterator

import pytest

from shoal.errors import ShoalError
from shoal.transports import Message, addresses
from shoal.transports.connection_limits import AUTHENTICATION_S, ConnectionLimiter
from shoal.transports.metrics_page import MetricsPage
from shoal.transports.wire import Limits, Malformed, encode
from shoal.transports.xmlrpc import XmlRpcClient, XmlRpcServer
from shoal.transports.xmlrpc.encoding import pack, unpack
from shoal.transports.xmlrpc.server import MOST_CONNECTIONS
from tests.support import malformed_messages
from tests.support.eventually import eventually
from tests.support.servers import xmlrpc_server
from tests.support.transport_harness import PATIENCE_S, TOKEN, answering, resident_bytes

pytestmark = pytest.mark.whole

LIMIT = 100_000
BOMB = b"""<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<methodCall><methodName>shoal.call</methodName><params><param><value>&b;</value></param></params></methodCall>"""


@pytest.fixture
def server() -> Iterator[XmlRpcServer]:
    made = xmlrpc_server(token=TOKEN, max_frame_bytes=LIMIT)
    with answering(made):
        yield made
    made.close()


def post(server: XmlRpcServer, body: bytes, **headers: str) -> int:
    place = addresses.parse(server.address)
    line = http.client.HTTPConnection(place.host, place.port, timeout=PATIENCE_S)
    try:
        line.request("POST", "/RPC2", body, {"Authorization": f"Bearer {TOKEN}"} | headers)
        return line.getresponse().status
    finally:
        line.close()


def still_answers(server: XmlRpcServer) -> None:
    client = XmlRpcClient(server.address, token=TOKEN, max_frame_bytes=LIMIT)
    assert client.call(Message({"still": "there"}), PATIENCE_S).header == {"echo": {"still": "there"}}
    client.close()


def test_any_xml_rpc_client_can_talk_to_it(server: XmlRpcServer) -> None:
    proxy = xmlrpc.client.ServerProxy(server.address, headers=[("Authorization", f"Bearer {TOKEN}")], use_builtin_types=True)
    parts = encode(Message({"a": 1}, (b"frame",)), 1, Limits(LIMIT))
    header, frames = proxy.shoal.call(parts[0], list(parts[1:]))  # type: ignore[misc]
    assert frames == [b"frame"]
    assert b"echo" in header
    proxy("close")()


@pytest.mark.parametrize(
    "body",
    [
        BOMB,
        BOMB.decode().encode("utf-16"),
        b"",
        b"<",
        b"<?xml version='1.0' encoding='cp037'?><methodCall/>",
        xmlrpc.client.dumps((b"x", [b"y"]), "system.listMethods").encode(),
        xmlrpc.client.dumps((b"x", ["text"]), "shoal.call").encode(),
        xmlrpc.client.dumps((b"x",), "shoal.call").encode(),
        xmlrpc.client.dumps((b"x", [b"y"]), "shoal.call").encode(),
        xmlrpc.client.dumps((1, 2), "shoal.call").encode(),
        b"<methodCall><methodName>shoal.call</methodName><params><param><value><int>"
        + b"9" * 9999
        + b"</int></value></param></params></methodCall>",
        b"<value><array><data>" * 5000,
    ],
)
def test_documents_that_are_no_call(server: XmlRpcServer, body: bytes) -> None:
    assert post(server, body) == 400
    assert server.traffic.refused == {"malformed": 1}
    still_answers(server)


def test_hostile_messages_in_proper_documents(server: XmlRpcServer) -> None:
    dice = random.Random(2)
    before = resident_bytes()
    statuses = {
        post(server, pack(list(malformed_messages.ALL[index % len(malformed_messages.ALL)](dice)), answer=False)) for index in range(260)
    }
    assert statuses == {200, 400}
    still_answers(server)
    assert resident_bytes() - before < 60_000_000


def test_random_documents() -> None:
    dice = random.Random(4)
    whole = bytearray(pack([b"header", b"frame"], answer=False))
    for _ in range(3000):
        changed = bytearray(whole)
        for _ in range(dice.randrange(1, 6)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        try:
            parts = unpack(bytes(changed), answer=False)
        except Malformed:
            continue
        assert all(type(part) is bytes for part in parts)


def test_without_the_token_nothing_is_read(server: XmlRpcServer) -> None:
    place = addresses.parse(server.address)
    for given in ("", "Authorization: Bearer wrong\r\n", "Authorization: Basic xyz\r\n", "Authorization: Bearer \xe9\r\n"):
        with socket.create_connection((place.host, place.port), timeout=PATIENCE_S) as line:
            line.sendall(f"POST /RPC2 HTTP/1.1\r\n{given}Content-Length: 999999999\r\n\r\n".encode("latin-1"))
            assert line.recv(4096).startswith(b"HTTP/1.1 401")
    assert server.traffic.refused == {"unauthorised": 4}
    still_answers(server)


@pytest.mark.parametrize(
    ("length", "status"), [("99999999999", b"413"), ("-1", b"411"), ("x", b"411"), ("9" * 5000, b"411"), ("²", b"411")]
)
def test_the_length_is_checked_before_reading(server: XmlRpcServer, length: str, status: bytes) -> None:
    place = addresses.parse(server.address)
    with socket.create_connection((place.host, place.port), timeout=PATIENCE_S) as line:
        line.sendall(f"POST /RPC2 HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {length}\r\n\r\n".encode("latin-1"))
        assert line.recv(4096)[9:12] == status
    still_answers(server)


def test_a_client_that_hangs_up_frees_its_thread(server: XmlRpcServer) -> None:
    place = addresses.parse(server.address)
    calm = threading.active_count()
    lines = [socket.create_connection((place.host, place.port), timeout=PATIENCE_S) for _ in range(10)]
    for line in lines:
        line.sendall(b"POST /RPC2 HT")
        line.close()
    eventually(lambda: threading.active_count() <= calm)
    still_answers(server)


def knock(server: XmlRpcServer, words: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    place = addresses.parse(server.address)
    line = socket.create_connection((place.host, place.port), PATIENCE_S, source_address=(source, 0))
    line.sendall(words)
    return line


def is_ended(line: socket.socket) -> bool:
    line.settimeout(PATIENCE_S)
    try:
        return line.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("words", [b"", b"POST /RPC2 HTTP/1.1\r\nAuthor"], ids=["silent", "one that begins to speak"])
@pytest.mark.parametrize("sources", [["127.0.0.1"], ["127.0.0.2", "127.0.0.3"]], ids=["at the worker's address", "at two others"])
def test_strangers_who_take_all_places_keep_no_worker_out(
    server: XmlRpcServer, sources: list[str], words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shoal.transports.connection_limits.AUTHENTICATION_S", PATIENCE_S
    )  # else the first leave of themselves, where coming takes long
    worker = XmlRpcClient(server.address, token=TOKEN, max_frame_bytes=LIMIT)
    assert worker.call(Message({"first": "here"}), PATIENCE_S).header["echo"] == {"first": "here"}
    with contextlib.ExitStack() as held:
        lines = [held.enter_context(knock(server, words, sources[number % len(sources)])) for number in range(MOST_CONNECTIONS + 20)]
        still_answers(server)
        assert is_ended(lines[0]), "who came first, and did not show the token, gave its place up"
        assert server.traffic.refused["crowded"] >= 20
        assert worker.call(Message({"still": "here"}), PATIENCE_S).header["echo"] == {"still": "here"}
    worker.close()


def test_one_address_leaves_places_to_others_also_with_the_token() -> None:
    limiter, lines = ConnectionLimiter[socket.socket](8), [socket.socket() for _ in range(10)]
    for number in range(6):
        assert limiter.add(lines[number], "school", float(number)) is None
        limiter.mark_authenticated(lines[number], is_busy=True)
    assert limiter.add(lines[6], "school", 6.0) is lines[6], "all of them wait for answers"
    assert limiter.add(lines[6], "elsewhere", 6.0) is None
    assert limiter.add(lines[7], "elsewhere", 7.0) is None
    limiter.mark_authenticated(lines[7], is_busy=False)
    assert limiter.add(lines[8], "third", 8.0) is lines[6], "the one who has not shown the token"
    limiter.mark_authenticated(lines[8], is_busy=False)
    assert limiter.add(lines[9], "third", 9.0) is lines[7], "then the one who was silent for longest, and waits for nothing"
    for line in lines:
        limiter.remove(line)
        line.close()
    assert limiter.all() == []


def test_a_stranger_has_a_moment_to_show_the_token() -> None:
    limiter = ConnectionLimiter[socket.socket](8)
    with socket.socket() as stranger, socket.socket() as worker:
        limiter.add(stranger, "a", 0.0)
        limiter.add(worker, "a", 0.0)
        limiter.mark_authenticated(worker, is_busy=False)
        assert limiter.overdue(AUTHENTICATION_S) == []
        assert limiter.overdue(AUTHENTICATION_S + 1) == [stranger]


def test_many_words_before_a_question_are_not_kept(server: XmlRpcServer) -> None:
    with knock(server, b"POST /RPC2 HTTP/1.1\r\n") as stranger:
        with contextlib.suppress(ConnectionError):
            for number in range(50):
                stranger.sendall(b"X-%d: " % number + 60_000 * b"x" + b"\r\n")
        assert is_ended(stranger)
    still_answers(server)


def test_it_does_not_leave_this_machine_unless_that_is_meant() -> None:
    with pytest.raises(ShoalError, match="not encrypted"):
        xmlrpc_server("0.0.0.0", token=TOKEN, max_frame_bytes=LIMIT)
    with pytest.raises(ShoalError, match="not encrypted"):
        XmlRpcClient("http://192.0.2.7:80", token=TOKEN, max_frame_bytes=LIMIT)
    xmlrpc_server("0.0.0.0", token=TOKEN, max_frame_bytes=LIMIT, insecure=True).close()


def test_a_port_in_use_is_said_plainly(server: XmlRpcServer) -> None:
    with pytest.raises(ShoalError, match="Is another coordinator running"):
        xmlrpc_server(token=TOKEN, port=addresses.parse(server.address).port, max_frame_bytes=LIMIT)


# --- the page of figures --------------------------------------------------------------------------------


def test_strangers_who_take_all_places_keep_nobody_from_the_figures() -> None:
    page = MetricsPage("127.0.0.1", 0, TOKEN, lambda: "figures 1\n")
    place = addresses.parse(page.address)
    with contextlib.ExitStack() as held:
        lines = [held.enter_context(socket.create_connection((place.host, place.port), PATIENCE_S)) for _ in range(50)]
        reader = http.client.HTTPConnection(place.host, place.port, timeout=PATIENCE_S)
        reader.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        assert reader.getresponse().read() == b"figures 1\n"
        reader.close()
        assert is_ended(lines[0])
    page.close()
