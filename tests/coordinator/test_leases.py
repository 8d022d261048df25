"""What leases promise, whatever the schedule. What the calls mean in named cases is in tests/transports/test_leases_conformance.py."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.coordinator.units.lease_table import PATIENCE_LEASES, GivenUp, Lease, Leases

LEASE_S = 10.0
WORKERS = st.sampled_from("ab")
PLACES = st.integers(0, 99)


class AnySchedule(RuleBasedStateMachine):
    """A coordinator, workers that may do anything, and a book that is kept of what they were told."""

    @initialize(attempts=st.integers(1, 3), units=st.integers(1, 4), quorum=st.none() | st.integers(1, 4), most_lag=st.integers(0, 3))
    def begin(self, attempts: int, units: int, quorum: int | None, most_lag: int) -> None:
        self.leases, self.attempts, self.now = Leases(LEASE_S, attempts, patience_leases=0), attempts, 0.0
        self.version, self.units, self.quorum = 0, units, quorum
        self.most_lag = most_lag
        self.oldest = -most_lag
        """The oldest version whose leases still count."""
        self.settled: set[int] = set()
        """Units with a result that counts, and units that were given up."""
        self.accepted: set[int] = set()
        """Those with a result of this version."""
        self.given_up: set[int] = set()
        self.in_vain: Counter[int] = Counter()
        self.told: dict[str, Counter[str]] = {worker: Counter() for worker in "ab"}
        self.failures: Counter[str] = Counter()
        self.held: dict[tuple[str, int], Lease] = {}
        """By worker and unit: the latest lease that each was given and did not end itself."""
        self.last: dict[str, tuple[int, int, str]] = {}
        self._issue()

    def _issue(self) -> None:
        self.oldest = max(self.oldest, self.version - self.most_lag)
        units = [unit for unit in range(self.units) if unit not in self.settled]
        assert self.leases.issue(self.version, units, self.quorum, self.now, self.most_lag) == []

    def _tried_in_vain(self, unit: int, worker: str, given_up: bool) -> None:
        self.in_vain[unit] += 1
        self.failures[worker] += 1
        assert given_up == (self.in_vain[unit] == self.attempts)
        if given_up:
            self.given_up.add(unit)
            self.settled.add(unit)

    def _lives(self, lease: Lease) -> bool:
        return lease.version >= self.oldest and self.now < lease.deadline

    @property
    def _is_full(self) -> bool:
        return self.quorum is not None and len(self.accepted) >= self.quorum and self.most_lag == 0

    @rule(worker=WORKERS)
    def claim(self, worker: str) -> None:
        lease = self.leases.claim(worker, self.now)
        if lease is None:
            assert self.leases.enough or self.leases.counts()["pending"] == 0
            return
        assert lease == (lease.unit, self.version, worker, self.in_vain[lease.unit] + 1, self.now + LEASE_S, self.now)
        assert lease.attempt <= self.attempts
        assert lease.unit not in self.settled
        holders = [who for who in "ab" if self.leases.holds(who, lease.unit, self.now)]
        assert holders == [worker]
        self.held = {key: held for key, held in self.held.items() if key[1] != lease.unit or held.version < self.oldest}
        self.held[worker, lease.unit] = lease
        if self.last.get(worker, ())[:2] == (lease.unit, self.version):
            del self.last[worker]

    @precondition(lambda self: self.held)
    @rule(place=PLACES, seconds=st.sampled_from([0.0, 6.0, 10.0]))
    def renew(self, place: int, seconds: float) -> None:
        """After some time, in which nobody has looked for leases that ended."""
        self.now += seconds
        worker, _ = sorted(self.held)[place % len(self.held)]
        self.leases.renew(worker, self.now)
        for key, lease in self.held.items():
            if key[0] == worker and self._lives(lease):
                self.held[key] = lease._replace(deadline=self.now + LEASE_S)

    @precondition(lambda self: self.held)
    @rule(place=PLACES)
    def submit(self, place: int) -> None:
        worker, unit = sorted(self.held)[place % len(self.held)]
        lease = self.held[worker, unit]
        outcome = self.leases.submit(worker, unit, lease.version, self.now)
        if self.last.get(worker, ())[:2] == (unit, lease.version):
            assert outcome == self.last[worker][2]
            return
        expected = "cancelled" if lease.version < self.oldest else "accepted" if self._lives(lease) and not self._is_full else "late"
        assert outcome == expected
        self._note(worker, unit, lease, outcome)

    def _note(self, worker: str, unit: int, lease: Lease, outcome: str) -> None:
        self.told[worker]["completed" if outcome == "accepted" else outcome] += 1
        self.last[worker] = unit, lease.version, outcome
        if outcome == "accepted":
            assert unit not in self.settled, "a unit counts once"
            self.settled.add(unit)
            self.accepted.add(unit)
        if self._lives(lease):
            self.held[worker, unit] = lease._replace(deadline=self.now)  # it is over, and may still be handed in again

    @precondition(lambda self: self.held)
    @rule(place=PLACES, gives_back=st.booleans())
    def end(self, place: int, gives_back: bool) -> None:
        worker, unit = sorted(self.held)[place % len(self.held)]
        holds = any(lease.unit == unit for lease in self.leases.held(worker))
        if gives_back:
            self.leases.give_back(worker, unit)
        else:
            given_up = self.leases.fail(worker, unit, "broken", self.now)
            assert holds or given_up is None
            if holds:
                self._tried_in_vain(unit, worker, given_up == GivenUp(unit, "broken"))
        if holds:
            del self.held[worker, unit]

    @precondition(lambda self: self.held)
    @rule(worker=WORKERS, in_order=st.booleans())
    def go(self, worker: str, in_order: bool) -> None:
        held = self.leases.held(worker)
        given_up = set() if in_order else {unit for unit, _ in self.leases.lose(worker, self.now)}
        if in_order:
            self.leases.leave(worker)
        for lease in held:
            del self.held[worker, lease.unit]
            if not in_order:
                self._tried_in_vain(lease.unit, worker, lease.unit in given_up)
        assert self.leases.held(worker) == []

    @rule(seconds=st.sampled_from([3.0, 6.0, 10.0]), noticed=st.booleans())
    def wait(self, seconds: float, noticed: bool) -> None:
        self.now += seconds
        if not noticed:
            return
        ended = [lease for worker in "ab" for lease in self.leases.held(worker) if lease.deadline <= self.now]
        given_up = {unit for unit, _ in self.leases.expire(self.now)}
        for lease in ended:
            self._tried_in_vain(lease.unit, lease.worker, lease.unit in given_up)
        deadlines = [lease.deadline for worker in "ab" for lease in self.leases.held(worker)]
        assert all(deadline > self.now for deadline in deadlines)
        assert self.leases.next_deadline() == min(deadlines, default=None)

    @precondition(lambda self: self.accepted or self.now >= LEASE_S)
    @rule(quorum=st.none() | st.integers(1, 4), most_lag=st.integers(0, 3))
    def next_version(self, quorum: int | None, most_lag: int) -> None:
        """Leases that lag at most as much as is allowed go on, and nobody else gets their units."""
        held = [lease for worker in "ab" for lease in self.leases.held(worker)]
        self.version, self.quorum, self.most_lag = self.version + 1, quorum, most_lag
        for unit in self.accepted:
            del self.in_vain[unit]
        self.accepted.clear()
        self._issue()
        kept = [lease for lease in held if lease.version >= self.oldest]
        assert sorted(lease for worker in "ab" for lease in self.leases.held(worker)) == sorted(kept)
        assert self.leases.counts()["pending"] == self.units - len(self.settled) - len(kept)

    @rule()
    def issue_again(self) -> None:
        before = self.leases.counts()
        self._issue()
        assert self.leases.counts() == before, "what is open stays as it is"

    @precondition(lambda self: self.accepted)
    @rule(place=PLACES)
    def spoil(self, place: int) -> None:
        unit = sorted(self.accepted)[place % len(self.accepted)]
        self.accepted.remove(unit)
        self.settled.remove(unit)
        self.in_vain[unit] += 1
        given_up = {unit for unit, _ in self.leases.issue(self.version, [unit], self.quorum, self.now, self.most_lag)}
        assert given_up == ({unit} if self.in_vain[unit] == self.attempts else set())
        self.given_up |= given_up
        self.settled |= given_up

    @invariant()
    def every_unit_is_settled_or_open(self) -> None:
        counts = self.leases.counts()
        assert counts["pending"] + counts["claimed"] == self.units - len(self.settled)
        assert set(self.leases.given_up) == self.given_up
        assert counts["issued"] == sum(counts[state] for state in ("pending", "claimed", "completed", "failed", "cancelled"))

    @invariant()
    def one_worker_at_most_holds_a_unit(self) -> None:
        held = [lease.unit for worker in "ab" for lease in self.leases.held(worker)]
        assert len(held) == len(set(held)) == self.leases.counts()["claimed"]

    @invariant()
    def a_result_would_be_accepted_while_the_lease_lasts_and_the_round_needs_it(self) -> None:
        for (worker, unit), lease in self.held.items():
            assert self.leases.holds(worker, unit, self.now) == (self._lives(lease) and not self._is_full)

    @invariant()
    def nothing_is_tried_too_often(self) -> None:
        assert max(self.in_vain.values(), default=0) <= self.attempts

    @invariant()
    def outcomes_add_up(self) -> None:
        for worker, told in self.told.items():
            assert +self.leases.workers[worker] == +(told + Counter(failed=self.failures[worker]))

    def teardown(self) -> None:
        """Workers that only do their work bring every run to its end."""
        if not hasattr(self, "leases"):
            return
        self.leases.expire(self.now + LEASE_S)
        self.now += LEASE_S
        self.settled |= set(self.leases.given_up)
        for _ in range(2 * self.units + 2):
            self.version += 1
            self.leases.issue(self.version, [unit for unit in range(self.units) if unit not in self.settled], 1, self.now)
            lease = self.leases.claim("a", self.now)
            if lease is None:
                break
            assert self.leases.submit("a", lease.unit, self.version, self.now) == "accepted"
            self.settled.add(lease.unit)
        assert self.settled == set(range(self.units))


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_an_update_of_weights_that_do_not_exist_yet_is_not_accepted() -> None:
    leases = Leases(LEASE_S, 3)
    leases.issue(1, [1], None, 0.0)
    leases.claim("a", 0.0)
    assert leases.submit("a", 1, 2, 1.0) == "late"
    assert leases.submit("a", 1, 1, 1.0) == "accepted"


def test_the_next_deadline_is_that_of_the_lease_which_ends_first() -> None:
    leases = Leases(LEASE_S, 3)
    leases.issue(1, [1, 2], None, 0.0)
    assert leases.next_deadline() is None
    leases.claim("a", 0.0)
    leases.claim("b", 4.0)
    assert leases.next_deadline() == 10.0
    leases.renew("a", 6.0)
    assert leases.next_deadline() == 14.0
    leases.submit("b", 2, 1, 7.0)
    assert leases.next_deadline() == 16.0
    assert leases.expire(15.9) == []
    assert [lease.unit for lease in leases.held("a")] == [1]


@pytest.mark.timeout(30)
def test_a_call_costs_the_same_however_many_workers_and_units_there_are() -> None:
    """A second on a slow core. Calls that walked through all units or all workers would take minutes."""
    leases, workers = Leases(LEASE_S, 3), [f"w{n}" for n in range(10_000)]
    leases.issue(1, range(100_000), None, 0.0)
    for turn in range(3):
        now = 1.0 * turn
        claimed = {worker: leases.claim(worker, now) for worker in workers}
        for worker, lease in claimed.items():
            assert lease is not None
            leases.renew(worker, now)
            assert leases.holds(worker, lease.unit, now)
            assert leases.next_deadline() is not None
        assert leases.expire(now) == []
        for worker, lease in reversed(claimed.items()):
            assert lease is not None
            assert leases.submit(worker, lease.unit, 1, now) == "accepted"
    assert leases.counts()["completed"] == 30_000


class Room:
    """A unit that everybody fails, others that everybody manages, and who is there."""

    def __init__(self, attempts: int, *present: str) -> None:
        self.present = list(present)
        self.leases = Leases(LEASE_S, attempts, present=lambda: self.present)
        self.now, self.version = 0.0, 1
        self.leases.issue(1, [1], None, 0.0)

    def fails(self, worker: str) -> bool:
        """Whether there was the unit for the worker, which failed it."""
        if self.leases.claim(worker, self.now) is None:
            return False
        self.leases.fail(worker, 1, "broken", self.now)
        return True

    def manages(self, worker: str) -> None:
        """A unit whose result is used: the next version is made of it."""
        easy = 100 + self.version
        self.leases.issue(self.version + 1, [easy], None, self.now)
        assert self.leases.claim(worker, self.now) is not None
        assert self.leases.submit(worker, easy, self.version + 1, self.now) == "accepted"
        self.version += 2
        self.leases.issue(self.version, [1], None, self.now)


def test_a_unit_that_a_worker_tried_in_vain_is_for_the_others_who_are_present() -> None:
    room = Room(4, "a", "b")
    assert room.fails("a")
    assert not room.fails("a"), "b has not tried it"
    assert room.leases.any_waits
    assert room.fails("b")
    assert room.fails("a"), "everybody has tried it"
    room.present.append("idle")
    assert not room.fails("a")
    room.now = LEASE_S
    assert room.fails("a"), "one who never asks for a unit keeps nobody from trying"
    room.present.remove("idle")
    assert not room.fails("a"), "it was tried often enough: each tries it once in a lease's time"
    room.now = PATIENCE_LEASES * LEASE_S
    assert room.fails("b")
    assert room.leases.given_up == {1: "broken"}


def test_while_somebody_is_there_who_manages_units_only_such_workers_use_up_attempts() -> None:
    room = Room(2, "a", "b")
    for worker in "aabb":
        room.manages(worker)
    for number in range(20):
        room.present.append(f"new {number}")
        assert room.fails(f"new {number}")
        room.now += LEASE_S
    assert room.leases.given_up == {}
    assert [room.fails("a"), room.fails("b")] == [True, True]
    assert room.leases.given_up == {1: "broken"}, "who manages others is believed that this one cannot be done"


def test_who_fails_as_much_as_it_manages_is_not_believed() -> None:
    room = Room(2, "a", "b")
    room.manages("a")
    room.manages("b")
    for _ in range(5):
        assert room.fails("b")
        room.now += LEASE_S
    assert room.leases.given_up == {}


def test_one_that_manages_units_does_not_speak_for_another_that_does() -> None:
    room = Room(2, "a", "b")
    for worker in "aaab":
        room.manages(worker)
    assert room.fails("a")
    room.now += LEASE_S
    assert room.fails("a")
    assert room.leases.given_up == {}, "b has not tried it"
    room.present.remove("b")
    room.now += LEASE_S
    room.manages("a")
    assert room.fails("a")
    assert room.leases.given_up == {1: "broken"}


def test_units_that_a_lone_worker_fails_wait_for_other_workers_to_come() -> None:
    room = Room(2, "a")
    assert [room.fails("a") for _ in range(3)] == [True, True, False]
    assert room.leases.waits_for_reliable_worker(1)
    for lease in range(1, PATIENCE_LEASES):
        room.now = lease * LEASE_S
        assert room.fails("a")
    assert room.leases.given_up == {}
    room.now = PATIENCE_LEASES * LEASE_S
    assert room.fails("a")
    assert room.leases.given_up == {1: "broken"}, "a run that cannot work ends all the same"


def test_a_unit_that_is_held_for_ever_goes_to_who_has_nothing_to_do() -> None:
    leases = Leases(LEASE_S, 3)
    leases.issue(1, [1], None, 0.0)
    assert leases.claim("eve", 0.0) is not None
    for now in (5.0, 10.0):
        leases.renew("eve", now)
        assert leases.take_from_slowest("ada", now) is None, "a lease's time is everybody's"
    leases.renew("eve", 11.0)
    assert leases.take_from_slowest("eve", 11.0) is None
    freed = leases.take_from_slowest("ada", 11.0)
    assert freed is not None
    assert (freed[0].worker, freed[0].since, freed[1]) == ("eve", 0.0, None)
    lease = leases.claim("ada", 11.0)
    assert lease is not None
    assert [leases.submit("eve", 1, 1, 12.0), leases.submit("ada", 1, 1, 12.0)] == ["late", "accepted"]
    assert leases.workers["eve"] == {"failed": 1, "late": 1}


def test_where_units_take_long_a_worker_may_take_four_times_as_long() -> None:
    leases = Leases(LEASE_S, 3)
    leases.issue(1, [1, 2], None, 0.0)
    leases.claim("ada", 0.0)
    leases.claim("slow", 0.0)
    for now in range(1, 31):
        for worker in ("ada", "slow"):
            leases.renew(worker, float(now))
    assert leases.submit("ada", 1, 1, 30.0) == "accepted"
    for now in range(31, 121):
        leases.renew("slow", float(now))
    assert leases.take_from_slowest("ada", 120.0) is None
    assert leases.take_from_slowest("ada", 120.1) is not None


def test_a_unit_that_its_worker_disappeared_with_does_not_wait_for_that_one() -> None:
    leases = Leases(LEASE_S, 3, present=lambda: ("a", "b"))
    leases.issue(1, [1, 2], None, 0.0)
    leases.claim("a", 0.0)
    leases.lose("a", 0.0)
    found = [leases.claim(worker, 1.0) for worker in "aba"]
    assert [lease and lease.unit for lease in found] == [2, 1, None]
