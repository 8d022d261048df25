"""What the watchdog adds up: pure, with times of its own."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.transports.postgres.watchdog import Bounds, ConnectionUse, RoleUse, Watchdog

BOUNDS = Bounds.for_frames(50 << 20)
RESULT = 50 << 6
"""The calls that upload a result of 50 MB."""


def connection(
    role: str = "eve", pid: int = 1, busy_s: float | None = None, records: int = 0, wal: int = 0, temp: int = 0
) -> ConnectionUse:
    return ConnectionUse(role, pid, 1.0, busy_s, wal, records, temp)


def beats(
    dog: Watchdog, seconds: float, connections: Sequence[ConnectionUse], roles: Sequence[RoleUse] = (), start: float = 0.0
) -> dict[str, str]:
    """The same at every heartbeat."""
    found: dict[str, str] = {}
    for beat in range(int(seconds / 1.5)):
        found |= dog.check(start + 1.5 * beat, connections, roles)
    return found


def test_statements_of_fifty_seconds_without_end_exceed_the_bound_within_two_minutes() -> None:
    found = beats(Watchdog(BOUNDS), 120.0, [connection(busy_s=25.0)])
    assert found["eve"].startswith("it kept the server busy for 6")


def test_a_student_alone_may_send_short_statements_without_a_pause() -> None:
    assert beats(Watchdog(BOUNDS), 900.0, [connection(busy_s=0.01)]) == {}


def test_eight_connections_of_one_student_may_not() -> None:
    assert beats(Watchdog(BOUNDS), 300.0, [connection(pid=n, busy_s=0.01) for n in range(8)])


def test_a_class_on_an_overloaded_server_is_left_alone() -> None:
    assert beats(Watchdog(BOUNDS), 900.0, [connection(f"student-{n}", n, 3.0) for n in range(30)]) == {}


def test_one_among_a_class_that_is_at_work_is_found() -> None:
    others = [connection(f"student-{n}", n, 0.02) for n in range(30)]
    hostile = [connection("eve", 100 + n, 30.0) for n in range(8)]
    assert set(beats(Watchdog(BOUNDS), 60.0, [*others, *hostile])) == {"eve"}


def test_what_was_used_long_ago_does_not_count() -> None:
    dog = Watchdog(BOUNDS)
    for start in range(0, 3600, 360):
        assert beats(dog, 45.0, [connection(busy_s=25.0)], start=float(start)) == {}


def test_results_that_are_handed_in_allow_more_and_rolled_back_ones_do_not() -> None:
    honest, hostile = Watchdog(BOUNDS), Watchdog(BOUNDS)
    found: list[tuple[str, str]] = []
    for beat in range(400):
        assert honest.check(1.5 * beat, [], [RoleUse("mia", 2 * RESULT * beat, beat)]) == []
        found += hostile.check(1.5 * beat, [], [RoleUse("eve", 2 * RESULT * beat, 0)])
    assert found[0][1].startswith("it made 4")
    assert "and completed 0 units" in found[0][1]


def test_a_slow_upload_that_ends_after_nine_minutes_was_counted_when_it_was_made() -> None:
    dog = Watchdog(BOUNDS)
    for beat in range(360):
        assert dog.check(1.5 * beat, [connection("mia")], [RoleUse("mia", RESULT * beat // 360, 0)]) == []
    assert dog.check(541.0, [connection("mia", records=16 * RESULT, wal=60 << 20)], [RoleUse("mia", RESULT, 1)]) == []


def test_a_transaction_older_than_the_coordinator_is_no_offence() -> None:
    dog = Watchdog(BOUNDS)
    roles = [RoleUse("mia", RESULT, 0)]
    assert dog.check(0.0, [connection("mia")], roles) == []
    assert dog.check(60.0, [connection("mia", records=16 * RESULT, wal=60 << 20)], roles) == []
    assert dog.check(61.5, [connection("mia", records=18 * RESULT)], roles) == []
    assert dog.check(63.0, [connection("mia", records=30 * RESULT)], roles), "all that it writes after that transaction counts"


def test_notifications_count_beyond_what_calls_write() -> None:
    dog = Watchdog(BOUNDS)
    assert dog.check(0.0, [], []) == []
    assert dog.check(1.5, [connection(records=9_000)], [RoleUse("eve", 0, 0)]) == []
    ((role, why),) = dog.check(3.0, [connection(records=10_001)], [RoleUse("eve", 0, 0)])
    assert role == "eve"
    assert why.startswith("it wrote 10001 records to the server's log of changes within 5 minutes")


def test_temporary_files_of_all_connections_of_a_role_are_added_up() -> None:
    dog = Watchdog(BOUNDS)
    assert dog.check(0.0, [connection(temp=100 << 20), connection("mia", 2, temp=200 << 20)], []) == []
    files = [connection(temp=200 << 20), connection(pid=2, temp=100 << 20), connection("mia", 3, temp=200 << 20)]
    assert dog.check(1.5, files, []) == [("eve", "its temporary files took 315 MB of the disk")]


def test_a_role_that_was_dropped_leaves_no_calls_to_the_next_of_its_name() -> None:
    dog = Watchdog(BOUNDS)
    assert dog.check(0.0, [], [RoleUse("eve", 10**9, 5)]) == []
    assert dog.check(1.5, [], [RoleUse("eve", 10, 0)]) == []
    assert dog.check(3.0, [], [RoleUse("eve", 20, 0)]) == []
