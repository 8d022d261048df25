"""When the weights move, and who is too late: each strategy's promises, on a clock that the test turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.config.schema.strategy import Async, Edp, SyncPs
from shoal.config.schema.updates import Krum, Median, TrimmedMean, Updates
from shoal.coordinator import Barrier, Every
from shoal.strategies import Policies
from tests.support.small_cluster import RATE, Cluster, FakeWorker, strategy_of


def syncps(window: int = 1, pull_every: int = 1) -> Policies:
    return strategy_of(SyncPs(round_timeout_s=10.0, window=window, pull_every_steps=pull_every))


def cluster_of(policy: Policies, names: str, **settings: object) -> tuple[Cluster, list[FakeWorker]]:
    cluster = Cluster(policy, len(names), **settings)  # type: ignore[arg-type]
    return cluster, [cluster.join(name) for name in names]


# --- syncps ---------------------------------------------------------------------------------------------


def test_a_round_closes_when_everybody_has_sent() -> None:
    cluster, (a, b, c) = cluster_of(syncps(), "abc")
    first, second = cluster.contribute(a, 1.0), cluster.contribute(b, 2.0)
    assert cluster.coordinator.state.version == 0
    assert cluster.status(first) is None, "who has sent waits for the others"
    third = cluster.contribute(c, 6.0)
    assert cluster.coordinator.state.version == 1
    assert [cluster.status(call) for call in (first, second, third)] == ["accepted"] * 3
    assert torch.equal(cluster.learner.vector, torch.full((4,), -RATE * 3.0)), "the mean of all three"


def test_at_the_deadline_a_round_closes_without_the_late_who_stay() -> None:
    cluster, (a, b) = cluster_of(syncps(), "ab")
    cluster.contribute(a)
    cluster.beat(b)
    cluster.pass_time(9.9)
    assert cluster.coordinator.state.version == 0
    cluster.pass_time(0.1)
    assert cluster.coordinator.state.version == 1
    assert cluster.step(b) == "late"
    assert b.version == 1, "the answer brought it up to date"
    b_call = cluster.contribute(b)
    a.version = a.round = 1
    cluster.contribute(a)
    assert cluster.status(b_call) == "accepted"
    assert cluster.coordinator.state.version == 2
    assert cluster.coordinator.state.contributions == {"accepted": 3, "late": 1}


def test_a_worker_that_dies_delays_its_round_by_the_deadline_at_most() -> None:
    cluster, (a, b) = cluster_of(syncps(), "ab", heartbeat_s=1.0)
    cluster.contribute(a)
    waited = 0.0
    while cluster.coordinator.state.version == 0:
        cluster.beat(a)
        cluster.pass_time(0.5)
        waited += 0.5
    assert waited <= 4.0, "b was silent for three heartbeats: nobody waits for it any more"
    assert [line["from"][0][0] for line in cluster.ledger] == ["a"]
    assert b.name not in cluster.coordinator.members.by_name


def test_nobody_is_held_back_for_long_without_a_word() -> None:
    cluster, (a, b) = cluster_of(strategy_of(SyncPs(round_timeout_s=1000.0)), "ab")
    call = cluster.contribute(a)
    cluster.beat(b)
    cluster.pass_time(5.0)
    assert cluster.status(call) == "wait"
    again = cluster.contribute(a, again=True, frames=())
    assert cluster.status(again) is None
    cluster.contribute(b)
    assert cluster.status(again) == "accepted"
    assert cluster.coordinator.state.contributions == {"accepted": 2}


def test_a_window_lets_the_fast_go_ahead() -> None:
    cluster, (a, b) = cluster_of(syncps(window=2), "ab")
    assert cluster.status(cluster.contribute(a)) == "accepted"
    ahead = cluster.contribute(a)
    assert cluster.status(ahead) is None, "two rounds are open: no further"
    assert cluster.status(cluster.contribute(a)) == "ahead"
    cluster.contribute(b)
    assert cluster.coordinator.state.version == 1
    assert cluster.status(ahead) == "accepted"
    cluster.contribute(b)
    assert cluster.coordinator.state.version == 2


def test_the_deadline_of_the_next_round_begins_when_it_is_its_turn() -> None:
    cluster, (a, b) = cluster_of(syncps(window=2), "ab")
    for _ in range(2):
        cluster.contribute(a)
    cluster.now += 9.0
    cluster.contribute(b)
    assert cluster.coordinator.state.version == 1
    for seconds in (4.0, 4.0, 1.9):
        cluster.beat(b)
        cluster.pass_time(seconds)
    assert cluster.coordinator.state.version == 1
    cluster.pass_time(0.2)
    assert cluster.coordinator.state.version == 2


def test_the_first_round_waits_for_those_who_are_expected() -> None:
    cluster = Cluster(syncps(), 2)
    a = cluster.join("a")
    call = cluster.contribute(a)
    assert cluster.status(call) is None, "a round with one of two would be no round of the run's"
    b = cluster.join("b")
    cluster.contribute(b)
    assert cluster.status(call) == "accepted"
    assert len(cluster.ledger[0]["from"]) == 2


def test_a_first_round_that_waits_for_expected_workers_says_so_once() -> None:
    cluster = Cluster(syncps(), 2)
    cluster.contribute(cluster.join("a"))
    for _ in range(4):
        cluster.pass_time(3.0)
    assert [note for note in cluster.notes if "waits" in note] == ["the round waits up to 30 s for 1 more worker"]


def test_a_worker_that_leaves_is_not_waited_for() -> None:
    cluster, (a, b) = cluster_of(syncps(), "ab")
    call = cluster.contribute(a)
    cluster.leave(b)
    assert cluster.status(call) == "accepted"


def test_one_who_joined_but_has_no_weights_yet_is_not_waited_for() -> None:
    cluster, (a,) = cluster_of(syncps(), "a")
    cluster.join("slow", pull=False)
    assert cluster.status(cluster.contribute(a)) == "accepted"


# --- edp ------------------------------------------------------------------------------------------------


def test_edp_scales_by_the_versions_that_the_worker_does_not_know() -> None:
    cluster, (a, b) = cluster_of(strategy_of(Edp(pull_every_steps=100)), "ab")
    assert cluster.status(cluster.contribute(a, 1.0)) == "accepted"
    cluster.contribute(b, 1.0)  # one version behind: a's
    cluster.contribute(b, 1.0)  # its own version does not count, it has stepped its own weights
    cluster.contribute(a, 1.0)  # b's two
    shares = [line["from"][0][3] for line in cluster.ledger]
    assert shares == [1.0, 1 / 2, 1 / 2, 1 / 3]
    expected = torch.zeros(4)
    for share in shares:
        expected -= RATE * (torch.ones(4) * share)
    assert torch.equal(cluster.learner.vector, expected)


def test_own_versions_are_remembered_no_longer_than_they_matter() -> None:
    cluster, (a, b) = cluster_of(strategy_of(Edp(pull_every_steps=5)), "ab")
    for number in range(300):
        cluster.contribute(a, base=number // 5 * 5, have=-1)
        if number % 50 == 0:
            cluster.contribute(b, base=0, have=-1)
    assert len(cluster.coordinator.state.made["a"]) <= 12
    for _ in range(400):
        cluster.contribute(b, base=0, have=-1)
    assert len(cluster.coordinator.state.made["b"]) <= 256, "whoever never pulls fills no memory"


def test_edp_that_pulls_seldom_still_knows_its_own_work() -> None:
    cluster, (a,) = cluster_of(strategy_of(Edp(pull_every_steps=1000)), "a")
    for _ in range(600):
        cluster.contribute(a, base=0, have=-1)
    assert {line["from"][0][3] for line in cluster.ledger} == {1.0}


# --- async ----------------------------------------------------------------------------------------------


def test_a_contribution_is_rejected_exactly_beyond_the_bound() -> None:
    cluster, (a, b) = cluster_of(strategy_of(Async(max_staleness=3, adaptive=False)), "ab")
    for _ in range(3):
        cluster.step(a)
    assert cluster.status(cluster.contribute(b, base=0)) == "accepted", "three versions behind is within the bound"
    assert cluster.status(cluster.contribute(b, base=0)) == "stale"
    assert cluster.coordinator.state.contributions == {"accepted": 4, "stale": 1}


@pytest.mark.parametrize(
    ("interval_s", "bound"),
    [(1.0, 10.0), (2.0, 15.0), (0.5, 7.5)],  # speed against the median of the two: 1, 2/3, 4/3
)
def test_the_adaptive_bound_follows_the_speed(interval_s: float, bound: float) -> None:
    cluster, (a, b) = cluster_of(strategy_of(Async(max_staleness=10, min_staleness=2, max_staleness_multiplier=4.0)), "ab")
    start = cluster.now
    for number in range(6):
        cluster.now = start + number
        cluster.step(a)
    for number in range(6):
        cluster.now = start + 5 + number * interval_s
        cluster.step(b)
    rate, other = 1 / interval_s, 1.0
    speed = rate / ((rate + other) / 2)
    assert cluster.pull(b)["most_lag"] == pytest.approx(min(max(10 / speed, 2), 40))
    assert cluster.pull(b)["most_lag"] == pytest.approx(bound)


def test_many_equal_workers_are_never_rejected() -> None:
    cluster, workers = cluster_of(strategy_of(Async(max_staleness=16)), "abcdefgh")
    for turn in range(30):
        for index, worker in enumerate(workers):
            cluster.now = 1000.0 + turn + index / 8
            assert cluster.step(worker) == "accepted"
    assert cluster.coordinator.state.contributions == {"accepted": 240}


def test_every_k_contributions_make_an_update_whoever_sent_them() -> None:
    cluster, (a, b, _) = cluster_of(strategy_of(Async(contributions_per_update=3)), "abc")
    cluster.step(a, 1.0)
    cluster.step(a, 3.0)
    assert cluster.coordinator.state.version == 0
    cluster.step(b, 5.0)
    assert cluster.coordinator.state.version == 1
    assert [[one[:2] for one in line["from"]] for line in cluster.ledger] == [[["a", 0], ["a", 1], ["b", 0]]], "nothing is thrown away"
    assert torch.allclose(cluster.learner.vector, torch.full((4,), -RATE * 3.0)), "all of them count"
    assert cluster.coordinator.state.contributions == {"accepted": 3}
    for value in (1.0, 2.0, 3.0):
        assert cluster.step(b, value) == "accepted"
    assert cluster.coordinator.state.version == 2, "one worker alone makes an update, too"


def comparing(count: int, rule: Updates) -> Policies:
    return replace(strategy_of(Async()), rounds=Every(count, different=rule.compares))


def test_a_rule_that_compares_sees_one_row_of_each_worker() -> None:
    updates = Updates(aggregation=Median())
    cluster, (a, b, c) = cluster_of(comparing(3, updates), "abc", updates=updates)
    for value in (1.0, 2.0, 6.0):
        cluster.step(a, value)
    cluster.step(b, 4.0)
    assert cluster.coordinator.state.version == 0, "it waits for three different workers"
    cluster.step(c, 9.0)
    assert torch.allclose(cluster.learner.vector, torch.full((4,), -RATE * 4.0)), "the median of 3, 4 and 9, not of 1, 2, 4, 6 and 9"
    assert [one[:2] for one in cluster.ledger[0]["from"]] == [["a", 0], ["a", 1], ["a", 2], ["b", 0], ["c", 0]]


def test_several_contributions_of_a_worker_in_a_round_weigh_by_their_samples() -> None:
    updates = Updates(aggregation=Median())
    cluster, (a, b, c) = cluster_of(comparing(3, updates), "abc", updates=updates)
    cluster.step(a, 1.0, weight=1.0)
    cluster.step(a, 5.0, weight=3.0)
    cluster.step(b, 0.0)
    cluster.step(c, 9.0)
    assert torch.allclose(cluster.learner.vector, torch.full((4,), -RATE * 4.0))


def test_contributions_of_one_worker_in_an_open_round_survive_a_crash() -> None:
    updates = Updates(aggregation=Median())
    cluster, (a, b, c) = cluster_of(comparing(3, updates), "abc", updates=updates)
    for value in (1.0, 2.0, 6.0):
        cluster.step(a, value)
    cluster.step(b, 4.0)
    again = cluster.recovered()
    assert [record for record, _ in again.coordinator.replayed.pending()] == [
        record for record, _ in cluster.coordinator.replayed.pending()
    ]
    cluster.step(c, 9.0)
    after = cluster.recovered()
    assert torch.equal(after.learner.vector, cluster.learner.vector)
    assert after.ledger == cluster.ledger


def test_a_worker_that_others_keep_waiting_sends_four_at_most() -> None:
    updates = krum("wait")
    cluster, (a, b) = cluster_of(comparing(3, updates), "ab", updates=updates, needed=3)
    assert [cluster.step(a) for _ in range(3)] == ["accepted"] * 3
    call = cluster.contribute(a)
    assert cluster.status(call) is None, "it was taken, and the answer waits"
    cluster.pass_time(6.0)
    assert cluster.status(call) == "wait"
    cluster.hear(a, call)
    again = cluster.say(a)
    assert cluster.status(again) is None
    cluster.step(b)
    cluster.step(cluster.join("c"))
    assert cluster.coordinator.state.version == 1
    assert cluster.status(again) == "accepted"
    assert [one[0] for one in cluster.ledger[0]["from"]] == ["a"] * 4 + ["b", "c"]


def test_coming_back_again_and_again_does_not_fill_a_round() -> None:
    updates = krum("wait")
    cluster, _ = cluster_of(comparing(3, updates), "ab", updates=updates, needed=3)
    outcomes = [cluster.step(cluster.join("a")) for _ in range(6)]
    assert outcomes == ["accepted"] * 3 + [None] + ["ahead"] * 2
    assert len(cluster.coordinator.replayed.pending()) == 4


def krum(below: str) -> Updates:
    return Updates(aggregation=Krum(byzantine=0), below_quorum=below)  # type: ignore[arg-type]


def plain(rounds: Every) -> Policies:
    """A strategy of which only the rounds matter."""
    return Policies(rounds=rounds, length=lambda extent: pytest.fail("nobody asks"))


def every(count: int) -> Policies:
    return plain(Every(count))


def test_below_the_quorum_it_waits_and_says_so() -> None:
    cluster, (a, b) = cluster_of(every(3), "ab", updates=krum("wait"), needed=3)
    for _ in range(4):
        cluster.step(a)
        cluster.step(b)
        cluster.pass_time(3.0)
    assert cluster.coordinator.state.version == 0, "it never makes do with a lesser rule"
    assert [note for note in cluster.notes if "waiting" in note] == [
        "krum needs 3 contributions and 2 workers are here: waiting for 1 more"
    ]
    c = cluster.join("c")
    cluster.step(c)
    assert cluster.coordinator.state.version == 1


def test_below_the_quorum_it_stops_where_that_is_asked_for() -> None:
    cluster, (a, b, c) = cluster_of(every(3), "abc", updates=krum("stop"), needed=3)
    for worker in (a, b, c):
        cluster.step(worker)
    assert cluster.coordinator.state.version == 1
    cluster.leave(c)
    for _ in range(8):
        cluster.beat(a)
        cluster.beat(b)
        cluster.pass_time(2.0)
    assert cluster.coordinator.finished
    assert "krum needs 3 contributions and 2 workers are here" in cluster.coordinator.completion.stopped
    assert cluster.step(a) == "finished"


def test_a_coordinator_that_comes_back_gives_its_workers_the_time_to_do_so_too() -> None:
    before, workers = cluster_of(every(3), "abc", updates=krum("stop"), needed=3)
    for worker in workers:
        before.step(worker)
    cluster = before.recovered()
    cluster.pass_time(0.1)
    for name in "abc":
        cluster.pass_time(3.0)
        cluster.join(name)
    assert not cluster.coordinator.finished


def test_a_rule_that_gives_no_protection_with_few_workers_warns_once() -> None:
    updates = Updates(aggregation=TrimmedMean())
    cluster, (a, b) = cluster_of(comparing(3, updates), "ab", updates=updates)
    for _ in range(3):
        cluster.step(a)
        cluster.step(b)
    weak = "warning: with contributions of 2 workers, trimmed-mean gives no protection: it needs 3; this is a mean"
    assert cluster.coordinator.state.version == 3
    assert [note for note in cluster.notes if "gives no protection" in note] == [weak]
    c = cluster.join("c")
    for worker in (a, b, c):
        cluster.step(worker)
    cluster.leave(c)
    cluster.step(a)
    cluster.step(b)
    assert [note for note in cluster.notes if "gives no protection" in note] == [weak, weak], "and again, when one has left"


def test_a_barrier_with_a_rule_waits_beyond_its_deadline() -> None:
    cluster, (a, b, c) = cluster_of(plain(Barrier(deadline_s=1.0)), "abc", updates=krum("wait"), needed=3)
    cluster.contribute(a)
    cluster.contribute(b)
    cluster.pass_time(2.0)
    assert cluster.coordinator.state.version == 0
    cluster.contribute(c)
    assert cluster.coordinator.state.version == 1
