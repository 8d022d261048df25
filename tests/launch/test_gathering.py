"""Who gets which place in a pipeline over machines, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from shoal.config.load import resolve_data
from shoal.errors import ShoalError
from shoal.launch.pipeline_rendezvous import HERE, PipelineRendezvous, StagePlacer, WaitingMachine, _check_place
from shoal.transports.keys import new_keys


def test_places_follow_the_list_and_nobody_begins_before_all_are_there() -> None:
    gathering = PipelineRendezvous(2, ["mini2", "mini3"])
    assert gathering.ask("mini3", "b", 0, 0.0) is None
    assert not gathering.begin(0.5)
    assert gathering.ask("mini2", "a", 0, 1.0) is None
    assert gathering.begin(1.5)
    assert (gathering.ask("mini2", "a", 0, 2.0), gathering.ask("mini3", "b", 0, 2.0)) == (1, 2)
    assert gathering.size == 3


def test_a_machine_that_fell_silent_while_it_waited_gets_no_place() -> None:
    gathering = PipelineRendezvous(2, [])
    gathering.ask("first", "a", 0, 0.0)
    gathering.ask("second", "b", 0, 20.0)
    assert not gathering.begin(20.5)
    gathering.ask("third", "c", 0, 21.0)
    assert gathering.begin(21.5)
    assert set(gathering.places) == {"b", "c"}


def test_a_crowd_that_asks_under_ever_new_names_is_not_remembered_for_ever() -> None:
    gathering = PipelineRendezvous(2, [])
    for number in range(1500):
        gathering.ask("crowd", f"c{number}", 0, 0.0)
    assert len(gathering.members) == 1000
    gathering.ask("second", "b", 0, 10.0)
    assert set(gathering.members) == {"b"}, "the crowd has fallen silent"


def test_after_a_loss_all_who_come_back_begin_at_once_and_fewer_after_a_while() -> None:
    gathering = PipelineRendezvous(2, [])
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


def test_a_machine_that_comes_too_late_waits_and_takes_a_place_that_becomes_free() -> None:
    gathering = PipelineRendezvous(1, [])
    gathering.ask("one", "a", 0, 0.0)
    assert gathering.begin(0.0)
    assert gathering.ask("spare", "b", 0, 1.0) is None
    gathering.lost(2.0)
    gathering.ask("spare", "b", 0, 3.0)
    assert gathering.begin(3.0)
    assert gathering.ask("spare", "b", 0, 4.0) == 1


PLACE = {"rank": 1, "size": 2, "stage": 1, "port": 4000, "start": 1, "keys": [new_keys().public, new_keys().public]}


@pytest.mark.parametrize(
    "lie",
    [
        {"rank": 2},
        {"rank": "1"},
        {"rank": 0},
        {"stage": -1},
        {"port": 1 << 16},
        {"size": 3},
        {"keys": ["x", "y"]},
        {"keys": None},
        {"start": 1.5},
    ],
)
def test_a_machine_refuses_a_place_that_there_cannot_be(lie: dict[str, object]) -> None:
    _check_place(PLACE)
    with pytest.raises(ShoalError, match="no place in a pipeline"):
        _check_place(PLACE | lie)


# --- a scheduler places the stages ---------------------------------------------------------------------------


def by_name(stages: dict[str, int]) -> Callable[[Sequence[WaitingMachine]], dict[str, int]]:
    """Stages by names of machines, as a scheduler would place them; raises where one is missing."""

    def choose(present: Sequence[WaitingMachine]) -> dict[str, int]:
        there = {HERE: HERE} | {one.name: one.instance for one in present}
        if missing := [name for name in stages if name not in there]:
            raise ShoalError(f"no {missing[0]}")
        return {there[name]: stage for name, stage in stages.items()}

    return choose


def test_the_scheduler_says_who_has_which_stage_and_the_others_are_spares() -> None:
    gathering = PipelineRendezvous(2, [], by_name({"roomy": 0, HERE: 1}))
    gathering.ask("small", "a", 0, 0.0)
    assert not gathering.begin(0.0), "all are waited for before it chooses"
    gathering.ask("roomy", "b", 0, 0.0)
    assert gathering.begin(0.0)
    assert (gathering.size, gathering.stages) == (2, {"b": 0, HERE: 1})
    assert gathering.ask("small", "a", 0, 1.0) is None
    assert gathering.ask("roomy", "b", 0, 1.0) == 1


def test_those_who_are_there_wait_for_a_machine_that_a_stage_fits() -> None:
    gathering = PipelineRendezvous(1, [], by_name({HERE: 0, "roomy": 1}))
    gathering.ask("small", "a", 0, 0.0)
    assert not gathering.begin(0.0)
    assert gathering.missing == "no roomy"
    gathering.ask("roomy", "b", 0, 1.0)
    assert gathering.begin(1.0)
    assert not gathering.missing


def test_claimed_speeds_place_the_stages_also_on_machines_with_the_same_name() -> None:
    settings = {
        "model": {"kind": "gpt", "hidden_size": 16, "num_layers": 6, "num_heads": 2, "max_seq_len": 16},
        "data": {"source": {"kind": "builtin", "name": "zen"}, "tokenizer": "characters"},
        "engine": {"kind": "pipeline"},
        "scheduler": {"tasks": [{"id": "small", "model_share": 0.3}, {"id": "large", "model_share": 0.7}]},
        "cluster": {"hosts": {"tight": {"memory_gb": 1e-4}}},
    }
    placing = StagePlacer(resolve_data(settings, name="test", dialect="shoal", environ={}).run)
    assert placing.expected == 1
    tight, twins = WaitingMachine("tight", "t", 0.0), [WaitingMachine("twin", "a", 0.0), WaitingMachine("twin", "b", 0.0)]
    assert placing.choose([tight, *twins]).keys() == {HERE, "a"}, "the coordinator's machine has one in any case"
    with pytest.raises(ShoalError, match="no machine is left for the stage"):
        placing.choose([tight])
    with pytest.raises(ShoalError, match="2 stages need a machine each"):
        placing.choose([])
