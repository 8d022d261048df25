"""Leases have one meaning: the pure module and PostgreSQL's functions do the same, in named cases and under any schedule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.coordinator.units.lease_table import NO_RESULT_IN_TIME, PATIENCE_LEASES, RESULT_WAS_UNUSABLE, WORKER_IS_GONE
from tests.support.lease_backends import ATTEMPTS, LEASE_S, Claimed, Keeper, PostgresKeeper, PureKeeper, StudentsKeeper
from tests.support.postgres_server import Database, PostgresProcess

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def whole_board(postgres: PostgresProcess) -> Iterator[PostgresKeeper]:
    database = Database(postgres)
    made = PostgresKeeper(database)
    yield made
    made.close()
    database.drop()


@pytest.fixture
def board(whole_board: PostgresKeeper) -> Iterator[PostgresKeeper]:
    whole_board.forget()
    yield whole_board
    assert whole_board.database.rows("SELECT * FROM shoal.orphans()") == []


@pytest.fixture(scope="module")
def whole_class(postgres: PostgresProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudentsKeeper]:
    database = Database(postgres)
    made = StudentsKeeper(database, tmp_path_factory.mktemp("students"), *"abc")
    yield made
    made.close()
    database.drop()


@pytest.fixture
def students(whole_class: StudentsKeeper) -> StudentsKeeper:
    whole_class.forget()
    return whole_class


@pytest.fixture(params=["pure", "postgres"])
def crowd(request: pytest.FixtureRequest) -> Keeper:
    """Three who are there, and each is somebody else."""
    found: Keeper = request.getfixturevalue("students") if request.param == "postgres" else PureKeeper(*"abc")
    return found


@pytest.fixture(params=["pure", "postgres"])
def keeper(request: pytest.FixtureRequest) -> Keeper:
    found: Keeper = request.getfixturevalue("board") if request.param == "postgres" else PureKeeper()
    return found


def states(keeper: Keeper) -> dict[str, int]:
    """The counts that are not zero; every unit that was issued is in one state."""
    counts = keeper.counts()
    assert counts["issued"] == sum(counts[state] for state in ("pending", "claimed", "completed", "failed", "cancelled"))
    return {state: units for state, units in counts.items() if units and state != "issued"}


def outcomes(keeper: Keeper, worker: str) -> dict[str, int]:
    return {name: count for name, count in keeper.outcomes(worker).items() if count}


# --- issue and claim ------------------------------------------------------------------------------------


def test_the_unit_that_waited_longest_is_claimed_first_and_by_one_worker_only(keeper: Keeper) -> None:
    keeper.issue(5, [7, 3, 4])
    claims = [keeper.claim(worker) for worker in "aba"]
    assert claims == [Claimed(7, 5, 1), Claimed(3, 5, 1), Claimed(4, 5, 1)]
    assert keeper.claim("c") is None
    assert [keeper.holds(worker, 7) for worker in "ab"] == [True, False]
    assert states(keeper) == {"claimed": 3}


def test_a_unit_that_comes_back_goes_to_the_end(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2, 3, 4, 5])
    for worker in "abc":
        keeper.claim(worker)
    keeper.fail("b", 2)
    keeper.give_back("a", 1)
    keeper.leave("c")
    claims = [keeper.claim("d") for _ in range(5)]
    assert [(claim.unit, claim.attempt) for claim in claims if claim] == [(4, 1), (5, 1), (2, 2), (1, 1), (3, 1)]


def test_the_same_version_again_adds_units_and_leaves_open_ones_as_they_are(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2])
    assert keeper.claim("a") == Claimed(1, 1, 1)
    keeper.issue(1, [1, 2, 3])
    assert keeper.holds("a", 1)
    assert [keeper.claim("b") for _ in range(3)] == [Claimed(2, 1, 1), Claimed(3, 1, 1), None]
    assert states(keeper) == {"claimed": 3}


# --- renewal --------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_while_its_worker_is_seen_computing(keeper: Keeper) -> None:
    keeper.issue(1, [1])
    keeper.claim("a")
    for _ in range(5):
        keeper.wait(0.7 * LEASE_S)
        assert keeper.holds("a", 1)
        keeper.renew("a")
    assert keeper.submit("a", 1, 1) == "accepted"


def test_a_lease_lasts_for_a_whole_lease_after_it_was_renewed_and_then_ends(keeper: Keeper) -> None:
    keeper.issue(1, [1])
    keeper.claim("a")
    keeper.wait(0.5 * LEASE_S)
    keeper.renew("a")
    keeper.wait(0.8 * LEASE_S)
    assert keeper.holds("a", 1)
    keeper.wait(0.2 * LEASE_S)
    assert not keeper.holds("a", 1)
    assert keeper.claim("b") == Claimed(1, 1, 2)


def test_all_that_a_worker_holds_is_renewed_and_nothing_of_others(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2, 3])
    for worker in "aab":
        keeper.claim(worker)
    keeper.wait(0.7 * LEASE_S)
    keeper.renew("a")
    keeper.wait(0.7 * LEASE_S)
    assert [keeper.holds("a", 1), keeper.holds("a", 2), keeper.holds("b", 3)] == [True, True, False]


def test_a_lease_that_ended_is_not_renewed_though_nobody_has_noticed(keeper: Keeper) -> None:
    keeper.issue(1, [1])
    keeper.claim("a")
    keeper.wait_unnoticed(LEASE_S)
    keeper.renew("a")
    assert not keeper.holds("a", 1)
    assert keeper.submit("a", 1, 1) == "late"
    keeper.wait(0)
    assert keeper.claim("b") == Claimed(1, 1, 2)
    assert outcomes(keeper, "a") == {"late": 1, "failed": 1}


# --- the end of a lease ---------------------------------------------------------------------------------


def test_three_attempts_are_three_and_then_a_unit_is_given_up(keeper: Keeper) -> None:
    keeper.issue(1, [1])
    for attempt in range(1, ATTEMPTS + 1):
        assert keeper.given_up() == {}
        assert keeper.claim("a") == Claimed(1, 1, attempt)
        keeper.wait(LEASE_S)
    assert keeper.claim("a") is None
    assert keeper.given_up() == {1: NO_RESULT_IN_TIME}
    assert states(keeper) == {"failed": 1}
    assert outcomes(keeper, "a") == {"failed": ATTEMPTS}


def test_every_way_to_try_in_vain_counts_and_giving_back_does_not(keeper: Keeper) -> None:
    keeper.issue(1, [1])
    keeper.claim("a")
    keeper.give_back("a", 1)
    keeper.claim("a")
    keeper.leave("a")
    assert keeper.claim("a") == Claimed(1, 1, 1)
    keeper.fail("a", 1)
    assert keeper.claim("b") == Claimed(1, 1, 2)
    keeper.lose("b")
    assert keeper.claim("c") == Claimed(1, 1, 3)
    assert keeper.given_up() == {}
    keeper.fail("c", 1)
    assert keeper.given_up() == {1: "broken"}
    assert [outcomes(keeper, worker) for worker in "abc"] == [{"failed": 1}] * 3


def test_a_worker_that_disappears_has_tried_in_vain_what_it_held(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2])
    for _ in range(ATTEMPTS):
        assert keeper.claim("a") is not None
        assert keeper.claim("a") is not None
        keeper.lose("a")
    assert keeper.given_up() == {1: WORKER_IS_GONE, 2: WORKER_IS_GONE}


def test_who_does_not_hold_a_unit_cannot_fail_it_or_give_it_back(keeper: Keeper) -> None:
    keeper.issue(1, [1])
    keeper.claim("a")
    keeper.wait(LEASE_S)
    keeper.claim("b")
    keeper.fail("a", 1)
    keeper.give_back("a", 1)
    assert keeper.holds("b", 1)
    assert outcomes(keeper, "a") == {"failed": 1}  # its lease ended: once


def test_a_unit_that_was_given_up_does_not_keep_others_from_being_done(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2])
    for _ in range(ATTEMPTS):
        claims = [keeper.claim("a"), keeper.claim("a")]
        keeper.fail("a", 1)
        keeper.give_back("a", 2)
        assert None not in claims
    keeper.issue(1, [1, 2])
    assert keeper.claim("a") == Claimed(2, 1, 1)
    assert keeper.claim("a") is None
    assert keeper.submit("a", 2, 1) == "accepted"


# --- whose attempts count ---------------------------------------------------------------------------------


def managed(keeper: Keeper, worker: str, version: int) -> None:
    """The worker does a unit whose result is used; unit 1 is on offer again."""
    keeper.issue(version, [100 + version])
    assert keeper.claim(worker) is not None
    assert keeper.submit(worker, 100 + version, version) == "accepted"
    keeper.issue(version + 1, [1])


def test_while_somebody_manages_units_those_who_manage_none_give_nothing_up(crowd: Keeper) -> None:
    managed(crowd, "a", 1)
    for attempt in range(1, 2 * ATTEMPTS, 2):
        for number, worker in enumerate("bc"):
            assert crowd.claim(worker) == Claimed(1, 2, attempt + number)
            crowd.fail(worker, 1)
        crowd.wait(LEASE_S)
    assert crowd.given_up() == {}
    assert crowd.claim("a") is not None
    assert crowd.submit("a", 1, 2) == "accepted"


def fails(keeper: Keeper, worker: str) -> bool:
    """Whether there was unit 1 for the worker, which failed it."""
    if keeper.claim(worker) is None:
        return False
    keeper.fail(worker, 1)
    return True


def test_when_they_are_gone_every_attempt_counts_after_a_while(crowd: Keeper) -> None:
    managed(crowd, "a", 1)
    for _ in range(ATTEMPTS):
        assert fails(crowd, "b")
        crowd.wait(LEASE_S)
    crowd.leave("a")
    assert fails(crowd, "b")
    assert crowd.given_up() == {}, "somebody who manages units may come"
    crowd.wait(LEASE_S)
    assert fails(crowd, "b")
    assert crowd.given_up() == {1: "broken"}


def test_a_unit_that_reliable_workers_fail_is_given_up(crowd: Keeper) -> None:
    for version, worker in enumerate("aaabbbccc"):
        managed(crowd, worker, 2 * version + 1)
    for worker in "abc":
        assert crowd.given_up() == {}
        assert fails(crowd, worker)
    assert crowd.given_up() == {1: "broken"}


def test_one_reliable_worker_gives_no_unit_up_that_another_could_try(crowd: Keeper) -> None:
    for version, worker in enumerate(5 * "a" + "b"):
        managed(crowd, worker, 2 * version + 1)
    for _ in range(ATTEMPTS):
        assert fails(crowd, "a")
        crowd.wait(LEASE_S)
    assert crowd.given_up() == {}, "b has not tried it"
    crowd.wait((PATIENCE_LEASES - ATTEMPTS) * LEASE_S)
    assert fails(crowd, "a")
    assert crowd.given_up() == {1: "broken"}, "b had the chance for long"


def test_before_a_unit_was_ever_done_a_crowd_gives_none_up_for_some_leases(crowd: Keeper) -> None:
    crowd.issue(1, [1])
    assert [fails(crowd, worker) for worker in "abc"] == [True] * 3
    assert [fails(crowd, worker) for worker in "abc"] == [False] * 3, "all have tried it often enough, and wait for a lease's time"
    for _ in range(PATIENCE_LEASES - 1):
        crowd.wait(LEASE_S)
        assert [fails(crowd, worker) for worker in "ab"] == [True] * 2
        assert crowd.given_up() == {}
    crowd.wait(LEASE_S)
    assert fails(crowd, "c")
    assert crowd.given_up() == {1: "broken"}, "a run that cannot work ends all the same"


def test_an_honest_worker_who_comes_after_the_crowd_does_what_it_failed(crowd: Keeper) -> None:
    crowd.leave("c")
    crowd.issue(1, [1])
    for _ in range(PATIENCE_LEASES - 1):
        assert [fails(crowd, worker) for worker in "ab"] == [True] * 2
        crowd.wait(LEASE_S)
    crowd.renew("c")
    assert crowd.claim("c") is not None
    assert crowd.submit("c", 1, 1) == "accepted"
    assert crowd.given_up() == {}


# --- submit ---------------------------------------------------------------------------------------------


def test_a_result_is_late_when_the_lease_has_gone_to_somebody_else(keeper: Keeper) -> None:
    keeper.issue(1, [1])
    keeper.claim("slow")
    keeper.wait(LEASE_S)
    keeper.claim("quick")
    assert keeper.submit("slow", 1, 1) == "late"
    assert keeper.submit("quick", 1, 1) == "accepted"
    assert (outcomes(keeper, "slow"), outcomes(keeper, "quick")) == ({"late": 1, "failed": 1}, {"completed": 1})
    assert states(keeper) == {"completed": 1}


def test_a_result_that_comes_again_has_the_same_outcome_and_counts_once(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2, 3])
    for _ in range(3):
        keeper.claim("a")
    assert [keeper.submit("a", 1, 1) for _ in range(3)] == ["accepted"] * 3
    keeper.wait(LEASE_S)
    assert [keeper.submit("a", 2, 1) for _ in range(3)] == ["late"] * 3
    keeper.issue(2, [2, 3])
    assert [keeper.submit("a", 2, 1) for _ in range(2)] == ["late"] * 2
    assert [keeper.submit("a", 3, 1) for _ in range(3)] == ["cancelled"] * 3
    assert outcomes(keeper, "a") == {"completed": 1, "late": 1, "cancelled": 1, "failed": 2}


def test_an_accepted_result_stays_accepted_after_the_version_it_made(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2], quorum=1)
    keeper.claim("a")
    assert keeper.submit("a", 1, 1) == "accepted"
    keeper.issue(2, [2], quorum=1)
    assert keeper.submit("a", 1, 1) == "accepted"
    assert outcomes(keeper, "a") == {"completed": 1}


def test_who_was_late_and_leases_the_unit_again_is_heard_again(keeper: Keeper) -> None:
    keeper.issue(1, [1])
    keeper.claim("a")
    keeper.wait(LEASE_S)
    assert keeper.submit("a", 1, 1) == "late"
    assert keeper.claim("a") == Claimed(1, 1, 2)
    assert keeper.submit("a", 1, 1) == "accepted"


# --- versions -------------------------------------------------------------------------------------------


def test_a_new_version_cancels_what_is_open_and_issues_it_again(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2, 3])
    keeper.claim("a")
    keeper.claim("b")
    assert keeper.submit("b", 2, 1) == "accepted"
    keeper.issue(2, [1, 3])
    assert not keeper.holds("a", 1)
    assert keeper.submit("a", 1, 1) == "cancelled"
    assert states(keeper) == {"completed": 1, "cancelled": 2, "pending": 2}
    assert [keeper.claim("a"), keeper.claim("a")] == [Claimed(1, 2, 1), Claimed(3, 2, 1)]
    assert outcomes(keeper, "a") == {"cancelled": 1}


def test_a_unit_that_is_issued_again_remembers_how_often_it_was_tried_in_vain(keeper: Keeper) -> None:
    """Else a unit that nobody can do is tried for ever, as long as versions come quickly."""
    for version in range(1, ATTEMPTS + 1):
        keeper.issue(version, [1, 2])
        assert keeper.claim("a") == Claimed(1, version, version)
        keeper.fail("a", 1)
    assert keeper.given_up() == {1: "broken"}
    keeper.issue(ATTEMPTS + 1, [2])
    assert keeper.claim("a") == Claimed(2, ATTEMPTS + 1, 1)


def test_a_lease_of_an_older_version_is_not_renewed_back_to_life(keeper: Keeper) -> None:
    keeper.issue(1, [1])
    keeper.claim("a")
    keeper.issue(2, [1])
    keeper.renew("a")
    assert keeper.submit("a", 1, 1) == "cancelled"
    assert keeper.claim("b") == Claimed(1, 2, 1)


# --- results of older versions ----------------------------------------------------------------------------


def test_a_leased_unit_stays_leased_when_its_version_closes_and_is_not_issued_again(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2, 3], most_lag=2)
    keeper.claim("a")
    keeper.issue(2, [1, 2, 3], most_lag=2)
    assert states(keeper) == {"claimed": 1, "cancelled": 2, "pending": 2}
    assert keeper.holds("a", 1)
    assert [keeper.claim("b"), keeper.claim("b"), keeper.claim("b")] == [Claimed(2, 2, 1), Claimed(3, 2, 1), None]
    keeper.issue(3, [1, 2, 3], most_lag=2)
    assert [keeper.submit("a", 1, 1) for _ in range(2)] == ["accepted"] * 2
    assert outcomes(keeper, "a") == {"completed": 1}
    keeper.issue(4, [2, 3], most_lag=2)
    assert keeper.submit("a", 1, 1) == "accepted", "the same result, whose outcome is known"
    assert states(keeper) == {"claimed": 2, "cancelled": 2, "completed": 1}


def test_a_lease_that_lags_too_much_is_cancelled_and_its_unit_issued_again(keeper: Keeper) -> None:
    for version in range(1, 5):
        assert keeper.counts()["cancelled"] == 0
        keeper.issue(version, [1], most_lag=2)
        if version == 1:
            keeper.claim("a")
    assert not keeper.holds("a", 1)
    assert keeper.claim("b") == Claimed(1, 4, 1)
    assert [keeper.submit("a", 1, 1), keeper.submit("b", 1, 4)] == ["cancelled", "accepted"]
    assert (outcomes(keeper, "a"), outcomes(keeper, "b")) == ({"cancelled": 1}, {"completed": 1})


def test_a_lease_of_an_older_version_is_renewed_and_ends_like_any_other(keeper: Keeper) -> None:
    keeper.issue(1, [1], most_lag=3)
    keeper.claim("a")
    keeper.issue(2, [1], most_lag=3)
    keeper.wait(0.7 * LEASE_S)
    keeper.renew("a")
    keeper.wait(0.7 * LEASE_S)
    assert keeper.holds("a", 1)
    keeper.wait(0.3 * LEASE_S)
    assert keeper.claim("b") == Claimed(1, 2, 2)
    assert [keeper.submit("a", 1, 1), keeper.submit("b", 1, 2)] == ["late", "accepted"]


def test_a_unit_of_an_older_version_that_comes_back_is_leased_for_the_newest(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2], most_lag=3)
    keeper.claim("a")
    keeper.claim("a")
    keeper.issue(2, [1, 2], most_lag=3)
    keeper.give_back("a", 1)
    keeper.fail("a", 2)
    assert [keeper.claim("b"), keeper.claim("b")] == [Claimed(1, 2, 1), Claimed(2, 2, 2)]
    keeper.issue(3, [1, 2], most_lag=3)
    assert [keeper.submit("b", unit, 2) for unit in (1, 2)] == ["accepted"] * 2


def test_a_lower_bound_ends_leases_and_a_higher_one_brings_none_back(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2], most_lag=5)
    keeper.claim("a")
    keeper.issue(2, [1, 2], most_lag=5)
    keeper.claim("b")
    keeper.issue(3, [1, 2], most_lag=1)
    assert [keeper.holds("a", 1), keeper.holds("b", 2)] == [False, True]
    keeper.issue(4, [1, 2], most_lag=5)
    assert [keeper.submit("a", 1, 1), keeper.submit("b", 2, 2)] == ["cancelled", "accepted"]
    assert keeper.claim("a") == Claimed(1, 4, 1)


def test_where_lag_is_allowed_a_result_beyond_the_quorum_counts_for_the_next_round(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2, 3, 4], quorum=1, most_lag=2)
    for worker in "abc":
        keeper.claim(worker)
    assert [keeper.submit("a", 1, 1), keeper.submit("b", 2, 1)] == ["accepted"] * 2
    assert keeper.holds("c", 3)
    assert keeper.claim("a") is None, "there are newer weights soon"
    keeper.issue(2, [3, 4], quorum=1, most_lag=2)
    assert keeper.claim("a") == Claimed(4, 2, 1)
    assert [keeper.submit("c", 3, 1), keeper.submit("a", 4, 2)] == ["accepted"] * 2
    assert states(keeper) == {"cancelled": 1, "completed": 4}


# --- the quorum -----------------------------------------------------------------------------------------


def test_a_round_takes_as_many_results_as_it_needs_and_gives_out_no_more_units(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2, 3, 4, 5], quorum=2)
    for worker in "abcd":
        keeper.claim(worker)
    assert [keeper.submit(worker, unit, 1) for worker, unit in (("a", 1), ("b", 2), ("c", 3))] == ["accepted", "accepted", "late"]
    assert not keeper.holds("d", 4)
    assert keeper.claim("e") is None
    assert states(keeper) == {"completed": 2, "pending": 2, "claimed": 1}
    keeper.issue(2, [3, 4, 5], quorum=2)
    assert keeper.claim("e") == Claimed(3, 2, 1)  # to come late to a round that has enough is no attempt in vain


def test_a_round_that_needs_more_than_before_gives_out_units_again(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2], quorum=1)
    keeper.claim("a")
    keeper.submit("a", 1, 1)
    assert keeper.claim("a") is None
    keeper.issue(1, [], quorum=2)
    assert keeper.claim("a") == Claimed(2, 1, 1)
    assert keeper.submit("a", 2, 1) == "accepted"


def test_a_result_that_could_not_be_used_was_an_attempt_and_makes_room_for_one_other(keeper: Keeper) -> None:
    keeper.issue(1, [1, 2, 3], quorum=2)
    for worker in "abc":
        keeper.claim(worker)
    assert [keeper.submit("a", 1, 1), keeper.submit("b", 2, 1)] == ["accepted"] * 2
    keeper.issue(1, [2], quorum=2)
    assert keeper.holds("c", 3)
    assert keeper.claim("d") == Claimed(2, 1, 2)
    assert [keeper.submit("c", 3, 1), keeper.submit("d", 2, 1)] == ["accepted", "late"]
    assert states(keeper) == {"completed": 2, "pending": 1}


def test_a_unit_whose_results_can_never_be_used_is_given_up(keeper: Keeper) -> None:
    keeper.issue(1, [1], quorum=2)
    for attempt in range(1, ATTEMPTS + 1):
        assert keeper.claim("a") == Claimed(1, 1, attempt)
        assert keeper.submit("a", 1, 1) == "accepted"
        keeper.issue(1, [1], quorum=2)
    assert keeper.given_up() == {1: RESULT_WAS_UNUSABLE}
    assert states(keeper) == {"failed": 1}


@pytest.mark.parametrize(("most_lag", "gap_s", "waits"), [(2, 20.0, True), (0, 60.0, True), (2, 40.0, False)])
def test_a_worker_waits_for_newer_weights_that_are_near(keeper: Keeper, most_lag: int, gap_s: float, waits: bool) -> None:
    """Two workers that need 100 s for a unit, and two results a version: the second worker finishes `gap_s` after the first one."""
    keeper.issue(1, [1, 2], 2, most_lag)
    keeper.claim("a")
    keeper.compute(gap_s)
    keeper.claim("b")
    keeper.compute(100 - gap_s)
    assert keeper.submit("a", 1, 1) == "accepted"
    assert keeper.claim("c") is None, "no unit is left"
    keeper.compute(gap_s)
    assert keeper.submit("b", 2, 1) == "accepted"
    keeper.issue(2, [3, 4, 5, 6], 2, most_lag)
    keeper.claim("a")
    keeper.compute(gap_s)
    keeper.claim("b")
    keeper.compute(100 - gap_s)
    assert keeper.submit("a", 3, 2) == "accepted"
    assert keeper.claim("a") == (None if waits else Claimed(5, 2, 1)), "the result that is missing is expected in gap_s"
    if not waits:
        return
    assert keeper.claim("c") == Claimed(5, 2, 1), "it has delivered nothing that a newer version would improve on"
    keeper.compute(151 - 100 + gap_s)
    assert keeper.claim("a") == Claimed(6, 2, 1), "the result that was expected is overdue"


# --- any schedule ---------------------------------------------------------------------------------------

WORKERS = st.sampled_from("abc")
PLACES = st.integers(0, 5)
STEPS = st.one_of(
    st.tuples(st.just("claim"), WORKERS),
    st.tuples(st.just("claim"), WORKERS),
    st.tuples(st.just("submit"), PLACES),
    st.tuples(st.just("submit"), PLACES),
    st.tuples(st.just("fail"), PLACES),
    st.tuples(st.just("give back"), PLACES),
    st.tuples(st.just("renew"), WORKERS),
    st.tuples(st.just("leave"), WORKERS),
    st.tuples(st.just("wait"), st.sampled_from([0.3, 0.7, 1.0])),
    st.tuples(st.just("next version"), st.sampled_from([None, 1, 2, 3])),
    st.tuples(st.just("most lag"), st.integers(0, 3)),
    st.tuples(st.just("spoil"), PLACES),
)
CROWDS_STEPS = st.one_of(
    st.tuples(st.just("claim and fail"), WORKERS),
    st.tuples(st.just("claim and fail"), WORKERS),
    st.tuples(st.just("manage another"), WORKERS),
    STEPS,
)


class Schedule:
    """Does the same things at two keepers, and compares every answer."""

    def __init__(self, keepers: tuple[PureKeeper, PostgresKeeper], units: int, quorum: int | None) -> None:
        self.keepers, self.open, self.quorum = keepers, set(range(units)), quorum
        self.version, self.most_lag = 1, 0
        self.claimed: list[tuple[str, int, int]] = []
        """Everything that was ever leased, the latest last: workers may hand in what is long gone."""
        self.done: set[int] = set()
        """Accepted for this version."""
        self._issue()

    def _issue(self) -> None:
        for keeper in self.keepers:
            keeper.issue(self.version, sorted(self.open), self.quorum, self.most_lag)

    def take(self, step: tuple[str, object]) -> None:
        what, argument = step
        if what in ("submit", "fail", "give back"):
            assert isinstance(argument, int)
            if self.claimed:
                self._end(what, *self.claimed[-1 - argument % len(self.claimed)])
        elif what == "claim":
            self._claim(str(argument))
        elif what == "claim and fail":
            if (unit := self._claim(str(argument))) is not None:
                self._end("fail", str(argument), unit, self.version)
        elif what == "manage another":
            self._manage(str(argument))
        elif what == "wait":
            assert isinstance(argument, float)
            for keeper in self.keepers:
                keeper.wait(argument * LEASE_S)
        elif what == "next version":
            self.open -= self.done | set(self.keepers[0].given_up())
            self.version, self.quorum, self.done = self.version + 1, argument if isinstance(argument, int) else None, set()
            self._issue()
        elif what == "most lag":
            assert isinstance(argument, int)
            self.most_lag = argument
        elif what == "spoil":
            self._spoil(argument)
        else:
            for keeper in self.keepers:
                getattr(keeper, what)(argument)

    def _claim(self, worker: str) -> int | None:
        pure, board = (keeper.claim(worker) for keeper in self.keepers)
        assert pure == board
        if pure is None:
            return None
        self.claimed = [key for key in self.claimed if key != (worker, pure.unit, pure.version)]
        self.claimed.append((worker, pure.unit, pure.version))
        return pure.unit

    def _manage(self, worker: str) -> None:
        """The worker does a unit that is the first on offer, and its result is used."""
        another = 100 + self.version
        self.open -= self.done | set(self.keepers[0].given_up())
        self.version, self.done = self.version + 1, set()
        for keeper in self.keepers:
            keeper.issue(self.version, [another, *sorted(self.open)], None, self.most_lag)
        assert self._claim(worker) == another
        self._end("submit", worker, another, self.version)
        self.take(("next version", self.quorum))

    def _end(self, what: str, worker: str, unit: int, version: int) -> None:
        if what == "submit":
            pure, board = (keeper.submit(worker, unit, version) for keeper in self.keepers)
            assert pure == board
            if pure == "accepted" and unit in self.open:
                self.done.add(unit)
        else:
            for keeper in self.keepers:
                keeper.fail(worker, unit) if what == "fail" else keeper.give_back(worker, unit)

    def _spoil(self, place: object) -> None:
        assert isinstance(place, int)
        if self.done:
            unit = sorted(self.done)[place % len(self.done)]
            self.done.remove(unit)
            for keeper in self.keepers:
                keeper.issue(self.version, [unit], self.quorum, self.most_lag)

    def compare(self) -> None:
        pure, board = self.keepers
        assert pure.counts() == board.counts()
        assert pure.given_up() == board.given_up()
        assert [pure.outcomes(worker) for worker in "abc"] == [board.outcomes(worker) for worker in "abc"]
        for worker, unit, _ in self.claimed:
            assert pure.holds(worker, unit) == board.holds(worker, unit)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(units=st.integers(1, 4), quorum=st.sampled_from([None, 1, 2]), steps=st.lists(STEPS, min_size=10, max_size=40))
def test_the_module_and_the_database_do_the_same_under_any_schedule(
    board: PostgresKeeper, units: int, quorum: int | None, steps: list[tuple[str, object]]
) -> None:
    board.forget()
    schedule = Schedule((PureKeeper(), board), units, quorum)
    for step in steps:
        schedule.take(step)
    schedule.compare()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(units=st.integers(1, 4), quorum=st.sampled_from([None, 1, 2]), steps=st.lists(CROWDS_STEPS, min_size=10, max_size=40))
def test_they_do_the_same_where_each_worker_is_somebody_else(
    students: StudentsKeeper, units: int, quorum: int | None, steps: list[tuple[str, object]]
) -> None:
    students.forget()
    schedule = Schedule((PureKeeper(*"abc"), students), units, quorum)
    for step in steps:
        schedule.take(step)
    schedule.compare()
