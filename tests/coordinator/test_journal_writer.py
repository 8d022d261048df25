"""Records that are written beside the work: what follows them waits, and nothing overtakes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from shoal.coordinator.durable.journal_writer import LEAST_THREAD_BYTES, JournalWriter
from shoal.coordinator.effects import Effect, LedgerEntry, Persist, Reply
from shoal.errors import ShoalError
from tests.support.processes import HANG_S

LARGE = bytes(LEAST_THREAD_BYTES)


class Desk:
    """A journal that writes when it is let, and everything that was done, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.may_write, self.wrote = threading.Event(), threading.Semaphore(0)
        self.problem: Exception | None = None
        self.writer = JournalWriter(self.append, self.carry_out, self.wrote.release)

    def append(self, records: Sequence[Persist]) -> None:
        if any(len(record.frames) for record in records) and not self.may_write.wait(HANG_S):
            raise TimeoutError
        if self.problem is not None:
            raise self.problem
        self.done.append("wrote " + " and ".join(str(record.record["n"]) for record in records))

    def carry_out(self, effect: Effect) -> None:
        self.done.append(f"answered {effect.caller}" if isinstance(effect, Reply) else "entered")


def event(number: int, frames: tuple[bytes, ...] = (LARGE,)) -> list[Effect]:
    return [Persist({"n": number}, frames), LedgerEntry({}), Reply(number, {})]


def test_small_records_are_written_at_once() -> None:
    desk = Desk()
    desk.writer.take(event(1, ()))
    assert desk.done == ["wrote 1", "entered", "answered 1"]


def test_small_records_of_one_event_are_written_together_and_before_the_answer() -> None:
    desk = Desk()
    desk.writer.take([*event(1, ())[:1], *event(2, ())])
    assert desk.done == ["wrote 1 and 2", "entered", "answered 2"]


def test_an_answer_waits_until_its_record_is_written() -> None:
    desk = Desk()
    desk.writer.take(event(1))
    desk.writer.resume()
    assert desk.done == []
    desk.may_write.set()
    assert desk.wrote.acquire(timeout=HANG_S)
    desk.writer.resume()
    assert desk.done == ["wrote 1", "entered", "answered 1"]
    desk.writer.close()


def test_nothing_overtakes_a_record_that_is_being_written() -> None:
    desk = Desk()
    desk.writer.take(event(1))
    desk.writer.take(event(2, ()))
    desk.writer.take([Reply(3, {})])
    assert desk.done == []
    desk.may_write.set()
    desk.writer.drain()
    answers = [line for line in desk.done if line.startswith("answered")]
    assert answers == ["answered 1", "answered 2", "answered 3"]
    assert desk.done.index("wrote 2") < desk.done.index("answered 2")
    desk.writer.close()


def test_a_record_that_cannot_be_written_is_never_answered() -> None:
    desk = Desk()
    desk.problem = ShoalError("the disk is full")
    desk.writer.take(event(1))
    desk.writer.take(event(2))
    desk.may_write.set()
    with pytest.raises(ShoalError, match="disk is full"):
        desk.writer.drain()
    desk.writer.drain()
    assert desk.done == []
    desk.writer.close()


def test_records_do_not_pile_up_without_end() -> None:
    desk = Desk()
    desk.may_write.set()
    for number in range(100):
        desk.writer.take(event(number))
        assert desk.writer._ahead <= 16
    desk.writer.close()
    assert desk.done.count("entered") >= 80


def test_what_was_handed_over_is_written_before_the_end() -> None:
    desk = Desk()
    desk.writer.take(event(1))
    desk.may_write.set()
    desk.writer.close()
    assert desk.done[0] == "wrote 1"
