"""The front that speaks TLS for a class's database: nobody comes through it unencrypted, as the owner, or at the cost of others."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from shoal.launch import run_database as grounds
from shoal.launch.postgres.server import MOST_OUTSIDE, EmbeddedPostgres
from shoal.protocol.address_groups import address_group
from shoal.transports import Refused
from shoal.transports import tls_proxy as tls_front
from shoal.transports.database_address import Access
from shoal.transports.postgres import schema
from shoal.transports.postgres.access import connect
from shoal.transports.postgres.enrolment import own_access
from shoal.transports.postgres.reconnecting import ReconnectingConnection

PATIENCE_S = 300.0
"""After this time something hangs: a busy machine takes many times as long as a quiet one."""
SSL_REQUEST = struct.pack("!ii", 8, 80877103)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(tmp_path_factory.mktemp("class"), host="0.0.0.0") as made:
        with connect(made.access) as owner:
            schema.init(owner)
            schema.close_other_databases(owner)
            schema.grant(owner, "class", "token", "class")
        yield made


@pytest.fixture
def outside(server: EmbeddedPostgres) -> Access:
    """How another machine comes with the class's token."""
    return server.access_from("127.0.0.1")._replace(user="class", password="token")


def raw(outside: Access) -> socket.socket:
    return socket.create_connection((outside.host, outside.port), PATIENCE_S)


def test_a_student_joins_encrypted_and_knows_the_server_by_its_certificate(outside: Access, tmp_path: Path) -> None:
    mine = own_access(outside, "mia", tmp_path, PATIENCE_S)
    line = ReconnectingConnection(mine.address)
    assert line.run(lambda connection: (connection.pgconn.ssl_in_use, connection.info.user), PATIENCE_S) == (True, "student-mia")
    line.close()
    assert (tmp_path / next(tmp_path.iterdir())).stat().st_mode & 0o077 == 0, "nobody else reads the password"


def test_a_certificate_that_is_not_pinned_is_refused_before_the_password_is_sent(outside: Access) -> None:
    line = ReconnectingConnection(outside._replace(options="pin=" + 32 * "0").address)
    with pytest.raises(Refused, match="shows another certificate than the invitation names"):
        line.run(lambda connection: None, 0.0)
    line.close()


def test_nobody_is_let_in_unencrypted(outside: Access) -> None:
    with pytest.raises(psycopg.OperationalError, match="reached with TLS only"):
        psycopg.connect(outside._replace(options="sslmode=disable").address)


def test_the_owner_is_let_in_from_nowhere_but_this_machine(server: EmbeddedPostgres, outside: Access) -> None:
    owner = outside._replace(user=server.access.user, password=server.access.password, options="sslmode=require")
    with pytest.raises(psycopg.OperationalError, match="coordinator's own machine only"):
        psycopg.connect(owner.address)
    with pytest.raises(psycopg.OperationalError, match=r"Connection refused|No route|timeout"):
        psycopg.connect(owner._replace(port=server.access.port, host=_other_address(), options="connect_timeout=2").address)


def _other_address() -> str:
    """Another address of this machine than the one its own server listens at."""
    return "127.0.0.2"


def test_two_names_in_one_greeting_do_not_get_past_the_front() -> None:
    words = b"user\0mia\0user\0shoal\0\0"
    startup = struct.pack("!ii", 8 + len(words), 3 << 16) + words
    assert tls_front._problem(startup, {b"shoal"}) == "a first message names one role"
    long = b"user\0" + 70 * b"s" + b"\0\0"
    assert tls_front._problem(struct.pack("!ii", 8 + len(long), 3 << 16) + long, {63 * b"s"}) is not None


def test_what_comes_unencrypted_behind_the_request_is_not_taken_for_encrypted(outside: Access) -> None:
    words = b"user\0class\0\0"
    with raw(outside) as stranger:
        stranger.sendall(SSL_REQUEST + struct.pack("!ii", 8 + len(words), 3 << 16) + words)
        with contextlib.suppress(ConnectionResetError):
            told = stranger.recv(1) + stranger.recv(100)
            assert not told.removeprefix(b"S").startswith((b"R", b"E")), "neither a question for the password nor a refusal of PostgreSQL's"


def test_a_huge_first_message_is_refused_unread(outside: Access) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with raw(outside) as plain:
        plain.sendall(SSL_REQUEST)
        assert plain.recv(1) == b"S"
        with context.wrap_socket(plain) as stranger:
            stranger.sendall(struct.pack("!ii", 1 << 30, 3 << 16))
            assert b"impossible length" in stranger.recv(1000)


@contextlib.contextmanager
def crowd(outside: Access, sources: Sequence[str], words: bytes) -> Iterator[Callable[[], int]]:
    """Strangers without a token: as many from each address as have places there. A connection that is ended is opened again at once.
    Gives how many connections there were."""
    stop, opened, ready = threading.Event(), [0], threading.Semaphore(0)

    def hold(source: str) -> None:
        held: list[socket.socket] = []
        while not stop.is_set():
            while len(held) < tls_front.MOST_UNAUTHENTICATED_PER_ADDRESS:
                held.append(socket.create_connection((outside.host, outside.port), PATIENCE_S, source_address=(source, 0)))
                with contextlib.suppress(OSError):
                    held[-1].sendall(words)
                opened[0] += 1
            ready.release()
            for ended in select.select(held, [], [], 0.02)[0]:
                with contextlib.suppress(OSError):
                    if ended.recv(100):
                        continue
                held.remove(ended)
                ended.close()
        for one in held:
            one.close()

    holding = [threading.Thread(target=hold, args=(source,)) for source in sources]
    for thread in holding:
        thread.start()
    try:
        for _ in holding:
            assert ready.acquire(timeout=PATIENCE_S)
        yield lambda: opened[0]
    finally:
        stop.set()
        for thread in holding:
            thread.join()


@pytest.mark.parametrize("words", [b"", SSL_REQUEST], ids=["silent", "one word each"])
@pytest.mark.parametrize("sources", [["127.0.0.1"], ["127.0.0.2", "127.0.0.3"]], ids=["at the student's address", "at two others"])
def test_a_student_is_let_in_beside_strangers_who_take_all_places(outside: Access, sources: list[str], words: bytes) -> None:
    """At once, or, on a busy machine where its greeting takes longer than theirs, when it tries again as workers do."""
    with crowd(outside, sources, words) as opened:
        for _ in range(3):
            student = ReconnectingConnection(outside.address)
            assert student.run(lambda connection: connection.info.user, PATIENCE_S) == "class"
            student.close()
        assert opened() >= tls_front.MOST_UNAUTHENTICATED_PER_ADDRESS * len(sources)


def test_who_speaks_keeps_its_place_and_who_was_silent_for_longest_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(tls_front, "time", SimpleNamespace(monotonic=lambda: now[0]))
    strangers, put_out = tls_front.UnauthenticatedClients(2), []

    def come(name: str, address: str, *, full: bool = False) -> tls_front.ClientConnection:
        assert strangers.admit_one_more(address, full=full)
        visit = tls_front.ClientConnection(strangers, address)
        visit.task = SimpleNamespace(cancel=lambda: put_out.append(name))  # type: ignore[assignment]
        return visit

    student = come("student", "school")
    student.on_step()
    now[0] += tls_front.FIRST_BYTES_S / 2
    for number in range(tls_front.MOST_UNAUTHENTICATED_PER_ADDRESS + 1):
        come(f"silent {number}", "school")
    assert put_out == ["silent 0", "silent 1"], "the places of one address are taken: who came first and said nothing leaves"
    for number in range(tls_front.MOST_UNAUTHENTICATED // 2):
        come(f"other {number}", f"address {number}").on_step()
    come("new", "elsewhere")
    assert put_out[2:] == ["silent 2"], "all places are taken"
    for visit in strangers.clients:
        visit.on_step()
    come("newer", "elsewhere")
    assert put_out[3:] == ["student"], "all have spoken just now: one leaves from the address that has most of them"
    now[0] += 2 * tls_front.PATIENCE_S
    for visit in strangers.clients[:-1]:
        visit.on_step()
    come("newest", "elsewhere")
    assert put_out[4:] == ["newer"], "one of them was silent since"
    come("next", "elsewhere")
    assert put_out[5] not in ("newest", "next"), "who came this moment may have spoken already, and is heard first"
    for visit in list(strangers.clients):
        visit.close()
    assert not strangers.admit_one_more("elsewhere", full=True), "clients that were let in are put out for nobody"


def test_one_address_leaves_some_of_the_places_for_those_who_are_let_in() -> None:
    strangers = tls_front.UnauthenticatedClients(2)
    visits = [tls_front.ClientConnection(strangers, address) for address in ("school", "school", "school", "elsewhere")]
    for visit in visits[:2]:
        visit.on_login()
    with pytest.raises(tls_front.ProxyRefusal, match="as many connections from your address as one address may have"):
        visits[2].on_login()
    visits[3].on_login()
    visits[0].close()
    visits[2].on_login()
    assert strangers.clients == []


def test_a_client_that_one_address_has_too_many_of_hears_why(outside: Access, server: EmbeddedPostgres, tmp_path: Path) -> None:
    most = int(MOST_OUTSIDE * 3 / 4)
    eves = [own_access(outside, f"eve-{number}", tmp_path, PATIENCE_S) for number in range(-(-most // 8))]
    with contextlib.ExitStack() as held:
        for number in range(most):
            held.enter_context(connect(eves[number // 8], timeout_s=int(PATIENCE_S)))
        with pytest.raises(psycopg.OperationalError, match="as many connections from your address as one address may have"):
            psycopg.connect(eves[-1]._replace(options="sslmode=require").address)
        mia = own_access(outside, "mia", tmp_path, PATIENCE_S)  # who only enrols is a stranger, and strangers have places of their own
        mine = _through(outside, "127.0.0.2", held)
        connect(mia._replace(host="127.0.0.1", port=mine)).close()


def _through(outside: Access, source: str, held: contextlib.ExitStack) -> int:
    """A port here whose connections come to the front from another address."""
    listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))

    def pump(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client = listener.accept()[0]
                there = socket.create_connection((outside.host, outside.port), PATIENCE_S, source_address=(source, 0))
                for pair in ((client, there), (there, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    held.callback(listener.shutdown, socket.SHUT_RDWR)
    return int(listener.getsockname()[1])


def test_the_database_tells_addresses_apart_though_all_come_through_the_front(
    outside: Access, server: EmbeddedPostgres, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as held:
        other = outside._replace(port=_through(outside, "127.0.0.2", held))
        for name, way in (("here", outside), ("here-too", outside), ("there", other)):
            own_access(way, name, tmp_path / name, PATIENCE_S)
    with connect(server.access) as owner:
        query = "SELECT enrolled_from FROM shoal.roles WHERE name = ANY (%s) ORDER BY name"
        here, here_too, there = owner.execute(query, (["student-here", "student-here-too", "student-there"],)).fetchall()
    assert here == here_too != there


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_addresses_of_one_ipv6_network_count_as_one(one: str, other: str, same: bool) -> None:
    assert (tls_front.address_group(one) == tls_front.address_group(other)) is same
    assert [address_group(one), address_group(other)] == [tls_front.address_group(one), tls_front.address_group(other)], (
        "all doors count alike"
    )


def test_who_enrols_stays_a_stranger_and_gives_its_place_up(outside: Access, tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(tls_front.MOST_UNAUTHENTICATED_PER_ADDRESS):
            held.enter_context(contextlib.suppress(psycopg.OperationalError))
            held.enter_context(connect(outside))
        for number in range(3):
            own_access(outside, f"late-{number}", tmp_path, PATIENCE_S)


def test_memory_of_a_students_connection_is_bounded(
    server: EmbeddedPostgres, outside: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eve = own_access(outside, "eve", tmp_path, PATIENCE_S)
    with connect(eve) as greedy:
        greedy.execute("SET work_mem = '2000GB'")
        with pytest.raises(psycopg.Error, match="out of memory"):
            greedy.execute("SELECT array_length(array_agg(repeat('x', 1000000)), 1) FROM generate_series(1, 100000)")
    monkeypatch.setattr(grounds, "_MOST_BYTES", 50 << 20)
    with connect(eve) as greedy:
        greedy.execute("BEGIN")
        greedy.execute("DECLARE big CURSOR FOR SELECT array_agg(repeat('x', 1000)) FROM generate_series(1, 100000)")
        greedy.execute("MOVE big")
        grounds._end_greedy(server)
        with pytest.raises(psycopg.OperationalError):
            greedy.execute("SELECT 1")
    with connect(server.access) as owner:
        assert [note for (note,) in owner.execute("SELECT note FROM shoal.notes") if "took more memory than a student may" in note]
