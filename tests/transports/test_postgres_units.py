"""The life of a unit: leased, done, handed in, given back, failed, expired, cancelled. The database adds up whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import ShoalError
from shoal.transports import Message, Refused, Request
from shoal.transports.postgres import ClaimedUnit, LeaseClient, PostgresServer
from shoal.transports.postgres.coordinator_connection import VACUUM_BYTES
from tests.support.eventually import eventually
from tests.support.postgres_server import Database
from tests.support.transport_harness import PATIENCE_S, take

pytestmark = pytest.mark.whole

LIMIT = 10_000_000
LARGE = bytes(range(256)) * 12_000


@pytest.fixture
def server(database: Database) -> Iterator[PostgresServer]:
    database.give_up_at_once()
    made = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=LIMIT)
    yield made
    made.close()
    assert database.rows("SELECT * FROM shoal.orphans()") == []


@pytest.fixture
def enter(database: Database, server: PostgresServer) -> Iterator[Callable[..., LeaseClient]]:
    desks: list[LeaseClient] = []

    def enter(name: str | None = None) -> LeaseClient:
        desk = LeaseClient(database.conninfo("coordinator"), poll_interval_s=PATIENCE_S)  # a student may hold less
        desks.append(desk)
        desk.join(name, {"host": "laptop"})
        return desk

    yield enter
    for desk in desks:
        desk.close()


def issue(server: PostgresServer, iteration: int, count: int, lease_timeout_s: float = 100.0, max_retries: int = 3) -> None:
    server.issue(iteration, [(0, 10 * n, 10) for n in range(count)], lease_timeout_s, max_retries)


def adds_up(server: PostgresServer) -> dict[str, int]:
    """Every unit that was issued is in one state; only the counts that are not zero."""
    counts = server.table()
    assert counts["issued"] == sum(counts[state] for state in ("pending", "claimed", "completed", "failed", "cancelled"))
    return {state: units for state, units in counts.items() if units and state != "issued"}


def expire(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("UPDATE shoal.units SET deadline = now() - interval '1 second' WHERE state = 'claimed'")


def pass_time(database: Database, seconds: float) -> None:
    """Leases are so much nearer to their end."""
    with database.connect() as connection:
        connection.execute("UPDATE shoal.units SET deadline = deadline - make_interval(secs => %s) WHERE state = 'claimed'", (seconds,))


def blobs(database: Database) -> int:
    count: int = database.rows("SELECT count(*) FROM shoal.blobs")[0][0]
    return count


# --- the straight way -----------------------------------------------------------------------------------


def test_a_result_reaches_the_coordinator_as_it_was(server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    desk = enter("zoe")
    issue(server, 7, 2)
    first, second = desk.claim(5, PATIENCE_S)
    assert (first.iteration, first.epoch, first.start, first.batches, first.attempts) == (7, 0, 0, 10, 0)
    assert desk.submit(second, {"loss": 0.5, "worker": "somebody else"}, [LARGE, b"", b"abc"]) == "accepted"
    (request,) = take(server)
    expected = {"kind": "delivered", "worker": "zoe", "unit": second.id, "epoch": 0, "start": 10, "batches": 10, "base": 7, "loss": 0.5}
    assert request.message.header == expected | {"seq": request.number}
    assert tuple(map(bytes, request.message.frames)) == (LARGE, b"", b"abc")
    assert adds_up(server) == {"claimed": 1, "completed": 1}
    server.consume(request)
    assert server.poll(0) == []


def test_units_come_in_the_order_they_were_issued(server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    desk = enter()
    issue(server, 1, 10)
    assert [unit.start for _ in range(4) for unit in desk.claim(3, 0.0)] == [10 * n for n in range(10)]
    assert desk.claim(3, 0.0) == []


def test_two_claimers_never_get_the_same_unit(server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    issue(server, 1, 2000)
    found: list[list[ClaimedUnit]] = [[] for _ in range(6)]
    desks = [enter() for _ in found]

    def work(n: int) -> None:
        while units := desks[n].claim(1 + 3 * n, 0.0):
            found[n] += units

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [unit.id for units in found for unit in units]
    assert len(ids) == len(set(ids)) == 2000
    assert adds_up(server) == {"claimed": 2000}


def test_a_claim_waits_for_work_and_hears_of_it_at_once(server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    desk = enter()
    timer = threading.Timer(0.1, issue, (server, 1, 1))
    timer.start()
    began = time.monotonic()
    assert len(desk.claim(1, PATIENCE_S)) == 1
    assert time.monotonic() - began < PATIENCE_S / 4
    timer.join()


def test_wake_ends_a_claim(enter: Callable[..., LeaseClient]) -> None:
    desk = enter()
    timer = threading.Timer(0.1, desk.wake)
    timer.start()
    began = time.monotonic()
    assert desk.claim(1, PATIENCE_S) == []
    assert time.monotonic() - began < PATIENCE_S / 4
    timer.join()


# --- what goes wrong ------------------------------------------------------------------------------------


def test_an_expired_claim_goes_to_anybody_and_fails_in_the_end(
    database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]
) -> None:
    slow, other = enter("slow"), enter("other")
    issue(server, 1, 1, max_retries=3)
    for attempts in range(3):
        (unit,) = (slow if attempts == 0 else other).claim(1, 0.0)
        assert unit.attempts == attempts
        expire(database)
    assert other.claim(1, 0.0) == []
    (request,) = take(server)
    assert request.message.header == {
        "kind": "failed",
        "unit": unit.id,
        "base": 1,
        "epoch": 0,
        "start": 0,
        "batches": 10,
        "reason": "no result in time",
        "seq": request.number,
    }
    assert adds_up(server) == {"failed": 1}
    assert {row["name"]: row["failed"] for row in server.workers()} == {"slow": 1, "other": 2}


def test_who_waits_gets_what_expires(server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    """Nobody polls for minutes, and no notification tells of a lease that ends."""
    issue(server, 1, 1, lease_timeout_s=0.3)
    began = time.monotonic()
    assert len(enter("dead").claim(1, 0.0)) == 1
    assert enter("alive").claim(1, PATIENCE_S)[0].attempts == 1
    assert 0.3 <= time.monotonic() - began < PATIENCE_S / 4


@pytest.mark.parametrize("state", ["computing", "sending"])
def test_a_unit_that_outlasts_its_lease_is_accepted_from_a_worker_that_renews_it(
    database: Database, server: PostgresServer, enter: Callable[..., LeaseClient], state: str
) -> None:
    slow, other = enter("slow"), enter("other")
    issue(server, 1, 1, lease_timeout_s=100.0)
    (unit,) = slow.claim(1, 0.0)
    for _ in range(4):
        pass_time(database, 60.0)
        slow.heartbeat(state, {})
        other.heartbeat(state, {})
        assert other.claim(1, 0.0) == []
    assert slow.submit(unit, {}, [LARGE]) == "accepted"
    assert adds_up(server) == {"completed": 1}


def test_a_worker_that_is_alive_and_does_something_else_loses_its_lease(
    database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]
) -> None:
    idle, other = enter("idle"), enter("other")
    issue(server, 1, 1, lease_timeout_s=100.0)
    (unit,) = idle.claim(1, 0.0)
    pass_time(database, 60.0)
    idle.heartbeat("waiting", {})
    pass_time(database, 60.0)
    assert other.claim(1, 0.0)[0].attempts == 1
    assert idle.submit(unit, {}, [b"x"]) == "late"


def test_signs_of_life_and_results_of_the_same_worker_do_not_wait_for_each_other(
    server: PostgresServer, enter: Callable[..., LeaseClient]
) -> None:
    desk, over = enter(), threading.Event()
    issue(server, 1, 200)

    def beat() -> None:
        while not over.is_set():
            desk.heartbeat("computing", {})

    with ThreadPoolExecutor(1) as pool:
        beating = pool.submit(beat)
        outcomes = {desk.submit(unit, {}, [b"x"]) for unit in desk.claim(200, 0.0)}
        over.set()
        beating.result(PATIENCE_S)
    assert outcomes == {"accepted"}


def test_an_unusable_result_is_an_attempt_though_the_next_iteration_has_begun(
    server: PostgresServer, enter: Callable[..., LeaseClient]
) -> None:
    """Where a rule waits for results of more workers, results of one iteration may be looked at in the next."""
    desk = enter()
    issue(server, 1, 1, max_retries=2)
    desk.submit(desk.claim(1, 0.0)[0], {}, [b"no update"])
    (first,) = take(server)
    issue(server, 2, 1, max_retries=2)
    assert desk.claim(1, 0.0) == []  # it has a result, as far as anybody knows
    server.consume(first)
    issue(server, 2, 1, max_retries=2)
    (unit,) = desk.claim(1, 0.0)
    assert (unit.iteration, unit.attempts) == (2, 1)
    desk.submit(unit, {}, [b"no update"])
    server.consume(take(server)[0])
    issue(server, 2, 1, max_retries=2)
    assert desk.claim(1, 0.0) == []
    assert take(server)[0].message.header["reason"] == "its result could not be used"
    assert adds_up(server) == {"failed": 1}


def test_a_late_result_is_dropped_and_counted(database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    slow, quick = enter("slow"), enter("quick")
    issue(server, 1, 1)
    (unit,) = slow.claim(1, 0.0)
    expire(database)
    (again,) = quick.claim(1, 0.0)
    assert again.id == unit.id
    assert slow.submit(unit, {}, [b"small"]) == "late"
    assert slow.submit(unit, {}, [LARGE]) == "late"  # the same one again: counted once
    assert blobs(database) == 0
    assert quick.submit(again, {}, [LARGE]) == "accepted"
    assert adds_up(server) == {"completed": 1, "dropped": 1}


def test_a_result_after_its_deadline_is_late_though_nobody_took_the_unit(
    database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]
) -> None:
    desk = enter()
    issue(server, 1, 1)
    (unit,) = desk.claim(1, 0.0)
    expire(database)
    assert desk.submit(unit, {}, [LARGE]) == "late"
    assert blobs(database) == 0
    assert adds_up(server) == {"pending": 1, "dropped": 1}
    assert desk.claim(1, 0.0)[0].attempts == 1


def test_a_result_that_comes_when_a_round_has_enough_is_late(
    database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]
) -> None:
    desk = enter()
    server.issue(1, [(0, start, 1) for start in range(4)], 60.0, 3, quorum=2)
    units = desk.claim(4, 0.0)
    outcomes = [desk.submit(unit, {}, frames) for unit, frames in zip(units, ([b"x"], [LARGE], [b"x"], [LARGE]), strict=True)]
    assert outcomes == ["accepted", "accepted", "late", "late"]
    assert blobs(database) == 2
    assert adds_up(server) == {"completed": 2, "pending": 2, "dropped": 2}
    assert desk.claim(1, 0.0) == []
    for request in take(server, 2):
        server.consume(request)
    server.issue(2, [(0, start, 1) for start in (2, 3)], 60.0, 3, quorum=2)
    assert [(unit.start, unit.attempts) for unit in desk.claim(4, 0.0)] == [(2, 0), (3, 0)]


def test_a_late_result_is_of_the_version_that_its_unit_was_leased_with(server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    """A worker that says otherwise, so that its result counts more, is not believed."""
    desk = enter()
    server.issue(1, [(0, start, 1) for start in range(3)], 60.0, 3, 1, 2)
    early, late = desk.claim(2, 0.0)
    assert desk.submit(early, {}, [b"x"]) == "accepted"
    server.consume(take(server, 1)[0])
    server.issue(2, [(0, start, 1) for start in (1, 2)], 60.0, 3, 1, 2)
    assert desk.submit(late._replace(iteration=2), {"base": 2}, [b"x"]) == "accepted"
    assert [request.message.header["base"] for request in take(server, 1)] == [1]


def test_a_result_that_waits_when_a_version_closes_counts_for_the_next_round(
    server: PostgresServer, enter: Callable[..., LeaseClient]
) -> None:
    desk = enter()
    server.issue(1, [(0, start, 1) for start in range(4)], 60.0, 3, 1, 2)
    for unit in desk.claim(2, 0.0):
        assert desk.submit(unit, {}, [b"x"]) == "accepted"
    first, second = take(server, 2)
    server.consume(first)
    server.issue(2, [(0, start, 1) for start in range(1, 4)], 60.0, 3, 1, 2)
    assert desk.claim(4, 0.0) == [], "the round has its result, and newer weights come soon"
    server.consume(second)
    server.issue(3, [(0, start, 1) for start in (2, 3)], 60.0, 3, 1, 2)
    assert [(unit.start, unit.iteration) for unit in desk.claim(4, 0.0)] == [(2, 3), (3, 3)]


def test_of_results_that_come_at_once_a_round_takes_as_many_as_it_needs(
    database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]
) -> None:
    desks = [enter() for _ in range(4)]
    start = threading.Barrier(len(desks))

    def submit(desk: LeaseClient, unit: ClaimedUnit) -> str:
        start.wait(PATIENCE_S)
        return desk.submit(unit, {}, [b"x"])

    for iteration in range(1, 11):
        server.issue(iteration, [(iteration, start, 1) for start in range(len(desks))], 60.0, 3, quorum=1)
        # On a slow machine the database would see that the first result comes before a second one could, and hold units back
        database.rows("UPDATE shoal.workers SET unit_s = NULL RETURNING 1")
        units = [desk.claim(1, 0.0)[0] for desk in desks]
        with ThreadPoolExecutor(len(desks)) as pool:
            outcomes = sorted(pool.map(submit, desks, units))
        assert outcomes == ["accepted", "late", "late", "late"]
        for request in take(server, 1):
            server.consume(request)


def test_a_new_iteration_cancels_what_is_left(database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    desk = enter()
    issue(server, 1, 5)
    units = desk.claim(3, 0.0)
    assert desk.submit(units[0], {}, [b"x"]) == "accepted"
    server.consume(take(server, 1)[0])
    issue(server, 2, 1)
    assert [desk.submit(units[1], {}, [b"x" * 10]), desk.submit(units[2], {}, [LARGE])] == ["cancelled", "cancelled"]
    assert blobs(database) == 0
    assert adds_up(server) == {"completed": 1, "cancelled": 4, "pending": 1, "dropped": 2}
    assert [unit.iteration for unit in desk.claim(9, 0.0)] == [2]
    issue(server, 3, 1)
    assert desk.submit(units[1]._replace(lease=units[0].lease), {}, [b"x"]) == "cancelled"  # long pruned
    assert adds_up(server) == {"completed": 1, "cancelled": 5, "pending": 1, "dropped": 3}


def test_a_unit_given_back_is_no_attempt_and_one_that_failed_is(server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    desk = enter()
    issue(server, 1, 1, max_retries=2)
    (unit,) = desk.claim(1, 0.0)
    desk.return_unit(unit)
    (unit,) = desk.claim(1, 0.0)
    assert unit.attempts == 0
    desk.fail_unit(unit, "out of memory")
    desk.fail_unit(unit, "the lease is no longer held: without effect")
    (unit,) = desk.claim(1, 0.0)
    assert unit.attempts == 1
    desk.fail_unit(unit, "out of memory")
    assert desk.claim(1, 0.0) == []
    assert take(server)[0].message.header["reason"] == "out of memory"
    assert adds_up(server) == {"failed": 1}


def test_who_leaves_gives_back_what_it_holds(server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    desk, other = enter("ann"), enter("bob")
    issue(server, 1, 3)
    held = desk.claim(2, 0.0)
    desk.leave()
    assert adds_up(server) == {"pending": 3}
    assert desk.submit(held[0], {}, [b"x"]) == "late"
    assert len(other.claim(9, 0.0)) == 3
    assert {row["name"]: (row["state"], row["alive"]) for row in server.workers()} == {"ann": ("left", False), "bob": ("joined", True)}


def test_a_lease_asked_for_again_brings_the_same_units(
    database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]
) -> None:
    """The answer to a claim was lost with the connection."""
    desk = enter()
    issue(server, 1, 4)
    first = desk.claim(2, 0.0)
    query = "SELECT id FROM shoal.claim(%s, %s, 2, 0, false, true)"
    with database.connect("student") as connection:
        again = connection.execute(query, (desk._secret, first[0].lease)).fetchall()
    assert {row[0] for row in again} == {unit.id for unit in first}
    assert adds_up(server) == {"claimed": 2, "pending": 2}


# --- who takes part ---------------------------------------------------------------------------------------


def test_names(database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    enter(), enter(), enter("mia"), enter("mia")
    assert [row["name"] for row in server.workers()] == ["worker-1", "worker-2", "mia", "mia-2"]
    with pytest.raises(Refused, match="a name has"):
        enter("drop;table")
    with database.connect() as connection:
        connection.execute("UPDATE shoal.workers SET seen_at = now() - interval '1 hour', completed = 5 WHERE name = 'mia'")
    enter("mia")
    assert [row["completed"] for row in server.workers() if row["name"] == "mia"] == [5]


def test_who_lost_its_name_is_told(database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    old = enter("mia")
    issue(server, 1, 1)
    (unit,) = old.claim(1, 0.0)
    with database.connect() as connection:
        connection.execute("UPDATE shoal.workers SET seen_at = now() - interval '1 hour'")
    new = enter("mia")
    assert new.claim(1, 0.0)[0].id == unit.id
    for call in (lambda: old.heartbeat("working", {}), lambda: old.claim(1, 0.0), lambda: old.submit(unit, {}, [LARGE])):
        with pytest.raises(Refused, match="not known here"):
            call()
    assert blobs(database) == 0


def test_signs_of_life_are_seen(server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    enter("mia").heartbeat("computing", {"images_per_s": 12.5, "loss": float("nan")})
    (row,) = server.workers()
    assert (row["state"], row["figures"], row["about"]) == ("computing", {"images_per_s": 12.5}, {"host": "laptop"})


# --- the run and its weights ----------------------------------------------------------------------------


def test_a_run_is_described_once(database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    desk = enter()
    with pytest.raises(ShoalError, match="holds no run yet"):
        desk.read_run()
    with pytest.raises(ShoalError, match="no run to go on with"):
        server.open_run(Message({}), resume=True)
    server.open_run(Message({"config": "text"}, (LARGE, b"")), resume=False)
    welcome = desk.read_run()
    assert (welcome.header, tuple(map(bytes, welcome.frames))) == ({"config": "text"}, (LARGE, b""))
    with pytest.raises(ShoalError, match="another run"):
        server.open_run(Message({"config": "other"}), resume=False)
    assert server.open_run(Message({"config": "other"}), resume=True).header == {"config": "text"}


def test_weights_lead_to_the_newest(database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    desk = enter()
    assert desk.weights(-1) is None
    server.publish(0, "full", {"a": 0}, [LARGE, b"buffers"])
    server.publish(1, "difference", {"a": 1}, [b"change"])
    found = desk.weights(-1)
    assert found is not None
    assert (found.version, found.kind, found.header, found.frames) == (0, "full", {"a": 0}, (LARGE, b"buffers"))
    assert [(w.version, w.kind, w.frames) for w in [desk.weights(0)] if w] == [(1, "difference", (b"change",))]
    assert desk.weights(1) is None
    server.publish(2, "full", {}, [LARGE[::-1]])
    server.publish(2, "difference", {"base": 1}, [b"more"])
    assert [w.kind for w in (desk.weights(0), desk.weights(1)) if w] == ["full", "difference"]
    assert database.rows("SELECT version, kind FROM shoal.weights ORDER BY 1, 2") == [(2, "difference"), (2, "full")]
    server._published_frames.clear()
    with server.transaction():
        server.drop_unused_frames()
    assert database.rows("SELECT count(*) FROM shoal.published_frames") == [(2,)]


def test_people_see_figures_and_the_last_picture(database: Database, server: PostgresServer) -> None:
    server.metrics([(1, {"loss": 2.0}), (2, {"loss": float("inf"), "images": 5})])
    server.picture(1, b"png one")
    server.picture(2, b"png two")
    server.set_fact("epoch", {"number": 2})
    server.set_fact("epoch", {"number": 3})
    assert database.rows("SELECT step, figures FROM shoal.metrics ORDER BY id") == [(1, {"loss": 2.0}), (2, {"images": 5})]
    assert database.rows("SELECT step, png FROM shoal.picture") == [(2, b"png two")]
    assert database.rows("SELECT name, value FROM shoal.facts") == [("epoch", {"number": 3})]


# --- the coordinator comes back ---------------------------------------------------------------------------


def test_a_restart_delivers_again_what_was_not_consumed(
    database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]
) -> None:
    desk = enter("zoe")
    issue(server, 1, 3)
    for unit in desk.claim(3, 0.0):
        desk.submit(unit, {"n": unit.start}, [LARGE])
    requests = take(server, 3)
    assert server.poll(0) == []
    server.consume(requests[1])
    server.close()
    again = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=LIMIT)
    found = take(again, 2)
    assert [request.message.header["n"] for request in found] == [0, 20]
    for request in found:
        again.consume(request)
    again.close()
    assert blobs(database) == 0


def test_all_of_a_transaction_or_nothing(database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    desk = enter()
    issue(server, 1, 1)
    desk.submit(desk.claim(1, 0.0)[0], {}, [LARGE])
    (request,) = take(server)

    def close_the_round(request: Request) -> None:
        with server.transaction():
            server.consume(request)
            server.publish(1, "full", {}, [LARGE])
            issue(server, 2, 5)

    def close_it_in_vain() -> None:
        with server.transaction():
            close_the_round(request)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        close_it_in_vain()
    assert (adds_up(server), desk.weights(-1), blobs(database)) == ({"completed": 1}, None, 1)
    close_the_round(request)
    assert (adds_up(server), blobs(database)) == ({"completed": 1, "pending": 5}, 0)
    assert desk.weights(-1) is not None


@pytest.mark.long
def test_growth_is_bounded(database: Database, server: PostgresServer, enter: Callable[..., LeaseClient]) -> None:
    """Four hundred iterations write 400 MB, and the database never takes near that room, however fast they come."""
    desk = enter()
    frame, sizes = bytes(500_000), []
    for iteration in range(400):
        with server.transaction():
            server.publish(iteration, "full", {}, [memoryview(frame)])
            issue(server, iteration, 3)
        desk.submit(desk.claim(1, PATIENCE_S)[0], {}, [frame])
        server.consume(*take(server))
        if iteration % 20 == 19:
            eventually(lambda: server.freed_bytes - server._heartbeat._vacuumed_bytes <= VACUUM_BYTES)
            sizes.append(database.rows("SELECT pg_database_size(current_database())")[0][0])
    counts = dict(database.rows("SELECT 'units', count(*) FROM shoal.units UNION ALL SELECT 'blobs', count(*) FROM shoal.blobs"))
    assert counts == {"units": 3, "blobs": 0}
    assert adds_up(server)["completed"] == 400
    assert max(sizes) < 270e6
