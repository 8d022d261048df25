"""Machines hand on what they have read straight to the next one, where they reach it; whatever goes wrong there changes no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from test_nodes import LENGTHS, PROMPTS, Heard, Machines, alone, even_stops, finish, job, make, spread, wait_for

from shoal.serve import hops
from shoal.serve.engine import Engine
from shoal.serve.holding import Place, Reading
from shoal.serve.hops import Handing, Seen, open_inbox
from shoal.serve.orders import packed, unpacked
from shoal.serve.routes import Door, Onward, Order
from shoal.transports import new_keys


@contextmanager
def three(*names: str) -> Iterator[tuple[Engine, Machines, torch.nn.Module, Counter]]:
    """A server and machines over encrypted TCP, and a count of the readings that the server itself gave to each."""
    model, described = make("gpt")
    with spread(model, described, list(names), keys=new_keys()) as (engine, machines):
        even_stops(engine, 3)
        brought: Counter[str] = Counter()
        send = engine.stages._send

        def noted(name: str, order: Order) -> None:
            brought[name] += order.kind == "read"
            send(name, order)

        engine.stages._send = noted
        yield engine, machines, model, brought


def write(engine: Engine, heard: list[Heard], after_each_step=lambda: None) -> list[list[int]]:
    for prompt, length, one in zip(PROMPTS, LENGTHS, heard, strict=True):
        engine.submit(job(prompt, one, length))
    finish(engine, after_each_step)
    return [one.tokens for one in heard]


def listeners() -> list[Heard]:
    return [Heard() for _ in PROMPTS]


def names(engine: Engine) -> list[str]:
    """The machines in the order of their layers; which of them joined first is chance."""
    return [stop.name for stop in engine.stages.current.stops]


def straight(engine: Engine) -> bool:
    return any(engine.stages._direct.values())


def test_what_one_machine_has_read_goes_straight_to_the_next_and_the_server_keeps_it() -> None:
    with three("pi1", "pi2") as (engine, _, model, brought):
        wait_for(lambda: straight(engine))
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert brought[names(engine)[1]] > 20
        assert brought[names(engine)[2]] == 0
        wait_for(lambda: not engine.stages._trailing)
        assert not engine.stages._trips


@pytest.mark.parametrize("end", [1, 2])
def test_either_end_may_be_unplugged_in_mid_sentence(end: int) -> None:
    with three("pi1", "pi2", "pi3") as (engine, machines, model, brought):
        wait_for(lambda: straight(engine))
        heard, before = listeners(), names(engine)
        lost = before[end]

        def pull() -> None:
            if lost in machines.running and len(heard[2].tokens) >= 8:
                machines.unplug(lost, engine.stages.hub)

        assert write(engine, heard, pull) == alone(model, PROMPTS, LENGTHS)
        assert lost not in machines.running
        spare = next(name for name in names(engine) if name not in before)
        assert brought[spare] > 0, "the spare got what was kept, from the server"


def test_a_machine_that_stops_taking_costs_no_token_and_the_server_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, say = Counter(), Handing._say

    def deaf_after_five(self, door, message, timeout_s):
        taken[message.header["kind"]] += 1
        return taken["pass"] <= 5 and say(self, door, message, timeout_s)

    monkeypatch.setattr(Handing, "_say", deaf_after_five)
    with three("pi1", "pi2") as (engine, _, model, brought):
        wait_for(lambda: straight(engine))
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert taken["pass"] <= 5 + engine.stages.groups + 1, "after the first refusal nothing more is handed on"
        assert brought[names(engine)[2]] > 10


def test_a_machine_that_cannot_be_reached_is_served_through_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hops, "_PROBE_S", 0.1)
    monkeypatch.setattr(hops.Inbox, "_accept", lambda self, message: False)
    with three("pi1", "pi2") as (engine, _, model, brought):
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert brought[names(engine)[2]] > 10
        assert not straight(engine)


def test_what_a_machine_cannot_use_yet_is_brought_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    can_read, asked = Seen.can_read, Counter()

    def every_third(self, order, holder):
        asked["times"] += 1
        return asked["times"] % 3 != 0 and can_read(self, order, holder)

    monkeypatch.setattr(Seen, "can_read", every_third)
    with three("pi1", "pi2") as (engine, _, model, brought):
        wait_for(lambda: straight(engine))
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert 0 < brought[names(engine)[2]] < brought[names(engine)[1]]


def read(trip: int, request: int = 7, position: int = 0) -> Order:
    return Order("read", Place(0, 1), trip, Reading([request], [position], [[1]]), torch.zeros(1, 1, 4))


def test_what_comes_late_or_twice_is_not_read_again() -> None:
    seen = Seen()
    seen.note(read(5))
    assert [seen.is_stale(read(trip)) for trip in (4, 5, 6, -1)] == [True, True, False, False]
    seen.note(Order("release", requests=(7,)))
    assert not seen.is_stale(read(4))
    assert 7 in seen._ended


def test_a_door_opens_only_for_those_whom_the_server_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hops, "needs_keys", lambda settings, hosts: True)
    got: list[Order] = []
    inbox = open_inbox("tcp://127.0.0.1:9", 1 << 20, got.append)
    handing = Handing(1 << 20)
    try:
        assert inbox.door.key, "what travels is encrypted"
        order = read(3)._replace(onward=(Onward("pi2", Place(1, 2), inbox.door),))
        strange = order._replace(onward=(Onward("pi2", Place(1, 2), Door(inbox.door.address, "another", inbox.door.key)),))
        assert not handing.probe(strange.onward[0].door)
        assert not handing.pass_on(strange, False)
        assert not handing.pass_on(order, False), "nobody is handed anything who was not reached before"
        assert handing.probe(inbox.door)
        assert handing.pass_on(order, False)
        wait_for(lambda: bool(got))
        assert (got[0].place, got[0].trip, got[0].onward) == (Place(1, 2), 3, ())
        assert not handing.pass_on(order._replace(reading=Reading([7, 8], [0, 0], [[1], [1]])), False), "a row for each request"
        assert open_inbox("https://example.org/", 1 << 20, got.append) is None
    finally:
        handing.close()
        inbox.close()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_hidden_states_travel_exactly_or_off_by_a_254th_of_a_tokens_largest_number(kind: torch.dtype) -> None:
    x_BLD = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]).to(kind)
    x_BLD[0, 0] = 0
    about, frame = packed(x_BLD, False)
    assert torch.equal(unpacked(frame, about), x_BLD)
    about, small = packed(x_BLD, True)
    assert len(small) == 3 * 5 * (64 + 4)
    found = unpacked(small, about)
    allowed = x_BLD.float().abs().amax(-1, keepdim=True) * (1 / 254 + (2**-8 if kind == torch.bfloat16 else 1e-6))
    assert found.dtype == kind
    assert ((found.float() - x_BLD.float()).abs() <= allowed).all()
    if kind == torch.float32:
        assert torch.equal(unpacked(packed(found, True)[1], about), found), "what was rounded once stays as it is"


def test_int8_travels_only_where_it_is_asked_for() -> None:
    model, described = make("gpt")
    sizes = {}
    for settings in ({}, {"hidden_states": "int8"}):
        with spread(model, described, ["pi1"], keys=new_keys(), **settings) as (engine, _):
            even_stops(engine, 2)
            heard = listeners()
            found, wanted = write(engine, heard), alone(model, PROMPTS, LENGTHS)
            assert found == wanted or settings
            assert [len(tokens) for tokens in found] == LENGTHS
            sizes[engine.stages.hub.int8] = engine.stages.hub.server.traffic.received_bytes
    assert sizes[True] < sizes[False]
