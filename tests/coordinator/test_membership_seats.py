"""Who is here: seats, signs of life, speeds; compared with the slow and obvious way to know it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from typing import Any

from shoal.config.schema.strategy import Async
from shoal.coordinator.members.table import Member, MemberTable, Seats
from shoal.protocol.messages import PROTOCOL, Join
from tests.support.small_cluster import Cluster, strategy_of


def test_the_first_free_seat_is_given_away() -> None:
    generator = random.Random(0)
    seats, taken = Seats(), set[int]()
    for _ in range(3000):
        if taken and generator.random() < 0.5:
            seat = generator.choice(sorted(taken))
            seats.leave(seat)
            taken.remove(seat)
        else:
            wanted = generator.choice([None, generator.randrange(40)])
            expected = wanted if wanted is not None and wanted not in taken else next(n for n in range(99) if n not in taken)
            assert seats.take(wanted) == expected
            taken.add(expected)
    assert len(seats._left) <= 40, "seats that are left again and again are listed once"


def test_speed_is_the_rate_over_the_median_rate() -> None:
    generator = random.Random(1)
    members = MemberTable(5.0)
    workers = [members.add(f"w{number}", f"s{number}", {}, 0.0) for number in range(9)]
    now = 0.0
    for _ in range(400):
        now += generator.random()
        worker = generator.choice(workers)
        if generator.random() < 0.02 and worker.session in members.by_session:
            members.remove(worker)
        elif worker.session in members.by_session:
            members.measure_rate(worker, now, 0.3)
        rates = [one.rate for one in members.by_session.values() if one.rate is not None]
        if worker.rate is not None and len(rates) > 1:
            assert abs(members.speed(worker) - worker.rate / statistics.median(rates)) < 1e-12
        else:
            assert members.speed(worker) == 1.0


def test_the_silent_are_found_longest_silent_first() -> None:
    members = MemberTable(1.0)
    a, b = (members.add(name, name, {}, 0.0) for name in "ab")
    members.touch(a, 2.0)
    assert members.next_silent(3.0) is None
    assert members.next_silent(3.5) is b
    members.remove(b)
    assert members.next_silent(3.5) is None
    assert members.next_silent(5.5) is a


def test_names_are_given_to_those_without() -> None:
    members = MemberTable(1.0)
    members.known = {"worker-1": 0}
    members.add("worker-2", "s", {}, 0.0)
    assert [members.free_name() for _ in range(2)] == ["worker-3", "worker-4"]


def test_the_table_has_a_row_for_each() -> None:
    members = MemberTable(1.0)
    members.add("a", "s", {"system": "Linux"}, 0.0)
    (row,) = members.table()
    assert row["worker"] == "a"
    assert row["system"] == "Linux"
    assert isinstance(members.by_name["a"], Member)


def test_of_two_processes_with_one_name_the_newer_stays_and_the_older_is_told() -> None:
    cluster = Cluster(strategy_of(Async()))

    def join(instance: str) -> Mapping[str, Any]:
        return cluster.answers[cluster.ask_in(Join("ada", PROTOCOL, {}, instance))]

    first, second = join("first"), join("second")
    assert (first["seat"], second["seat"]) == (0, 0)  # as one that was started again
    told = join("first")
    assert (told["kind"], told["reason"]) == ("refused", "replaced")
    assert "another worker called ada has come" in told["detail"]
    assert join("second")["kind"] == "welcome"  # which may come back as often as it likes
    assert list(cluster.coordinator.members.by_name) == ["ada"]
