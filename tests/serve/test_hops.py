"""Machines hand on what they have read straight to the next one, where they reach it; whatever goes wrong there changes no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from shoal.errors import ShoalError
from shoal.serve.batching import BatchingEngine
from shoal.serve.kv_caches import KvCaches
from shoal.serve.nodes import node as hops
from shoal.serve.nodes.layer_host import LayerHost, LayerRange, LoadedLayers, TokenBatch
from shoal.serve.nodes.messages import (
    NextHop,
    NodeCommand,
    PeerEndpoint,
    command_from,
    command_message,
    pack_hidden_states,
    unpack_hidden_states,
)
from shoal.serve.nodes.node import PeerSender, ReadHistory, open_receiver
from shoal.serve.nodes.pipeline import Pipeline
from shoal.transports import Message, new_keys
from tests.serve.test_nodes import LENGTHS, PROMPTS, Heard, Machines, alone, even_stops, finish, job, make, spread
from tests.support.eventually import eventually
from tests.support.processes import HANG_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not answer at once when it is probed waits for its turn on a busy machine, and can be reached."""
    monkeypatch.setattr(hops, "_PROBE_S", HANG_S)


@pytest.fixture
def patient_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of whoever is handed something."""
    monkeypatch.setattr(hops, "_PASS_S", HANG_S)


@contextmanager
def layers_as_told() -> Iterator[set[tuple[str, LayerRange]]]:
    """Which layers machines have loaded, as they tell."""
    loaded, held = set[tuple[str, LayerRange]](), Pipeline.held

    def noted(self: Pipeline, name: str, place: LayerRange) -> None:
        loaded.add((name, place))
        held(self, name, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "held", noted)
        yield loaded


@contextmanager
def three(*names: str) -> Iterator[tuple[BatchingEngine, Machines, torch.nn.Module, Counter]]:
    """A server and machines over encrypted TCP, and a count of the readings that the server itself gave to each. All have loaded their
    layers: whoever has not yet cannot use what another machine hands to it."""
    model, described = make("gpt")
    with layers_as_told() as loaded, spread(model, described, list(names), keys=new_keys()) as (engine, machines):
        even_stops(engine, 3)
        eventually(lambda: {(stop.name, stop.place) for stop in engine.backend.fleet.current.stops} <= loaded)
        brought: Counter[str] = Counter()
        send = engine.backend.fleet.send

        def noted(name: str, order: NodeCommand) -> None:
            brought[name] += order.kind == "read"
            send(name, order)

        engine.backend.fleet.send = noted
        yield engine, machines, model, brought


def write(engine: BatchingEngine, heard: list[Heard], after_each_step=lambda: None) -> list[list[int]]:
    for prompt, length, one in zip(PROMPTS, LENGTHS, heard, strict=True):
        engine.submit(job(prompt, one, length))
    finish(engine, after_each_step)
    return [one.tokens for one in heard]


def listeners() -> list[Heard]:
    return [Heard() for _ in PROMPTS]


def names(engine: BatchingEngine) -> list[str]:
    """The machines in the order of their layers; which of them joined first is chance."""
    return [stop.name for stop in engine.backend.fleet.current.stops]


def straight(engine: BatchingEngine) -> bool:
    return any(engine.backend.fleet.direct.values())


@pytest.mark.usefixtures("patient_hands")
def test_what_one_machine_has_read_goes_straight_to_the_next_and_the_server_keeps_it() -> None:
    with three("pi1", "pi2") as (engine, _, model, brought):
        eventually(lambda: straight(engine))
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert brought[names(engine)[1]] > 20
        assert brought[names(engine)[2]] == 0
        eventually(lambda: not engine.backend._trailing and not engine.backend._trips)


@pytest.mark.parametrize("end", [1, 2])
def test_either_end_may_be_unplugged_in_mid_sentence(end: int) -> None:
    with three("pi1", "pi2", "pi3") as (engine, machines, model, brought):
        eventually(lambda: straight(engine))
        heard, before = listeners(), names(engine)
        lost = before[end]

        def pull() -> None:
            if lost in machines.running and len(heard[2].tokens) >= 8:
                machines.unplug(lost, engine.backend.hub)

        assert write(engine, heard, pull) == alone(model, PROMPTS, LENGTHS)
        assert lost not in machines.running
        spare = next(name for name in names(engine) if name not in before)
        assert brought[spare] > 0, "the spare got what was kept, from the server"


def test_a_machine_that_stops_taking_costs_no_token_and_the_server_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, say = Counter(), PeerSender._say

    def deaf_after_five(self, door, message, timeout_s):
        taken[message.header["kind"]] += 1
        return taken["pass"] <= 5 and say(self, door, message, timeout_s)

    monkeypatch.setattr(PeerSender, "_say", deaf_after_five)
    with three("pi1", "pi2") as (engine, _, model, brought):
        eventually(lambda: straight(engine))
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert taken["pass"] <= 5 + engine.backend.microbatches + 1, "after the first refusal nothing more is handed on"
        assert brought[names(engine)[2]] > 10


def test_a_machine_that_cannot_be_reached_is_served_through_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hops, "_PROBE_S", 0.1)
    monkeypatch.setattr(hops.PeerReceiver, "_accept", lambda self, message: False)
    with three("pi1", "pi2") as (engine, _, model, brought):
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert brought[names(engine)[2]] > 10
        assert not straight(engine)


@pytest.mark.usefixtures("patient_hands")
def test_what_a_machine_cannot_use_yet_is_brought_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    can_read, asked = ReadHistory.can_read, Counter()

    def every_third(self, order, holder):
        asked["times"] += 1
        return asked["times"] % 3 != 0 and can_read(self, order, holder)

    monkeypatch.setattr(ReadHistory, "can_read", every_third)
    with three("pi1", "pi2") as (engine, _, model, brought):
        eventually(lambda: straight(engine))
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert 0 < brought[names(engine)[2]] < brought[names(engine)[1]]


def read(trip: int, request: int = 7, position: int = 0) -> NodeCommand:
    return NodeCommand("read", LayerRange(0, 1), trip, TokenBatch([request], [position], [[1]]), torch.zeros(1, 1, 4))


def test_what_comes_late_or_twice_is_not_read_again() -> None:
    seen = ReadHistory()
    seen.note(read(5))
    assert [seen.is_stale(read(trip)) for trip in (4, 5, 6, -1)] == [True, True, False, False]
    seen.note(NodeCommand("release", requests=(7,)))
    assert not seen.is_stale(read(4))
    assert 7 in seen._ended


@pytest.mark.usefixtures("patient_hands")
def test_a_door_opens_only_for_those_whom_the_server_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hops, "needs_keys", lambda settings, hosts: True)
    got: list[NodeCommand] = []
    inbox = open_receiver("tcp://127.0.0.1:9", 1 << 20, got.append, print)
    handing = PeerSender(1 << 20)
    try:
        assert inbox.door.key, "what travels is encrypted"
        order = read(3)._replace(onward=(NextHop("pi2", LayerRange(1, 2), inbox.door),))
        strange = order._replace(onward=(NextHop("pi2", LayerRange(1, 2), PeerEndpoint(inbox.door.address, "another", inbox.door.key)),))
        assert not handing.probe(strange.onward[0].door)
        assert not handing.pass_on(strange, False)
        assert not handing.pass_on(order, False), "nobody is handed anything who was not reached before"
        assert handing.probe(inbox.door)
        assert handing.pass_on(order, False)
        eventually(lambda: bool(got))
        assert (got[0].place, got[0].trip, got[0].onward) == (LayerRange(1, 2), 3, ())
        assert not handing.pass_on(order._replace(reading=TokenBatch([7, 8], [0, 0], [[1], [1]])), False), "a row for each request"
        assert open_receiver("https://example.org/", 1 << 20, got.append, print) is None
    finally:
        handing.close()
        inbox.close()


NONSENSE = [None, "7", "", [], [[]], {}, {"a": 1}, -2, 2.5, float("inf"), float("nan"), 2**63, True, [None], ["7"], [[1]], b"x"]


def mutated(value) -> Iterator:
    """A message with nonsense in one place, for every place of it."""
    yield from NONSENSE
    if isinstance(value, dict):
        for key in value:
            yield {other: one for other, one in value.items() if other != key}
            yield from ({**value, key: one} for one in mutated(value[key]))
    elif isinstance(value, list):
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
            yield from ([*value[:i], one, *value[i + 1 :]] for one in mutated(value[i]))


@pytest.mark.parametrize("int8", [False, True])
def test_a_message_with_nonsense_in_it_is_refused_or_harmless(int8: bool) -> None:
    holder, seen = LayerHost(lambda: None, lambda name: torch.zeros(1), torch.device("cpu")), ReadHistory()
    holder.held[LayerRange(0, 1)] = LoadedLayers(torch.nn.Identity(), KvCaches(lambda tokens: None, True, torch.device("cpu")))
    order = NodeCommand("read", LayerRange(0, 1), 3, TokenBatch([7, 8], [0, 0], [[1], [2]]), torch.zeros(2, 1, 4), onward=(onward,))
    right, frames = command_message(order, int8)
    taken = Counter()
    for header in mutated(right):
        try:
            found = command_from(header, frames)
            seen.is_stale(found)
            seen.can_read(found, holder)
            taken["harmless"] += 1
        except ShoalError:
            taken["refused"] += 1
    assert taken["refused"] > 500
    assert taken["harmless"] < 150, "another number, a name or a door of text is an order, too"


onward = NextHop("pi2", LayerRange(1, 2), PeerEndpoint("tcp://127.0.0.1:9", "token", None))


@pytest.mark.usefixtures("patient_hands")
def test_a_machine_goes_on_to_take_what_others_hand_to_it_after_something_went_wrong() -> None:
    got, told = list[int](), list[str]()

    def carry_out(order: NodeCommand) -> None:
        got.append(order.trip)
        if order.trip == 3:
            raise TypeError("nobody thought of this")

    inbox, handing = open_receiver("tcp://127.0.0.1:9", 1 << 20, carry_out, told.append), PeerSender(1 << 20)
    try:
        assert handing.probe(inbox.door)
        for trip in (3, 4):
            assert handing.pass_on(read(trip)._replace(onward=(onward._replace(door=inbox.door),)), False)
        eventually(lambda: got == [3, 4])
        assert "nobody thought of this" in told[0]
    finally:
        handing.close()
        inbox.close()


def test_the_server_survives_whatever_a_machine_says_it_has_done() -> None:
    model, described = make("gpt")
    with spread(model, described, [], expected=1) as (engine, machines):
        client = machines.reached.client()
        enter = {"kind": "enter", "layer_s": 1.0, "memory_bytes": 1e9, "name": "pi1", "door": list(onward.door)}
        about = {"trip": 1, "seconds": 1.0, "frame": 0, "handed_on": True, "shape": [1, 1, 24], "type": "float32", "int8": False}
        done = [{"kind": "read", **about}, {"kind": "held", "place": [0, 1]}, {"kind": "unheld", "place": [0, 1], "problem": "none"}]
        for said in ({}, *mutated(enter), *mutated(done)):
            if isinstance(said, dict):
                client.call(Message(said), HANG_S)
            else:
                session = client.call(Message(enter), HANG_S).header["session"]
                client.call(Message({"kind": "done", "session": session, "done": said}, (bytes(96),)), HANG_S)
            engine.backend.hub.guests.clear()
        assert client.call(Message({"kind": "node"}), HANG_S).header["kind"] == "model"
        client.close()


def test_the_words_of_a_machine_cannot_steer_the_servers_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    model, described = make("gpt")
    words: list[str] = []
    with spread(model, described, [], expected=1) as (engine, machines):
        hub = engine.backend.hub
        monkeypatch.setattr(hub, "tell", words.append)
        monkeypatch.setattr(hub.pipeline, "fail", lambda trip, why: words.append(why))
        monkeypatch.setattr(hub.pipeline, "unheld", lambda name, place, why: words.append(why))
        client = machines.reached.client()
        entered = client.call(Message({"kind": "enter", "layer_s": 1.0, "memory_bytes": 1e9, "name": "\x1b[2Jpi"}), HANG_S).header
        steering = "\x1b]0;owned\x07" * 100
        done = [{"kind": "failed", "trip": 1, "problem": steering}, {"kind": "unheld", "place": [0, 1], "problem": steering}]
        client.call(Message({"kind": "done", "session": entered["session"], "done": done}), HANG_S)
        client.close()
    assert entered["name"] == "?[2Jpi"
    assert len([word for word in words if "owned" in word]) == 2
    assert all(word.isprintable() and len(word) < 400 for word in words)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_hidden_states_travel_exactly_or_off_by_a_254th_of_a_tokens_largest_number(kind: torch.dtype) -> None:
    x_BLD = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]).to(kind)
    x_BLD[0, 0] = 0
    about, frame = pack_hidden_states(x_BLD, False)
    assert torch.equal(unpack_hidden_states(frame, about), x_BLD)
    about, small = pack_hidden_states(x_BLD, True)
    assert len(small) == 3 * 5 * (64 + 4)
    found = unpack_hidden_states(small, about)
    allowed = x_BLD.float().abs().amax(-1, keepdim=True) * (1 / 254 + (2**-8 if kind == torch.bfloat16 else 1e-6))
    assert found.dtype == kind
    assert ((found.float() - x_BLD.float()).abs() <= allowed).all()
    if kind == torch.float32:
        assert torch.equal(unpack_hidden_states(pack_hidden_states(found, True)[1], about), found), "what was rounded once stays as it is"


def test_int8_travels_only_where_it_is_asked_for() -> None:
    model, described = make("gpt")
    sizes: Counter[bool] = Counter()
    for settings in ({}, {"hidden_states": "int8"}):
        with spread(model, described, ["pi1"], keys=new_keys(), **settings) as (engine, _):
            even_stops(engine, 2)
            hub, take = engine.backend.hub, engine.backend.hub._take

            def weighed(node, header, frames, hub=hub, take=take) -> None:
                sizes[hub.int8] += sum(map(len, frames))  # and not the signs of life, which are more the longer it takes
                take(node, header, frames)

            hub._take = weighed
            heard = listeners()
            found, wanted = write(engine, heard), alone(model, PROMPTS, LENGTHS)
            assert found == wanted or settings
            assert [len(tokens) for tokens in found] == LENGTHS
    assert 0 < sizes[True] < sizes[False]
