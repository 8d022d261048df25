"""The right transport by configuration or address, and cheap until then."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.config.fields import Secret
from shoal.config.schema.cluster import InProcess, Postgres, Transport, XmlRpc, Zmq
from shoal.errors import ShoalError
from shoal.transports import Message, Unreachable, addresses
from shoal.transports.addresses import local_addresses
from shoal.transports.connect import connect, listening_hosts, needs_keys, serve
from shoal.transports.interface import ConnectOptions, ListenOptions
from shoal.transports.keys import Keys, key_from_text, key_text, new_keys, new_token
from shoal.transports.request_rate import Rate, RateLimit
from tests.support.postgres_server import PASSWORD, Database
from tests.support.transport_harness import KEYS, LIMIT, PATIENCE_S, TOKEN, answering

pytestmark = pytest.mark.whole


@pytest.mark.parametrize(
    ("settings", "keys", "scheme"),
    [(Zmq(port=0), None, "tcp"), (Zmq(port=0), KEYS, "tcp"), (XmlRpc(port=0), None, "http"), (InProcess(), None, "in-process")],
)
def test_what_is_served_can_be_reached(settings: Transport, keys: Keys | None, scheme: str) -> None:
    server = serve(settings, ListenOptions((), TOKEN, keys, LIMIT))
    assert server.address.startswith(scheme + "://")
    client = connect(ConnectOptions(server.address, TOKEN, keys.public if keys else None, LIMIT))
    with answering(server):
        assert client.call(Message({"a": 1}), PATIENCE_S).header == {"echo": {"a": 1}}
    client.close()
    server.close()


def test_what_cannot_be_served_or_reached() -> None:
    with pytest.raises(ShoalError, match="database"):
        serve(Postgres(), ListenOptions((), TOKEN, None, LIMIT))
    for address in ("ftp://x:1", "nonsense", "tcp://nowhere", "tcp://127.0.0.1:99999", "http://:80"):
        with pytest.raises(ShoalError, match="is not an address"):
            connect(ConnectOptions(address, TOKEN, None, LIMIT))


def test_a_database_is_served_and_reached(database: Database) -> None:
    port = database.server.port
    settings = Postgres(host="127.0.0.1", port=port, database=database.name, user="coordinator", password=Secret(PASSWORD))
    server = serve(settings, ListenOptions((), TOKEN, None, LIMIT))
    assert server.address == f"the database {database.name} at 127.0.0.1:{port}"
    client = connect(ConnectOptions(database.conninfo("student"), "", None, LIMIT))
    with answering(server):
        assert client.call(Message({"a": 1}), PATIENCE_S).header == {"echo": {"a": 1}}
    client.close()
    server.close()
    assert not needs_keys(settings)


def test_where_a_server_listens() -> None:
    assert listening_hosts(Zmq()) == ["127.0.0.1"]
    assert listening_hosts(Zmq(), ["10.0.0.1", "10.0.1.1", "10.0.0.1"]) == ["10.0.0.1", "10.0.1.1"]
    assert listening_hosts(Zmq(host="0.0.0.0"), ["10.0.0.1"]) == ["0.0.0.0"]
    assert not needs_keys(Zmq(host="localhost"))
    assert not needs_keys(InProcess())
    assert needs_keys(Zmq(), ["127.0.0.1", "10.0.0.1"])


def test_everywhere_is_told_as_somewhere() -> None:
    server = serve(Zmq(host="0.0.0.0", port=0), ListenOptions((), TOKEN, KEYS, LIMIT))
    told = addresses.parse(server.address).host
    server.close()
    assert told == local_addresses()[0] != "0.0.0.0"


def test_addresses() -> None:
    assert addresses.parse("tcp://[::1]:80") == addresses.Address("tcp", "::1", 80)
    assert str(addresses.Address("tcp", "::1", 80)) == "tcp://[::1]:80"
    assert addresses.is_loopback("localhost")
    assert addresses.is_loopback("127.9.9.9")
    assert not addresses.is_loopback("*")
    with pytest.raises(ShoalError, match="cannot resolve the host name"):
        addresses.resolve("no such host.invalid")


def test_a_name_nobody_knows_may_be_known_later() -> None:
    client = connect(ConnectOptions("tcp://no-such-machine.invalid:5000", TOKEN, KEYS.public, LIMIT))
    with pytest.raises(Unreachable, match="cannot resolve the host name"):
        client.call(Message({}), PATIENCE_S)
    client.close()


def test_keys_survive_a_command_line() -> None:
    text = key_text(KEYS.public)
    assert key_from_text(text) == KEYS.public
    assert all(letter.isalnum() or letter in "-_" for letter in text)
    with pytest.raises(ShoalError):
        key_from_text(text[:-3])


def test_a_bucket_refills_with_time_and_forgets() -> None:
    limit = RateLimit(Rate(per_second=10.0, burst=2.0))
    assert [limit.admits(b"a", 0.0) for _ in range(3)] == [True, True, False]
    assert limit.admits(b"b", 0.0)
    assert [limit.admits(b"a", 0.1), limit.admits(b"a", 0.1)] == [True, False]
    for peer in range(10_000):
        limit.admits(str(peer).encode(), 1.0)
    assert len(limit._buckets) <= 4096


def test_the_room_is_cheap_to_enter() -> None:
    """Neither ZeroMQ nor HTTP nor torch is loaded before somebody connects."""
    code = "import shoal.transports, sys; assert not {'zmq', 'http.server', 'torch'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_pasted_into_a_command_line_never_looks_like_an_option() -> None:
    tokens = [new_token() for _ in range(500)]
    assert not [token for token in tokens if token.startswith("-")]
    assert len(set(tokens)) == 500
    assert not [keys for keys in (new_keys() for _ in range(500)) if key_text(keys.public).startswith("-")]
