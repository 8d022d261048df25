"""One machine of a service has a fault: it is removed by name, and every text is what one process writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.nodes import node as node_module
from shoal.serve.nodes import node_timing, placement, trials
from shoal.serve.nodes import server as node_server
from shoal.serve.nodes.placement import SERVER_NODE
from shoal.transports.keys import new_keys
from tests.serve.test_nodes import LENGTHS, PROMPTS, Heard, Machines, alone, finish, job, make, split_evenly, spread
from tests.support.eventually import eventually
from tests.support.faulty_node import FAULTS, FaultyNode
from tests.support.processes import HANG_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy machine that waits for its turn on a busy test machine is neither lost nor late."""
    monkeypatch.setattr(node_server, "SILENCE_S", HANG_S)
    monkeypatch.setattr(node_timing, "GRACE_S", HANG_S)
    monkeypatch.setattr(node_timing, "SLOW_S", HANG_S)
    monkeypatch.setattr(placement, "_SHOWN_S", HANG_S)
    monkeypatch.setattr(node_module, "_PROBE_S", HANG_S)
    monkeypatch.setattr(node_module, "_HAND_ON_S", HANG_S)
    monkeypatch.setattr(trials, "_FIRST_TRIAL_S", 0.05)


Service = tuple[BatchingEngine, Machines, FaultyNode, torch.nn.Module, list[str]]


@contextmanager
def service(fault: str, at: int = 1, direct: bool = True) -> Iterator[Service]:
    """The server and two machines with two layers each, of which the one at this place of the route has a fault later."""
    model, described = make("gpt")
    with spread(model, described, ["pi1"], keys=new_keys() if direct else None) as (engine, machines):
        told: list[str] = []
        engine.backend.placement.tell = told.append
        machines.join("faulty", FaultyNode)
        eventually(lambda: machines.problems or len(engine.backend.placement.alive()) == 3)
        node = machines.running["faulty"][0]
        node.fault = fault
        put_at(engine, "faulty", at)
        if direct:
            eventually(lambda: engine.backend.placement.reachable and all(engine.backend.placement.reachable.values()))
        try:
            yield engine, machines, node, model, told
        finally:
            for one, _ in machines.running.values():
                one.stop()
            for _, thread in machines.running.values():
                thread.join()


def put_at(engine: BatchingEngine, name: str, at: int) -> None:
    """Split the layers evenly, with this machine at this place of the route."""
    nodes = engine.backend.placement.nodes
    with engine.backend._changed:
        others = [one for one in nodes if one != name]
        order = [*others[:at], name, *others[at:]]
        engine.backend.placement.nodes = {one: nodes[one] for one in order}
        split_evenly(engine, 3)
    assert engine.backend.placement.current.stages[at].name == name


def write(engine: BatchingEngine, after_each_step: Callable[[], None] = lambda: None) -> tuple[list[list[int]], set[str]]:
    """The texts of four requests, and how they ended."""
    heard = [Heard() for _ in PROMPTS]
    for prompt, length, one in zip(PROMPTS, LENGTHS, heard, strict=True):
        engine.submit(job(prompt, one, length))
    finish(engine, after_each_step)
    return [one.tokens for one in heard], {one.end for one in heard}


WRONG_OUTPUTS = [fault for fault in FAULTS if fault not in ("silent", "fails others", "never sends", "two faces")]


QUICK = [("nan", True), ("shape", False)]
ALL = [(fault, direct) for fault in WRONG_OUTPUTS for direct in (True, False)]


@pytest.mark.parametrize(("fault", "direct"), [one if one in QUICK else pytest.param(*one, marks=pytest.mark.long) for one in ALL])
def test_a_node_with_wrong_outputs_is_removed_by_name_and_texts_go_on(fault: str, direct: bool) -> None:
    with service(fault, direct=direct) as (engine, _, _, model, told):
        assert write(engine) == (alone(model, PROMPTS, LENGTHS), {"length"})
        assert not engine.backend.placement.current.uses_node("faulty")
        assert [line for line in told if line.startswith("faulty is removed")]
        assert not [line for line in told if "pi1 is removed" in line]
        assert not any("weights" in line for line in told)


def names_removed(told: list[str]) -> set[str]:
    return {line.partition(" is removed")[0] for line in told if " is removed" in line}


@pytest.mark.parametrize("direct", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_node_that_does_nothing_but_send_heartbeats_is_removed(monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    with service("silent", direct=direct) as (engine, _, node, model, told):
        monkeypatch.setattr(node_timing, "GRACE_S", 3.0)
        assert write(engine) == (alone(model, PROMPTS, LENGTHS), {"length"})
        assert "faulty" in names_removed(told)
        node.stop()


@pytest.mark.long
def test_a_node_that_claims_to_have_sent_what_it_did_not_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with service("never sends") as (engine, _, _, model, told):
        monkeypatch.setattr(node_timing, "GRACE_S", 6.0)
        assert write(engine) == (alone(model, PROMPTS, LENGTHS), {"length"})
        assert not names_removed(told), "the server sent it itself"
        assert engine.backend.placement._closed_paths


def test_a_node_that_sends_others_something_else_cannot_blame_them() -> None:
    with service("two faces") as (engine, _, _, model, told):
        assert write(engine) == (alone(model, PROMPTS, LENGTHS), {"length"})
        assert not names_removed(told)


def test_only_the_node_that_holds_a_request_may_fail_it() -> None:
    with service("fails others", at=2, direct=False) as (engine, _, node, model, told):
        assert write(engine) == (alone(model, PROMPTS, LENGTHS), {"length"})
        assert node.sent_others
        assert names_removed(told) <= {"faulty"}, "it may also fail what it holds itself"
        assert engine.backend.ignored_reports > 100


def test_a_node_returns_when_its_output_agrees_and_stays_out_before() -> None:
    with service("nan", direct=False) as (engine, _, node, model, told):
        assert write(engine) == (alone(model, PROMPTS, LENGTHS), {"length"})
        eventually(lambda: any("faulty stays out" in line for line in told))
        assert not any(one.name == "faulty" for one in engine.backend.placement.alive())
        node.fault = ""
        eventually(lambda: any("faulty may hold layers again" in line for line in told))
        assert any(one.name == "faulty" for one in engine.backend.placement.alive())
        put_at(engine, "faulty", 1)
        assert write(engine) == (alone(model, PROMPTS, LENGTHS), {"length"})


@pytest.mark.long
def test_a_faulty_node_under_another_name_is_tried_too() -> None:
    with service("nan", direct=False) as (engine, machines, _, model, told):
        assert write(engine) == (alone(model, PROMPTS, LENGTHS), {"length"})
        machines.join("innocent", FaultyNode)
        machines.running["innocent"][0].fault, machines.running["innocent"][0].after = "nan", 0
        eventually(lambda: any("innocent stays out" in line for line in told))


def test_weights_that_are_not_finite_end_the_request_and_blame_no_node() -> None:
    model, described = make("gpt")
    with torch.no_grad():
        next(model.blocks[3].parameters()).fill_(float("nan"))
    with spread(model, described, ["pi1", "pi2"]) as (engine, _):
        told: list[str] = []
        engine.backend.placement.tell = told.append
        split_evenly(engine, 3)
        _, ends = write(engine)
        assert ends == {"not_finite"}
        assert not names_removed(told)
        assert len(engine.backend.placement.alive()) == 3


def test_a_spare_that_was_busy_when_it_joined_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, described = make("gpt")
    with spread(model, described, ["pi1"]) as (engine, _):
        backend = engine.backend
        split_evenly(engine, 2)
        with backend._changed:
            backend.placement.nodes["pi1"].layer_s = 1e3
            backend.placement.use_route(backend.placement.plan())
            assert not backend.placement.current.uses_node("pi1"), "it is a spare"
            backend.placement.nodes[SERVER_NODE].layer_s = 10.0
        monkeypatch.setattr(trials, "_MEASURE_EVERY_S", 0.0)
        eventually(lambda: backend.placement.nodes["pi1"].layer_s < 10.0)
        eventually(lambda: backend.placement.current.uses_node("pi1"))
        assert write(engine) == (alone(model, PROMPTS, LENGTHS), {"length"})


@pytest.mark.long
def test_a_node_that_is_much_slower_than_it_claimed_gives_up_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with service("", direct=False) as (engine, _, node, model, told):
        monkeypatch.setattr(node_timing, "SLOW_S", 0.0)
        monkeypatch.setattr(node_timing, "_SLOW_FACTOR", 0.0)
        engine.backend.placement.nodes["pi1"].timing.is_slow = lambda: False
        assert write(engine) == (alone(model, PROMPTS, LENGTHS), {"length"})
        assert names_removed(told) == {"faulty"}
        assert node.reads >= 8
