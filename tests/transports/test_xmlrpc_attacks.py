"""The HTTP side: what a stranger, a broken client or a crafted document gets."""

from __future__ import annotations

import http.client
import random
import socket
import threading
import xmlrpc.client
from collections.abc import Iterator

import pytest
from transport_harness import PATIENCE_S, TOKEN, answering, eventually, resident_bytes

import hostile
from shoal.errors import ShoalError
from shoal.transports import Message, addresses
from shoal.transports.wire import Limits, Malformed, encode
from shoal.transports.xmlrpc import XmlRpcClient, XmlRpcServer
from shoal.transports.xmlrpc.documents import pack, unpack

LIMIT = 100_000
BOMB = b"""<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<methodCall><methodName>shoal.call</methodName><params><param><value>&b;</value></param></params></methodCall>"""


@pytest.fixture
def server() -> Iterator[XmlRpcServer]:
    made = XmlRpcServer("127.0.0.1", 0, token=TOKEN, max_frame_bytes=LIMIT)
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
    statuses = {post(server, pack(list(hostile.ALL[index % len(hostile.ALL)](dice)), answer=False)) for index in range(260)}
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


def test_it_does_not_leave_this_machine_unless_that_is_meant() -> None:
    with pytest.raises(ShoalError, match="not encrypted"):
        XmlRpcServer("0.0.0.0", 0, token=TOKEN, max_frame_bytes=LIMIT)
    with pytest.raises(ShoalError, match="not encrypted"):
        XmlRpcClient("http://192.0.2.7:80", token=TOKEN, max_frame_bytes=LIMIT)
    XmlRpcServer("0.0.0.0", 0, token=TOKEN, max_frame_bytes=LIMIT, insecure=True).close()


def test_a_port_in_use_is_said_plainly(server: XmlRpcServer) -> None:
    with pytest.raises(ShoalError, match="Is another coordinator running"):
        XmlRpcServer("127.0.0.1", addresses.parse(server.address).port, token=TOKEN, max_frame_bytes=LIMIT)
