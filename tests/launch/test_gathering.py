"""Who gets which place in a pipeline over machines, on a clock of the test's own."""

from __future__ import annotations

from shoal.launch.gathering import Gathering


def test_places_follow_the_list_and_nobody_begins_before_all_are_there() -> None:
    gathering = Gathering(2, ["mini2", "mini3"])
    assert gathering.ask("mini3", "b", 0, 0.0) is None
    assert not gathering.begin(0.5)
    assert gathering.ask("mini2", "a", 0, 1.0) is None
    assert gathering.begin(1.5)
    assert (gathering.ask("mini2", "a", 0, 2.0), gathering.ask("mini3", "b", 0, 2.0)) == (1, 2)
    assert gathering.size == 3


def test_a_machine_that_fell_silent_while_it_waited_gets_no_place() -> None:
    gathering = Gathering(2, [])
    gathering.ask("first", "a", 0, 0.0)
    gathering.ask("second", "b", 0, 20.0)
    assert not gathering.begin(20.5)
    gathering.ask("third", "c", 0, 21.0)
    assert gathering.begin(21.5)
    assert set(gathering.places) == {"b", "c"}


def test_after_a_loss_all_who_come_back_begin_at_once_and_fewer_after_a_while() -> None:
    gathering = Gathering(2, [])
    for number in (1, 2):
        now = 100.0 * number
        assert gathering.ask("one", "a", number - 1, now) is None
        assert gathering.ask("two", "b", number - 1, now) is None
        assert gathering.begin(now), "at once, where all are there"
        assert gathering.ask("one", "a", number, now + 1) is None, "its process of this start has ended: it waits for the next"
        gathering.lost(now + 2)
    gathering.ask("two", "b", 2, 203.0)
    assert not gathering.begin(204.0), "the other one may come back"
    gathering.ask("two", "b", 2, 240.0)
    assert gathering.begin(240.0)
    assert (gathering.size, gathering.ask("two", "b", 2, 241.0)) == (2, 1)


def test_a_machine_that_comes_while_all_places_are_taken_waits_and_takes_one_that_becomes_free() -> None:
    gathering = Gathering(1, [])
    gathering.ask("one", "a", 0, 0.0)
    assert gathering.begin(0.0)
    assert gathering.ask("spare", "b", 0, 1.0) is None
    gathering.lost(2.0)
    gathering.ask("spare", "b", 0, 3.0)
    assert gathering.begin(3.0)
    assert gathering.ask("spare", "b", 0, 4.0) == 1
