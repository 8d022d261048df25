"""The proxy: as slow, as narrow and as silent as it says, and never out of order."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from shoal.errors import ShoalError
from shoal.transports import Message, Unreachable, addresses
from shoal.transports.netem import PROFILES, LinkProfile, NetemProxy, profile
from shoal.transports.netem.streams import DelayedStream, LinkDirection
from shoal.transports.xmlrpc import XmlRpcClient
from shoal.transports.zeromq import ZmqClient, ZmqServer
from tests.support.eventually import eventually
from tests.support.servers import xmlrpc_server, zmq_server
from tests.support.transport_harness import KEYS, PATIENCE_S, TOKEN, Calling, answering, call_until_answered, take

pytestmark = pytest.mark.whole

LIMIT = 10_000_000
CLEAR = LinkProfile(round_trip_ms=2, jitter_ms=0, loss=0, mbit_per_s=1000)


@pytest.fixture
def server() -> Iterator[ZmqServer]:
    made = zmq_server(token=TOKEN, secret_key=KEYS.secret, max_frame_bytes=LIMIT)
    yield made
    made.close()


@contextlib.contextmanager
def client_through(server: ZmqServer, weather: LinkProfile, seed: int = 0) -> Iterator[tuple[ZmqClient, NetemProxy]]:
    proxy = NetemProxy(server.address, weather, seed)
    client = ZmqClient(proxy.address, token=TOKEN, server_key=KEYS.public, max_frame_bytes=LIMIT)
    try:
        yield client, proxy
    finally:
        client.close()
        proxy.close()


def seconds(client: ZmqClient, message: Message) -> float:
    began = time.monotonic()
    client.call(message, PATIENCE_S)
    return time.monotonic() - began


def trips_until(most_s: float, client: ZmqClient, message: Message) -> list[float]:
    """What calls take, until one takes less than this: a busy machine delivers many of them late."""
    trips: list[float] = []

    def try_one() -> bool:
        trips.append(seconds(client, message))
        return trips[-1] < most_s

    eventually(try_one)
    return trips


def test_the_profiles_are_those_of_the_notes() -> None:
    assert {name: tuple(each)[:4] for name, each in PROFILES.items()} == {
        "good": (20, 5, 0.001, 100),
        "cellular": (80, 40, 0.02, 10),
        "satellite": (400, 100, 0.01, 5),
        "degraded": (200, 80, 0.1, 2),
        "brownout": (80, 40, 0.05, 5),
    }
    assert (PROFILES["brownout"].outage_s, PROFILES["brownout"].outage_every_s) == (2, 7)
    assert profile("good") is PROFILES["good"]
    with pytest.raises(ShoalError, match="good, cellular"):
        profile("sunny")


def test_a_round_trip_by_satellite(server: ZmqServer) -> None:
    with answering(server), client_through(server, PROFILES["satellite"]._replace(loss=0)) as (client, _):
        assert seconds(client, Message({})) > 0.9  # connection, greetings and keys take several round trips
        trips = trips_until(1.5, client, Message({}))
    assert all(trip >= 0.3 for trip in trips)


def test_the_rate_is_capped_in_each_direction(server: ZmqServer) -> None:
    narrow = LinkProfile(round_trip_ms=10, jitter_ms=0, loss=0, mbit_per_s=8)
    frame = bytes(800_000)
    with answering(server, lambda request: Message({}, (frame,) if request.message.header else ())):
        with client_through(server, narrow) as (client, _):
            client.call(Message({}), PATIENCE_S)
            up = trips_until(0.8 * 4, client, Message({}, (frame,)))
            down = trips_until(0.8 * 4, client, Message({"want": 1}))
    assert LinkDirection(narrow).carry(len(frame), 0.0) == pytest.approx(0.8)
    assert min(up + down) > 0.8 * 0.7


def test_connections_share_the_link(server: ZmqServer) -> None:
    narrow = LinkProfile(round_trip_ms=2, jitter_ms=0, loss=0, mbit_per_s=8)
    proxy = NetemProxy(server.address, narrow)
    clients = [ZmqClient(proxy.address, token=TOKEN, server_key=KEYS.public, max_frame_bytes=LIMIT) for _ in range(2)]
    with answering(server, lambda request: Message({})):
        for client in clients:
            client.call(Message({}), PATIENCE_S)
        began = time.monotonic()
        calls = [Calling(client, Message({}, (bytes(400_000),))) for client in clients]
        assert all(call.answer() for call in calls)
        assert time.monotonic() - began > 0.8 * 0.7
    for client in clients:
        client.close()
    proxy.close()


def test_bytes_stay_in_order_in_the_worst_weather(server: ZmqServer) -> None:
    wild = LinkProfile(round_trip_ms=20, jitter_ms=20, loss=0.05, mbit_per_s=50, reset_chance=0)
    content = random.Random(1).randbytes(60_000)
    with answering(server), client_through(server, wild, seed=3) as (client, _):
        assert client.call(Message({}, (content,)), PATIENCE_S).frames[0] == content


def test_losses_are_felt(server: ZmqServer) -> None:
    lossy = CLEAR._replace(loss=0.05, reset_chance=0)
    with answering(server, lambda request: Message({})), client_through(server, lossy, seed=1) as (client, _):
        assert seconds(client, Message({}, (bytes(150_000),))) > lossy.stall_s  # a hundred packets: five losses, more or less


def test_a_loss_may_end_a_connection_and_the_client_goes_on(server: ZmqServer) -> None:
    cruel = CLEAR._replace(loss=0.02, reset_chance=1.0)
    with answering(server, lambda request: Message({})), client_through(server, cruel, seed=2) as (client, _):
        for _ in range(20):
            assert call_until_answered(client, Message({}, (bytes(15_000),))) is not None


def test_an_outage_is_silence() -> None:
    weather = LinkProfile(80, 40, 0.05, 5, outage_s=2, outage_every_s=7)
    assert [weather.after_outage(moment) for moment in (0.0, 4.9, 5.0, 6.9, 7.0, 12.5)] == [0.0, 4.9, 7.0, 7.0, 7.0, 14.0]
    assert CLEAR.after_outage(123.0) == 123.0


def test_outages_delay_and_lose_nothing(server: ZmqServer) -> None:
    stormy = CLEAR._replace(outage_s=0.4, outage_every_s=0.8)
    with answering(server), client_through(server, stormy) as (client, _):
        trips, until = list[float](), time.monotonic() + 0.9  # a whole cycle, however quick the machine is
        while time.monotonic() < until:
            trips.append(seconds(client, Message({"trip": len(trips)})))
    assert max(trips) > 0.3


def test_cut_and_heal(server: ZmqServer) -> None:
    with client_through(server, CLEAR) as (client, proxy):
        with answering(server):
            client.call(Message({"before": 1}), PATIENCE_S)
        proxy.cut()
        with pytest.raises(Unreachable):
            client.call(Message({"during": 1}), 0.3)
        assert server.poll(0) == []
        proxy.heal()
        (late,) = take(server)
        assert late.message.header == {"during": 1}
        server.reply(late, Message({"late": 1}))
        with answering(server):
            assert client.call(Message({"after": 1}), PATIENCE_S).header == {"echo": {"after": 1}}


def test_reset_all(server: ZmqServer) -> None:
    with client_through(server, CLEAR) as (client, proxy):
        call = Calling(client, Message({}))
        take(server)
        proxy.reset_all()
        assert isinstance(call.outcome(), Unreachable)
        with answering(server):
            assert call_until_answered(client, Message({}))


def test_http_has_weather_too() -> None:
    server = xmlrpc_server(token=TOKEN, max_frame_bytes=LIMIT)
    proxy = NetemProxy(server.address, LinkProfile(round_trip_ms=200, jitter_ms=0, loss=0, mbit_per_s=100))
    client = XmlRpcClient(proxy.address, token=TOKEN, max_frame_bytes=LIMIT)
    with answering(server):
        client.call(Message({}), PATIENCE_S)
        began = time.monotonic()
        assert client.call(Message({"a": 1}, (b"frame",)), PATIENCE_S) == Message({"echo": {"a": 1}}, (b"frame",))
        assert time.monotonic() - began >= 0.19
    client.close()
    proxy.close()
    server.close()


# --- the parts ----------------------------------------------------------------------------------------


def arrivals(seed: int) -> list[float]:
    """When pieces of a stream arrive, read at fixed moments."""
    near, source = socket.socketpair()
    stream = DelayedStream(source, source, LinkDirection(PROFILES["cellular"]._replace(reset_chance=0)), random.Random(seed))
    found = []
    with near, source:
        for piece in range(200):
            near.sendall(bytes(1500))
            stream.read(piece * 0.01)
            found.append(stream._under_way[-1][0])
    return found


def test_the_same_seed_gives_the_same_weather() -> None:
    assert arrivals(1) == arrivals(1) != arrivals(2)
    assert arrivals(1) == sorted(arrivals(1))


def test_a_reader_that_stops_stops_the_writer() -> None:
    """What waits in the proxy is bounded, so a fast sender feels a slow receiver."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = NetemProxy(f"tcp://127.0.0.1:{listener.getsockname()[1]}", CLEAR)
        place = addresses.parse(proxy.address)
        with socket.create_connection((place.host, place.port)) as writer:
            reader, _ = listener.accept()
            writer.settimeout(0.5)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < 200_000_000:
                    sent += writer.send(bytes(65_536))
            assert sent < 60_000_000
            reader.close()
        proxy.close()


def test_ends_of_streams_get_through() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = NetemProxy(f"tcp://127.0.0.1:{listener.getsockname()[1]}", CLEAR)
        place = addresses.parse(proxy.address)
        with socket.create_connection((place.host, place.port), timeout=PATIENCE_S) as near:
            far, _ = listener.accept()
            far.settimeout(PATIENCE_S)
            near.sendall(b"question")
            near.shutdown(socket.SHUT_WR)
            assert far.makefile("rb").read() == b"question"
            far.sendall(b"answer")
            far.close()
            assert near.makefile("rb").read() == b"answer"
        proxy.close()


def test_nothing_is_left_when_it_closes() -> None:
    before = set(threading.enumerate())  # some of an earlier test's may end meanwhile
    proxy = NetemProxy("tcp://127.0.0.1:9", CLEAR)
    place = addresses.parse(proxy.address)
    with socket.create_connection((place.host, place.port), timeout=PATIENCE_S) as line:
        with contextlib.suppress(ConnectionError):
            assert line.recv(1) == b""  # nobody is behind it
    proxy.close()
    assert set(threading.enumerate()) <= before
