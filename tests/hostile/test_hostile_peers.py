"""What peers with the token, and peers without it, cannot do to a coordinator that is alive, or to those who work for it."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.rounds.plausibility import LARGEST_FIGURE
from shoal.coordinator.run_plan import MemberLimits
from shoal.errors import ShoalError
from shoal.protocol.identities import Identity
from shoal.protocol.messages import PROTOCOL, Gone, Join
from shoal.runs.connections import JoinOptions
from shoal.runs.invitation import GuestList
from shoal.transports import Message, addresses
from shoal.transports.connection_limits import RESERVED_DESCRIPTORS, ConnectionLimiter
from shoal.transports.keys import Keys
from shoal.transports.request_rate import Rate
from shoal.transports.zeromq.sockets import PIECE_BYTES
from tests.support.eventually import eventually
from tests.support.live_coordinator import SAMPLES, TOKENS, Honest, Live, ask, proved
from tests.support.transport_harness import KEYS, PATIENCE_S, resident_bytes


@pytest.fixture
def living(tmp_path: Path) -> Iterator[Callable[..., Live]]:
    """Makes coordinators, and ends them."""
    with contextlib.ExitStack() as ending:

        def make(*bounds: MemberLimits, **server: Any) -> Live:
            made = Live(tmp_path, *bounds, **server)
            ending.callback(made.end)
            return made

        yield make


@pytest.fixture
def live(living: Callable[..., Live]) -> Live:
    return living()


# --- before anybody is let in -------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["PLAIN", "CURVE"])
def test_a_frame_that_is_announced_before_the_handshake_fills_no_memory(living: Callable[..., Live], mechanism: str) -> None:
    live = living(max_frame_bytes=200 << 20, secret_key=KEYS.secret if mechanism == "CURVE" else None)
    place = addresses.parse(live.server.address)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.encode().ljust(20, b"\0") + b"\0" + bytes(31)
    before, much = resident_bytes(), bytes(1 << 20)
    with contextlib.ExitStack() as open_ones:
        for _ in range(4):
            line = open_ones.enter_context(socket.create_connection((place.host, place.port), timeout=2))
            with contextlib.suppress(OSError):
                line.sendall(greeting + b"\x06" + struct.pack(">Q", 190 << 20))
                for _ in range(40):
                    line.sendall(much)
        assert resident_bytes() - before < 30_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much a connection has brought")
@pytest.mark.parametrize("mechanism", ["PLAIN", "CURVE"])
def test_hundreds_of_strangers_together_fill_no_memory(living: Callable[..., Live], mechanism: str) -> None:
    """Each brings a piece that a worker may send, which is far more than a handshake has."""
    live = living(secret_key=KEYS.secret if mechanism == "CURVE" else None)
    place = addresses.parse(live.server.address)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.encode().ljust(20, b"\0") + b"\0" + bytes(31)
    before, piece = resident_bytes(), bytes(PIECE_BYTES - 100)
    with contextlib.ExitStack() as open_ones:
        for _ in range(300):
            line = open_ones.enter_context(socket.create_connection((place.host, place.port), timeout=PATIENCE_S))
            with contextlib.suppress(OSError):
                line.sendall(greeting + b"\x06" + struct.pack(">Q", PIECE_BYTES) + piece)
        eventually(lambda: live.server.traffic.refused.get("oversized", 0) == 300)
        assert resident_bytes() - before < 100_000_000


def test_idle_connections_leave_room_for_others_and_for_files(living: Callable[..., Live]) -> None:
    live = living(connections=40, connections_per_address=1000)
    place = addresses.parse(live.server.address)
    ada = Honest(live, "ada", local="127.0.0.1")
    with contextlib.ExitStack() as open_ones:
        idle = [
            open_ones.enter_context(socket.create_connection((place.host, place.port), timeout=PATIENCE_S, source_address=("127.0.0.1", 0)))
            for _ in range(60)
        ]
        eventually(lambda: live.server.traffic.refused.get("crowded", 0) == 31)
        for line in idle[:31]:  # the first to come
            while line.recv(100):
                pass  # a greeting, until it is ended
        assert ada.client.is_connected(), "who was let in is not"
        assert Honest(live, "bob", local="127.0.0.1").step() == "accepted"
        assert Honest(live, "eve", local="127.0.0.2").step() == "accepted"
    assert ada.step() == "accepted"
    eventually(lambda: live.server._authenticator.connections._counts["127.0.0.1"] == 2)


def test_connections_are_fewer_than_descriptors() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limiter = ConnectionLimiter[int](10**9, 10**9)
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert now >= soft
    assert limiter.most <= now - RESERVED_DESCRIPTORS
    assert limiter.most_per_address < limiter.most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nonsense_counts_against_the_rate_like_any_message(living: Callable[..., Live]) -> None:
    live = living(rate=Rate(1e-3, 20.0))  # no permit comes back, however long the calls take
    enemy = live.client()
    for _ in range(30):
        answer = enemy.call(Message({"kind": "join", "name": 7}), PATIENCE_S).header
    assert answer["reason"] == "too-fast"
    assert live.server.traffic.refused["malformed"] == 20
    assert Honest(live, "ada").step() == "accepted", "the others have their own rate"
    enemy.close()


# --- names ---------------------------------------------------------------------------------------------------


def test_a_name_stays_with_the_key_that_brought_it_also_after_a_restart(live: Live) -> None:
    ada = Honest(live, "ada")
    assert ada.step() == "accepted"
    other = Honest(live, "ada")
    assert other.protocol.name == "ada-2"
    assert ada.step() == other.step() == "accepted", "the first stays"
    assert any("ada-2 joined: it asked for the name ada" in note for note in live.notes)
    live.restart()
    assert Honest(live, "ada").protocol.name == "ada-3"
    assert Honest(live, "ada", other.protocol.identity).protocol.name == "ada-2"
    back = Honest(live, "ada", ada.protocol.identity)
    assert (back.protocol.name, back.protocol.seq) == ("ada", 2)


def test_a_recorded_joining_opens_nothing(live: Live) -> None:
    client, identity = live.client(), Identity.new()
    recorded = proved(client, Join("ada", PROTOCOL, {}, "i"), identity)
    assert ask(client, recorded)["kind"] == "welcome"
    assert ask(client, recorded)["reason"] == "unknown-nonce"
    forged = proved(client, Join("ada", PROTOCOL, {}, "i"), Identity.new())._replace(key=identity.key)
    assert ask(client, forged)["reason"] == "unproved"
    assert list(live.coordinator.members.by_name) == ["ada"]
    client.close()


def test_only_who_has_its_key_says_that_a_worker_is_gone(live: Live) -> None:
    ada, enemy = Honest(live, "ada"), live.client()
    for gone in (Gone("ada", Identity.new().key), proved(enemy, Gone("ada"), Identity.new())):
        assert ask(enemy, gone)["kind"] in ("challenge", "refused")
    assert ada.step() == "accepted"
    assert ask(enemy, proved(enemy, Gone("ada"), ada.protocol.identity))["kind"] == "goodbye"
    assert not live.coordinator.members.by_name
    enemy.close()


# --- claims --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", [{"seq": 2**53}, {"epoch": 2**31 - 1, "position": 2**31 - 1}, {"position": 102}, {"epoch": 2}])
def test_a_seat_cannot_be_poisoned_for_the_next_worker(live: Live, claim: dict[str, int]) -> None:
    enemy = Honest(live, "eve")
    assert enemy.step() == "accepted"
    assert enemy.claim(**claim)["reason"] in ("misplaced", "impossible")
    enemy.leave()
    ada = Honest(live, "ada")
    assert (ada.protocol.seat, ada.place) == (enemy.protocol.seat, (0, 1))
    assert ada.step() == "accepted"


def test_samples_and_weight_are_what_the_batches_can_hold(live: Live) -> None:
    enemy = Honest(live, "eve")
    assert enemy.claim(weight=1e12, samples=4_000_013_231)["status"] == "accepted"
    eventually(lambda: bool(live.published_ones))
    record = live.published_ones[-1]
    assert (record.samples, record.weight) == (SAMPLES, SAMPLES * TOKENS)
    assert live.coordinator.state.samples == SAMPLES


def test_absurd_figures_are_dropped_and_counted(live: Live) -> None:
    enemy = Honest(live, "eve")
    figures = {"loss": 2.0, "huge": 1e308, "beyond": 2 * LARGEST_FIGURE, "nan": float("nan"), "\x1b[2J": 1.0}
    assert enemy.claim(metrics=figures)["status"] == "accepted"
    eventually(lambda: bool(live.published_ones))
    assert live.published_ones[-1].metrics == {"loss": 2.0}
    assert live.coordinator.refused["figures"] == 4


# --- crowds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "curve"])
def test_a_person_has_a_token_of_their_own_and_no_more_workers_than_it_is_for(
    tmp_path: Path, living: Callable[..., Live], keys: Keys | None
) -> None:
    folder = tmp_path / "invited"
    folder.mkdir()
    guests = GuestList(folder)
    live = living(MemberLimits(guests=guests), guests=guests.all, secret_key=keys.secret if keys else None)
    door = {"server_key": keys.public if keys else None}
    guest = GuestList(folder).invite("eve", 2)  # while the coordinator is running
    first, _ = (Honest(live, f"laptop-{number}", token=guest.token, **door) for number in range(2))
    with pytest.raises(ShoalError, match="the invitation of eve is for 2 workers at a time"):
        Honest(live, "laptop-3", token=guest.token, **door)
    assert Honest(live, "ada", **door).step() == "accepted"
    first.leave()
    assert Honest(live, "laptop-3", token=guest.token, **door).step() == "accepted"
    assert GuestList(folder).invite("eve", 5).token == guest.token
    with pytest.raises(ShoalError):
        Honest(live, "mallory", token="guessed", **door)


def test_a_key_is_kept_for_its_user_alone_and_found_again(tmp_path: Path) -> None:
    way = JoinOptions("tcp://127.0.0.1:1", "token", None, name="ada", state=tmp_path / "state")
    made = way.own_key()
    way.key_file("ada").write(made)
    assert way.own_key() == made
    assert way._replace(token="another run").own_key() != made
    assert way.key_file("ada").path.stat().st_mode & 0o777 == 0o600
    way.key_file("ada").path.write_text("half a k")
    with pytest.raises(ShoalError, match="is damaged: delete the file"):
        way.own_key()


def test_a_flood_of_workers_fills_no_log_or_memory_and_the_members_go_on(living: Callable[..., Live]) -> None:
    live = living(MemberLimits(joins_per_minute=20), clock=lambda: 0.0)  # all within one minute, however long the joining takes
    ada, enemy = Honest(live, "ada"), live.client()
    assert ada.step() == "accepted"
    reasons = set[str]()
    for number in range(60):
        reasons.add(ask(enemy, proved(enemy, Join(f"eve-{number}", PROTOCOL, {}, ""), Identity("01" * 32))).get("reason", ""))
    assert reasons == {"", "too-fast"}
    assert len(live.coordinator.state.seats) < 30
    assert len(live.notes) < 30
    assert Honest(live, "ada", ada.protocol.identity).step() == "accepted", "who is known may come back"
    enemy.close()
