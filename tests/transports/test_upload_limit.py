"""The bound on what a worker sends: a token bucket that every transport's connections pass through."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.transports import Message
from shoal.transports.database_address import parse
from shoal.transports.postgres import PostgresClient
from shoal.transports.upload_limit import UploadBucket, UploadLimit
from shoal.transports.xmlrpc import XmlRpcClient
from shoal.transports.zeromq import ZmqClient
from tests.support.postgres_server import Database
from tests.support.transport_harness import KEYS, LIMIT, PATIENCE_S, TOKEN, Harness, answering

RATE = 1_000_000.0


def test_a_bucket_lets_bytes_pass_at_its_rate_and_small_bursts_at_once() -> None:
    now, slept = [0.0], list[float]()
    bucket = UploadBucket(RATE, lambda: now[0], slept.append)
    now[0] = 10.0
    bucket.take(100_000)
    assert slept == [], "what may pass in a tenth of a second"
    for _ in range(3):
        bucket.take(50_000)
    assert slept == pytest.approx([0.05, 0.10, 0.15]), "each waits for those before it"
    assert UploadBucket(62_500.0).piece == 1500
    assert UploadBucket(1e9).piece == 65536


@pytest.fixture
def limit() -> Iterator[UploadLimit]:
    made = UploadLimit(RATE)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["curve", "xmlrpc", "postgres"])
def test_every_transport_sends_at_this_rate_and_receives_at_its_own(kind: str, limit: UploadLimit, request: pytest.FixtureRequest) -> None:
    database: Database | None = request.getfixturevalue("database") if kind == "postgres" else None
    harness = Harness(kind, database)
    frame = bytes(range(256)) * 2000
    try:
        server = harness.serve()
        client: ZmqClient | XmlRpcClient | PostgresClient
        if database is not None:
            client = PostgresClient(limit.route(database.conninfo("student")), max_frame_bytes=LIMIT)
        elif kind == "xmlrpc":
            client = XmlRpcClient(limit.route(server.address), token=TOKEN, max_frame_bytes=LIMIT)
        else:
            client = ZmqClient(limit.route(server.address), token=TOKEN, server_key=KEYS.public, max_frame_bytes=LIMIT)
        with answering(server, lambda asked: Message({}, asked.message.frames * 4)):
            began = time.monotonic()
            answer = client.call(Message({"kind": "test"}, (frame,)), PATIENCE_S)
            took_s = time.monotonic() - began
        client.close()
    finally:
        harness.close()
    assert [bytes(one) for one in answer.frames] == [frame] * 4
    assert took_s > 0.8 * (len(frame) / RATE - 0.1), "half a second of sending"


def test_a_name_that_libpq_compares_with_a_certificate_is_kept(limit: UploadLimit) -> None:
    routed = parse(limit.route("postgresql://ada:secret@db.example.org:5432/shoal?sslmode=verify-full"))
    assert (routed.host, routed.options) == ("db.example.org", "sslmode=verify-full&hostaddr=127.0.0.1")
    assert routed.port != 5432
    pinned = parse(limit.route("postgresql://ada@db.example.org:5432/shoal?pin=1234"))
    assert (pinned.host, pinned.options, pinned.port) == ("127.0.0.1", "pin=1234", routed.port)
    unix = "postgresql://ada@%2Ftmp:5432/shoal"
    assert limit.route(unix) == unix, "a socket in a folder is no network"


def test_a_server_that_is_not_there_looks_like_one(limit: UploadLimit) -> None:
    from shoal.transports.interface import Unreachable

    client = ZmqClient(limit.route("tcp://127.0.0.1:9"), token=TOKEN, server_key=KEYS.public, max_frame_bytes=LIMIT)
    with pytest.raises(Unreachable):
        client.call(Message({"kind": "test"}), 0.3)
    client.close()


def test_an_upload_to_another_machine_still_needs_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The forwarder is on this machine, to which a token may travel in clear."""
    from shoal.cli.main import main

    assert main(["join", "tcp://192.0.2.1:9", "--token", "t" * 32, "--name", "ada", "--upload", "5mbit"]) == 2
    assert "must carry the server's key" in capsys.readouterr().err
