"""What enters the weights exactly once, what does not enter, and what strangers with a token cannot do."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.config.schema.strategy import Async, Edp, SyncPs
from shoal.coordinator.durable.journal import FileJournal
from shoal.coordinator.events import Interrupted, RunConcluded
from shoal.coordinator.members.table import MOST_NAMES
from shoal.protocol.messages import PROTOCOL, BadMessage, Join, parse
from tests.support.small_cluster import RATE, Cluster, FakeWorker, Numbers, encoded, strategy_of

ASYNC = strategy_of(Async(max_staleness=50))
SYNC = strategy_of(SyncPs(round_timeout_s=10.0))


def alone(policy: object = ASYNC) -> tuple[Cluster, FakeWorker]:
    cluster = Cluster(policy)  # type: ignore[arg-type]
    return cluster, cluster.join("a")


def test_a_repeat_is_confirmed_and_not_counted() -> None:
    cluster, a = alone()
    cluster.contribute(a)
    answer = cluster.answers[cluster.contribute(a, again=True)]
    assert (answer["status"], answer["repeated"]) == ("accepted", True)
    assert cluster.coordinator.state.version == 1
    assert cluster.coordinator.state.contributions == {"accepted": 1}


def test_a_worker_that_has_contributed_is_not_shown_as_joining() -> None:
    cluster, a = alone()
    shown = cluster.coordinator.members.by_name["a"]
    assert shown.state == "joining"
    cluster.contribute(a)
    assert shown.state == "computing"


def test_a_message_that_was_seen_before_is_not_taken_again() -> None:
    cluster, a = alone()
    cluster.contribute(a)
    assert cluster.status(cluster.contribute(a, number=2)) == "replayed"
    assert cluster.coordinator.state.version == 1


def test_a_worker_without_weights_cannot_contribute() -> None:
    cluster = Cluster(ASYNC)
    a = cluster.join("a", pull=False)
    assert cluster.status(cluster.contribute(a)) == "impossible"
    cluster.pull(a)
    assert cluster.status(cluster.contribute(a, base=7)) == "impossible", "nobody has weights of a version to come"
    assert cluster.coordinator.state.version == 0


def test_the_mean_of_a_round_is_computed_where_the_optimizer_reads_it() -> None:
    plain, placed = Numbers(), Numbers()
    placed.gradient_buffer = torch.empty(4)
    for learner in (plain, placed):
        cluster = Cluster(SYNC, 2, learner=learner)
        a, b = cluster.join("a"), cluster.join("b")
        for value in (2.0, 3.0):
            calls = cluster.contribute(a, value), cluster.contribute(b, 3 * value)
            for worker, call in zip((a, b), calls, strict=True):
                cluster.hear(worker, call)
        assert cluster.coordinator.state.version == 2
    assert torch.equal(placed.vector, plain.vector)
    assert torch.equal(placed.gradient_buffer, torch.full((4,), 6.0))


def test_who_comes_back_under_its_name_is_the_same_worker() -> None:
    cluster, a = alone()
    for _ in range(3):
        cluster.step(a)
    again = cluster.join("a")
    assert (again.seq, again.seat, again.position) == (3, a.seat, 3)
    assert cluster.status(cluster.contribute(a)) == "unknown-session", "its old session has ended"
    assert cluster.step(again) == "accepted"
    assert [line["from"][0][1] for line in cluster.ledger] == [0, 1, 2, 3]


def test_the_answer_that_an_old_session_waits_for_is_given_up() -> None:
    cluster = Cluster(SYNC, 2)
    a, _ = cluster.join("a"), cluster.join("b")
    call = cluster.contribute(a)
    cluster.join("a")
    assert cluster.status(call) == "unknown-session"
    assert not cluster.coordinator.replies.held


def test_a_contribution_of_an_open_round_is_confirmed_to_one_who_joined_again() -> None:
    """As after a crash of the coordinator: the worker asks for its old contribution, without sending it again."""
    before = Cluster(SYNC, 2)
    a, b = before.join("a"), before.join("b")
    before.contribute(a, 2.0)
    cluster = before.recovered()
    b2 = cluster.join("b")
    assert cluster.hear(a, cluster.say(a))["reason"] == "unknown-session"
    assert [cluster.hear(a, cluster.say(a))["kind"] for _ in range(2)] == ["challenge", "welcome"]
    call = cluster.say(a)
    assert a.protocol.pending is not None
    assert not a.protocol.pending.frames
    assert cluster.status(call) is None, "it waits for its round, as before the crash"
    cluster.contribute(b2, 4.0)
    assert cluster.status(call) == "accepted"
    assert torch.equal(cluster.learner.vector, torch.full((4,), -RATE * 3.0))
    assert b.name == b2.name


def test_a_recovered_round_has_its_whole_deadline_again() -> None:
    before = Cluster(SYNC, 2)
    a, b = before.join("a"), before.join("b")
    before.contribute(a)
    before.contribute(b)
    before.contribute(a)
    cluster = before.recovered()
    cluster.pass_time(0.1)
    cluster.pass_time(9.0)
    assert cluster.coordinator.state.version == 1, "the others need time to come back"
    cluster.pass_time(1.1)
    assert cluster.coordinator.state.version == 2


def test_the_first_round_waits_longer_for_all_to_start() -> None:
    cluster = Cluster(SYNC, 2)
    cluster.contribute(cluster.join("a"))
    cluster.pass_time(20.0)
    assert cluster.coordinator.state.version == 0
    cluster.pass_time(10.1)
    assert cluster.coordinator.state.version == 1


def test_a_successor_takes_up_the_seat_where_it_was_left() -> None:
    cluster, a = alone()
    for _ in range(4):
        cluster.step(a)
    cluster.leave(a)
    b = cluster.join("b")
    assert (b.seat, b.epoch, b.position) == (a.seat, 0, 4)


def test_batches_that_a_successor_has_learned_from_are_not_taken_again() -> None:
    cluster, a = alone()
    cluster.step(a)
    cluster.pass_time(60.0)  # a is taken for dead
    b = cluster.join("b")
    cluster.step(b)
    cluster.leave(b)
    back = cluster.join("a")
    back.position = 1  # it still holds what it computed on batch 2, which b has learned from meanwhile
    assert back.seat == b.seat
    assert cluster.step(back) == "overtaken"
    assert cluster.step(back) == "accepted"


def test_numbers_of_the_past_are_not_confirmed() -> None:
    cluster, a = alone()
    for _ in range(3):
        cluster.step(a)
    assert cluster.status(cluster.contribute(a, seq=0)) == "overtaken", "whether it was taken then nobody knows"


def test_what_waits_when_the_run_is_over_is_named() -> None:
    cluster = Cluster(strategy_of(Async(contributions_per_update=2)), 2, steps=1)
    a, b = cluster.join("a"), cluster.join("b")
    cluster.step(a)
    cluster.step(b)
    assert cluster.coordinator.finished
    assert cluster.step(a) == "finished"
    other = Cluster(SYNC, 2)
    c, _ = other.join("c"), other.join("d")
    call = other.contribute(c)
    other.carry_out(other.coordinator.handle(Interrupted("enough"), other.now))
    assert other.status(call) == "finished"
    other.carry_out(other.coordinator.handle(RunConcluded(), other.now))
    assert [one[:2] for one in other.ledger[-1]["unused"]] == [["c", 0]]


def test_a_clock_that_jumps_back_stops_nothing() -> None:
    cluster = Cluster(SYNC, 2)
    a, b = cluster.join("a"), cluster.join("b")
    call = cluster.contribute(a)
    cluster.pass_time(-1e9)
    for _ in range(3):
        cluster.beat(b)
        cluster.beat(a)
        cluster.pass_time(4.0)
    assert cluster.coordinator.state.version == 1
    assert cluster.status(call) is not None


def test_a_clock_that_jumps_ahead_costs_a_joining() -> None:
    cluster = Cluster(SYNC, 1)
    a = cluster.join("a")
    cluster.step(a)
    cluster.pass_time(1e9)
    assert not cluster.coordinator.members.by_name
    assert cluster.status(cluster.contribute(a)) == "unknown-session"
    assert cluster.step(cluster.join("a")) == "accepted"


# --- strangers with a token -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [{"batches": 2**53}, {"batches": 10_000}, {"epoch": 2**53}, {"position": 2**53}, {"base": 2**53}],
    ids=lambda other: next(iter(other)) + str(next(iter(other.values()))),
)
def test_claims_that_cannot_be_true_are_refused(other: dict[str, int]) -> None:
    cluster, a = alone()
    assert cluster.status(cluster.contribute(a, **other)) == "impossible"
    state = cluster.coordinator.state
    assert state == type(state)(seats={"a": 0}, keys={"a": a.protocol.identity.key})


def test_an_impossible_sequence_number_is_refused_with_the_expected_one() -> None:
    cluster, a = alone()
    cluster.step(a)
    for other in ({"seq": 2**53}, {"seq": 66}, {"epoch": 2**30}, {"position": 2**30}, {"epoch": 67}, {"position": 80}):
        cluster.hear(a, cluster.contribute(a, **other))
        assert cluster.status(cluster.calls) == "misplaced", other
        for _ in ("asked to prove", "let in", "given weights"):
            cluster.hear(a, cluster.say(a))
        assert (a.seq, a.protocol.place) == (1, (0, 1))
        worker_goes_on(cluster, a)
    assert cluster.step(a) == "accepted"


def worker_goes_on(cluster: Cluster, worker: FakeWorker) -> None:
    worker.epoch, worker.position = worker.protocol.place


def test_frames_that_are_no_update_are_refused() -> None:
    cluster, a = alone()
    for frames in ((), (b"abc",), encoded(1.0), encoded(1.0, 2.0, math.nan, 4.0), (*encoded(1, 2, 3, 4), b"more")):
        assert cluster.status(cluster.contribute(a, frames=frames)) == "malformed"
    assert cluster.coordinator.state.version == 0
    assert not cluster.coordinator.rounds.open


def test_figures_that_are_not_finite_spoil_nobody_elses() -> None:
    cluster = Cluster(SYNC, 2)
    a, b = cluster.join("a"), cluster.join("b")
    cluster.contribute(a, metrics={"loss": math.nan, "own": math.inf})
    cluster.contribute(b, metrics={"loss": 2.0})
    assert cluster.published[0].metrics == {"loss": 2.0}


def test_what_a_worker_says_of_itself_does_not_steer_a_terminal() -> None:
    cluster = Cluster(ASYNC)
    cluster.ask_in(Join("a", PROTOCOL, {"host": "\x1b[2Jgone\n"}))
    assert cluster.notes == ["a joined (?[2Jgone?)"]


def test_ever_new_names_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.members.table.MOST_NAMES", 50)
    assert MOST_NAMES > 50
    cluster, a = alone()
    cluster.coordinator.members.most_sessions = 50
    for number in range(80):
        call = cluster.ask_in(Join(f"stranger-{number}", PROTOCOL, {}))
        if cluster.status(call) is None:
            cluster.carry_out(cluster.coordinator.handle(_leaving(cluster, call), cluster.now))
    assert len(cluster.coordinator.state.seats) == 50
    assert cluster.step(a) == "accepted", "those who are here go on"
    assert cluster.join("a").seq == 1, "and may come back"


def _leaving(cluster: Cluster, call: int) -> object:
    from shoal.coordinator.events import RequestReceived
    from shoal.protocol.messages import Leave

    cluster.calls += 1
    return RequestReceived(cluster.calls, Leave(cluster.answers[call]["session"], 0))


def test_too_many_sessions_are_refused_but_not_to_one_who_is_here() -> None:
    cluster, _ = alone()
    cluster.coordinator.members.most_sessions = 2
    cluster.join("b")
    assert cluster.status(cluster.ask_in(Join("c", PROTOCOL, {}))) == "full"
    assert cluster.join("a").name == "a"


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_another_protocol_is_refused_with_what_to_do(protocol: int) -> None:
    cluster = Cluster(ASYNC)
    answer = cluster.answers[cluster.ask(Join("a", protocol, {}, key="0" * 64))]
    assert answer["reason"] == "protocol"
    assert f"speaks version {protocol} of the protocol, and the coordinator's version {PROTOCOL}; install the same" in answer["detail"]


def test_records_and_ledger_lines_are_small(tmp_path: object) -> None:
    import json
    from pathlib import Path

    cluster, a = alone(strategy_of(Edp()))
    cluster.step(a)
    journal = FileJournal(Path(str(tmp_path)))
    journal.begin()
    for record, _ in cluster.records:
        journal.append(record)
    assert journal.bytes_since_snapshot < 500
    assert len(json.dumps(cluster.ledger[0])) < 120


def test_headers_are_checked_field_by_field() -> None:
    for header in ({}, {"kind": "contribute"}, {"kind": "pull", "session": "s", "number": 1, "have": "3"}, {"kind": ["join"]}):
        with pytest.raises(BadMessage):
            parse(header)
