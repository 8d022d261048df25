"""A ZeroMQ server among enemies, with the token and without."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
import threading
from collections.abc import Iterator

import pytest
import zmq

from shoal.errors import ShoalError
from shoal.transports import Message, Refused, addresses
from shoal.transports.keys import keys_from_secret, keys_from_token, new_keys
from shoal.transports.request_rate import Rate
from shoal.transports.zeromq import ZmqClient, ZmqServer
from shoal.transports.zeromq.sockets import in_pieces
from tests.support import malformed_messages
from tests.support.eventually import eventually
from tests.support.raw_zmtp import command, frame, plain_peer
from tests.support.servers import zmq_server
from tests.support.transport_harness import KEYS, PATIENCE_S, TOKEN, answering, resident_bytes

pytestmark = pytest.mark.whole

LIMIT = 1_000_000


@pytest.fixture
def server() -> Iterator[ZmqServer]:
    made = zmq_server(token=TOKEN, secret_key=None, max_frame_bytes=LIMIT, rate=Rate(1e6, 1e6))
    yield made
    made.close()


@contextlib.contextmanager
def raw_dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    """Somebody with the token and no manners."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.plain_username, dealer.plain_password = b"shoal", TOKEN.encode()
        dealer.linger = 0
        dealer.sndtimeo = dealer.rcvtimeo = int(1000 * PATIENCE_S)
        dealer.connect(address)
        yield dealer


def still_answers(server: ZmqServer) -> None:
    client = ZmqClient(server.address, token=TOKEN, server_key=None, max_frame_bytes=LIMIT)
    try:
        assert client.call(Message({"still": "there"}, (bytes(LIMIT),)), PATIENCE_S).header == {"echo": {"still": "there"}}
    finally:
        client.close()


def test_thousands_of_hostile_messages_from_a_worker(server: ZmqServer) -> None:
    dice = random.Random(11)
    with answering(server):
        still_answers(server)
        before = resident_bytes()
        with raw_dealer(server.address) as dealer:
            for index in range(6000):
                dealer.send_multipart(in_pieces(malformed_messages.ALL[index % len(malformed_messages.ALL)](dice)))
                while dealer.poll(0):
                    dealer.recv_multipart()
            eventually(lambda: server.traffic.messages >= 6001)
        still_answers(server)
        assert resident_bytes() - before < 60_000_000
    assert server.traffic.refused["malformed"] > 4000
    assert server.traffic.refused["oversized"] > 400


def test_a_worker_that_never_reads_its_answers(server: ZmqServer) -> None:
    with answering(server, lambda request: Message({}, (bytes(LIMIT),))), raw_dealer(server.address) as dealer:
        before = resident_bytes()
        dealer.rcvhwm = 1
        for number in range(300):
            dealer.send_multipart(in_pieces([b"\x93\x01" + b"\xce" + struct.pack(">I", number) + b"\x80"]))
        eventually(lambda: server.traffic.messages >= 300)
        assert resident_bytes() - before < 100_000_000
    assert server.traffic.refused["gone"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much a connection has brought")
def test_a_message_without_end_is_cut_off(server: ZmqServer) -> None:
    with answering(server):
        before = resident_bytes()
        part = frame(bytes(LIMIT // 2), more=True)
        with contextlib.closing(plain_peer(server.address, TOKEN)) as enemy:
            with contextlib.suppress(OSError):
                for _ in range(4000):
                    if server.traffic.refused:
                        break
                    enemy.sendall(part)
            eventually(lambda: server.traffic.refused == {"oversized": 1})
        assert resident_bytes() - before < 1_000_000_000
        still_answers(server)


def test_many_small_messages_are_no_message_without_end(server: ZmqServer) -> None:
    """More bytes than one message may have, in honest messages, over one connection."""
    client = ZmqClient(server.address, token=TOKEN, server_key=None, max_frame_bytes=LIMIT)
    with answering(server, lambda request: Message({})):
        for _ in range(60):
            client.call(Message({}, (bytes(LIMIT),)), PATIENCE_S)
    client.close()
    assert server.traffic.refused == {}


def test_quick_calls_lose_no_answer(server: ZmqServer) -> None:
    """ZeroMQ's queues look full to it until it takes note of what has left them, which it does in its own time."""
    client = ZmqClient(server.address, token=TOKEN, server_key=None, max_frame_bytes=LIMIT)
    with answering(server):
        for _ in range(3000):
            client.call(Message({}), PATIENCE_S)
    client.close()
    assert server.traffic.refused == {}


def test_raw_bytes_on_the_port(server: ZmqServer) -> None:
    dice = random.Random(5)
    place = addresses.parse(server.address)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
    with answering(server):
        still_answers(server)
        before = resident_bytes()
        for index in range(400):
            with contextlib.suppress(OSError), socket.create_connection((place.host, place.port), timeout=PATIENCE_S) as line:
                start = (b"", greeting[: dice.randrange(64)], greeting, b"GET / HTTP/1.1\r\n\r\n")[index % 4]
                line.sendall(start + dice.randbytes(dice.choice((0, 3, 100, 5000))))
        still_answers(server)
        assert resident_bytes() - before < 30_000_000
    assert server.traffic.messages == 2


def test_a_worker_that_speaks_nonsense_below_the_messages(server: ZmqServer) -> None:
    """Commands, flags and lengths of ZeroMQ's own protocol, at random, after a proper handshake."""
    dice = random.Random(9)
    names = (b"\x04PING", b"\x04PONG", b"\x05READY", b"\x05ERROR", b"\x09SUBSCRIBE", b"\x05HELLO", b"\x08INITIATE", b"\xff", b"")

    def piece() -> bytes:
        return dice.choice(
            (
                dice.randbytes(dice.randrange(1, 50)),
                command(dice.choice(names) + dice.randbytes(dice.randrange(40))),
                frame(dice.randbytes(dice.randrange(40)), more=dice.random() < 0.5),
                b"\x02" + struct.pack(">Q", dice.choice((0, 1, 2**63, 2**64 - 1, 10**6))),
            )
        )

    with answering(server):
        for _ in range(200):
            with contextlib.closing(plain_peer(server.address, TOKEN)) as enemy, contextlib.suppress(OSError):
                for _ in range(dice.randrange(1, 12)):
                    enemy.sendall(piece())
        still_answers(server)


def test_a_promise_of_gigabytes_is_not_believed(server: ZmqServer) -> None:
    with answering(server):
        before = resident_bytes()
        with contextlib.closing(plain_peer(server.address, TOKEN)) as enemy:
            enemy.sendall(b"\x02" + struct.pack(">Q", 2**40) + bytes(1000))
            enemy.settimeout(PATIENCE_S)
            with contextlib.suppress(OSError):
                while enemy.recv(4096):
                    pass  # until the server hangs up
        still_answers(server)
        assert resident_bytes() - before < 30_000_000


# --- the handshake ------------------------------------------------------------------------------------


def test_no_mechanism_but_the_right_one(server: ZmqServer) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger, answering(server):
        stranger.linger = 0
        stranger.connect(server.address)
        stranger.send(b"let me in")
        eventually(lambda: bool(server.traffic.refused.keys() & {"unauthorised", "handshake"}))
        still_answers(server)
    assert server.traffic.messages == 1


def test_a_worker_without_the_key_cannot_join_an_encrypted_run() -> None:
    server = zmq_server(token=TOKEN, secret_key=KEYS.secret, max_frame_bytes=LIMIT)
    client = ZmqClient(server.address, token=TOKEN, server_key=None, max_frame_bytes=LIMIT)
    with pytest.raises(ShoalError, match="one side encrypts"):
        client.call(Message({}), PATIENCE_S)
    client.close()
    server.close()


def test_beyond_this_machine_only_encrypted() -> None:
    with pytest.raises(ShoalError, match="encrypted"):
        zmq_server("127.0.0.1", "0.0.0.0", token=TOKEN, max_frame_bytes=LIMIT)
    with pytest.raises(Refused, match="in clear"):
        ZmqClient("tcp://192.0.2.7:1234", token=TOKEN, server_key=None, max_frame_bytes=LIMIT)


@pytest.mark.parametrize("token", ["", "x" * 256])
def test_a_token_that_fits_no_handshake(token: str) -> None:
    with pytest.raises(ShoalError, match="255"):
        zmq_server(token=token, max_frame_bytes=LIMIT)


@pytest.mark.parametrize("key", ["", "short", "x" * 39 + '"', "é" * 40])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ShoalError):
        ZmqClient("tcp://127.0.0.1:1", token=TOKEN, server_key=key, max_frame_bytes=LIMIT)
    with pytest.raises(ShoalError):
        zmq_server(token=TOKEN, secret_key=key, max_frame_bytes=LIMIT)


def test_keys() -> None:
    pair = new_keys()
    assert keys_from_secret(pair.secret) == keys_from_secret(pair.secret.encode()) == pair
    assert keys_from_token(TOKEN) == keys_from_token(TOKEN) != keys_from_token(TOKEN + "x")


# --- several addresses --------------------------------------------------------------------------------


def test_one_server_on_several_addresses() -> None:
    server = zmq_server(*["127.0.0.1", "127.0.0.2"][: 2 if sys.platform == "linux" else 1], token=TOKEN, max_frame_bytes=LIMIT)
    assert server.address == server.addresses[0]
    assert len({addresses.parse(address).port for address in server.addresses}) == 1
    with answering(server):
        for address in (*server.addresses, server.address.replace("127.0.0.1", "localhost")):
            client = ZmqClient(address, token=TOKEN, server_key=None, max_frame_bytes=LIMIT, local="127.0.0.1")
            assert client.call(Message({}), PATIENCE_S)
            client.close()
    server.close()


def test_a_port_in_use_is_said_plainly(server: ZmqServer) -> None:
    with pytest.raises(ShoalError, match="Is another coordinator running"):
        zmq_server(token=TOKEN, port=addresses.parse(server.address).port, max_frame_bytes=LIMIT)


def test_threads_end_with_the_server() -> None:
    before = {thread.name for thread in threading.enumerate()}
    zmq_server(token=TOKEN, secret_key=None, max_frame_bytes=LIMIT).close()
    assert {thread.name for thread in threading.enumerate()} <= before
