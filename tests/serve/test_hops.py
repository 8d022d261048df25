"""Machines hand on what they have read straight to the next one, where they reach it; whatever goes wrong there changes no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from shoal.errors import ShoalError
from shoal.serve.batched_kv_caches import KvCaches
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.nodes import node as node_module
from shoal.serve.nodes.layer_host import LayerHost, LayerRange, LoadedLayers, TokenBatch
from shoal.serve.nodes.messages import (
    Endpoint,
    NextHop,
    NodeCommand,
    command_from,
    command_message,
    pack_hidden_states,
    unpack_hidden_states,
)
from shoal.serve.nodes.node import PeerSender, ReadHistory, connect_to, open_receiver
from shoal.serve.nodes.pipeline import NodePipeline
from shoal.transports import Message
from shoal.transports.keys import new_keys
from tests.serve.test_nodes import LENGTHS, PROMPTS, Heard, Machines, alone, finish, job, make, split_evenly, spread
from tests.support.eventually import eventually
from tests.support.processes import HANG_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does not answer a probe at once waits for its turn on a busy test machine, and can be reached."""
    monkeypatch.setattr(node_module, "_PROBE_S", HANG_S)


@pytest.fixture
def patient_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a machine that is sent a batch directly."""
    monkeypatch.setattr(node_module, "_HAND_ON_S", HANG_S)


@contextmanager
def loaded_layers() -> Iterator[set[tuple[str, LayerRange]]]:
    """The layers that machines have reported as loaded."""
    loaded, on_loaded = set[tuple[str, LayerRange]](), NodePipeline.on_loaded

    def noted(self: NodePipeline, name: str, layers: LayerRange) -> None:
        loaded.add((name, layers))
        on_loaded(self, name, layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodePipeline, "on_loaded", noted)
        yield loaded


@contextmanager
def three(*names: str) -> Iterator[tuple[BatchingEngine, Machines, torch.nn.Module, Counter]]:
    """A server and machines over encrypted TCP, and a count of the readings that the server itself gave to each. All have loaded their
    layers: whoever has not yet cannot use what another machine hands to it."""
    model, described = make("gpt")
    with loaded_layers() as loaded, spread(model, described, list(names), keys=new_keys()) as (engine, machines):
        split_evenly(engine, 3)
        eventually(lambda: {(stage.name, stage.layers) for stage in engine.backend.placement.current.stages} <= loaded)
        brought: Counter[str] = Counter()
        send = engine.backend.placement.send

        def noted(name: str, command: NodeCommand) -> None:
            brought[name] += command.kind == "read"
            send(name, command)

        engine.backend.placement.send = noted
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
    return [stage.name for stage in engine.backend.placement.current.stages]


def straight(engine: BatchingEngine) -> bool:
    return any(engine.backend.placement.reachable.values())


@pytest.mark.usefixtures("patient_hands")
def test_what_one_machine_has_read_goes_straight_to_the_next_and_the_server_keeps_it() -> None:
    with three("pi1", "pi2") as (engine, _, model, brought):
        eventually(lambda: straight(engine))
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert brought[names(engine)[1]] > 20
        assert brought[names(engine)[2]] == 0
        eventually(lambda: not engine.backend.dispatch.unreported and not engine.backend.dispatch.in_flight)


@pytest.mark.parametrize("end", [1, 2])
def test_either_end_may_be_unplugged_in_mid_sentence(end: int) -> None:
    with three("pi1", "pi2", "pi3") as (engine, machines, model, brought):
        eventually(lambda: straight(engine))
        heard, before = listeners(), names(engine)
        lost = before[end]

        def pull() -> None:
            if lost in machines.running and len(heard[2].tokens) >= 8:
                machines.unplug(lost, engine.backend.node_server)

        assert write(engine, heard, pull) == alone(model, PROMPTS, LENGTHS)
        assert lost not in machines.running
        spare = next(name for name in names(engine) if name not in before)
        assert brought[spare] > 0, "the spare got what was kept, from the server"


def test_a_machine_that_stops_taking_costs_no_token_and_the_server_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, say = Counter(), PeerSender._call

    def deaf_after_five(self, endpoint, message, timeout_s, may_connect=True):
        taken[message.header["kind"]] += 1
        return taken["pass"] <= 5 and say(self, endpoint, message, timeout_s, may_connect)

    monkeypatch.setattr(PeerSender, "_call", deaf_after_five)
    with three("pi1", "pi2") as (engine, _, model, brought):
        eventually(lambda: straight(engine))
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert taken["pass"] <= 5 + engine.backend.microbatches + 1, "after the first refusal nothing more is handed on"
        assert brought[names(engine)[2]] > 10


def test_a_machine_that_cannot_be_reached_is_served_through_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "_PROBE_S", 0.1)
    monkeypatch.setattr(node_module.PeerReceiver, "_accept", lambda self, message: False)
    with three("pi1", "pi2") as (engine, _, model, brought):
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert brought[names(engine)[2]] > 10
        assert not straight(engine)


@pytest.mark.usefixtures("patient_hands")
def test_what_a_machine_cannot_use_yet_is_brought_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    can_read, asked = ReadHistory.can_read, Counter()

    def every_third(self, command, host):
        asked["times"] += 1
        return asked["times"] % 3 != 0 and can_read(self, command, host)

    monkeypatch.setattr(ReadHistory, "can_read", every_third)
    with three("pi1", "pi2") as (engine, _, model, brought):
        eventually(lambda: straight(engine))
        assert write(engine, listeners()) == alone(model, PROMPTS, LENGTHS)
        assert 0 < brought[names(engine)[2]] < brought[names(engine)[1]]


def read(batch_number: int, request: int = 7, position: int = 0) -> NodeCommand:
    return NodeCommand("read", LayerRange(0, 1), batch_number, TokenBatch([request], [position], [[1]]), torch.zeros(1, 1, 4))


def test_what_comes_late_or_twice_is_not_read_again() -> None:
    history = ReadHistory()
    history.note(read(5))
    assert [history.is_stale(read(batch_number)) for batch_number in (4, 5, 6, -1)] == [True, True, False, False]
    history.note(NodeCommand("release", requests=(7,)))
    assert not history.is_stale(read(4))
    assert 7 in history._ended


@pytest.mark.usefixtures("patient_hands")
def test_a_door_opens_only_for_those_whom_the_server_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "needs_keys", lambda settings, hosts: True)
    got: list[NodeCommand] = []
    receiver = open_receiver("tcp://127.0.0.1:9", got.append, print)
    peer_sender = PeerSender()
    try:
        assert receiver.endpoint.key, "what travels is encrypted"
        command = read(3)._replace(next_hops=(NextHop("pi2", LayerRange(1, 2), receiver.endpoint),))
        strange = command._replace(
            next_hops=(NextHop("pi2", LayerRange(1, 2), Endpoint(receiver.endpoint.address, "another", receiver.endpoint.key)),)
        )
        assert not peer_sender.probe(strange.next_hops[0].endpoint)
        assert not peer_sender.hand_on(strange, False)
        assert not peer_sender.hand_on(command, False), "nobody is handed anything who was not reached before"
        assert peer_sender.probe(receiver.endpoint)
        assert peer_sender.hand_on(command, False)
        eventually(lambda: bool(got))
        assert (got[0].layers, got[0].batch_number, got[0].next_hops) == (LayerRange(1, 2), 3, ())
        assert not peer_sender.hand_on(command._replace(token_batch=TokenBatch([7, 8], [0, 0], [[1], [1]])), False), (
            "a row for each request"
        )
        assert open_receiver("https://example.org/", got.append, print) is None
    finally:
        peer_sender.close()
        receiver.close()


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
    host, history = LayerHost(lambda: None, lambda name: torch.zeros(1), torch.device("cpu")), ReadHistory()
    host.loaded[LayerRange(0, 1)] = LoadedLayers(torch.nn.Identity(), KvCaches(lambda tokens: None, True, torch.device("cpu")))
    command = NodeCommand("read", LayerRange(0, 1), 3, TokenBatch([7, 8], [0, 0], [[1], [2]]), torch.zeros(2, 1, 4), next_hops=(next_hop,))
    right, frames = command_message(command, int8)
    taken = Counter()
    for header in mutated(right):
        try:
            found = command_from(header, frames)
            history.is_stale(found)
            history.can_read(found, host)
            taken["harmless"] += 1
        except ShoalError:
            taken["refused"] += 1
    assert taken["refused"] > 500
    assert taken["harmless"] < 150, "another number, a name or a door of text is an order, too"


next_hop = NextHop("pi2", LayerRange(1, 2), Endpoint("tcp://127.0.0.1:9", "token", None))


@pytest.mark.usefixtures("patient_hands")
def test_a_machine_goes_on_to_take_what_others_hand_to_it_after_something_went_wrong() -> None:
    got, told = list[int](), list[str]()

    def on_command(command: NodeCommand) -> None:
        got.append(command.batch_number)
        if command.batch_number == 3:
            raise TypeError("nobody thought of this")

    receiver, peer_sender = open_receiver("tcp://127.0.0.1:9", on_command, told.append), PeerSender()
    try:
        assert peer_sender.probe(receiver.endpoint)
        for batch_number in (3, 4):
            assert peer_sender.hand_on(read(batch_number)._replace(next_hops=(next_hop._replace(endpoint=receiver.endpoint),)), False)
        eventually(lambda: got == [3, 4])
        assert "nobody thought of this" in told[0]
    finally:
        peer_sender.close()
        receiver.close()


def test_the_server_survives_whatever_a_machine_says_it_has_done() -> None:
    model, described = make("gpt")
    with spread(model, described, [], expected=1) as (engine, machines):
        client = connect_to(machines.server_address)
        enter = {"kind": "enter", "layer_s": 1.0, "memory_bytes": 1e9, "name": "pi1", "door": list(next_hop.endpoint)}
        about = {"trip": 1, "seconds": 1.0, "frame": 0, "handed_on": True, "shape": [1, 1, 24], "type": "float32", "int8": False}
        done = [{"kind": "read", **about}, {"kind": "held", "place": [0, 1]}, {"kind": "unheld", "place": [0, 1], "problem": "none"}]
        for said in ({}, *mutated(enter), *mutated(done)):
            if isinstance(said, dict):
                client.call(Message(said), HANG_S)
            else:
                session_id = client.call(Message(enter), HANG_S).header["session"]
                client.call(Message({"kind": "done", "session": session_id, "done": said}, (bytes(96),)), HANG_S)
            engine.backend.node_server.sessions.clear()
        assert client.call(Message({"kind": "node"}), HANG_S).header["kind"] == "model"
        client.close()


def test_the_words_of_a_machine_cannot_steer_the_servers_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    model, described = make("gpt")
    words: list[str] = []
    with spread(model, described, [], expected=1) as (engine, machines):
        node_server = engine.backend.node_server
        monkeypatch.setattr(node_server, "tell", words.append)
        monkeypatch.setattr(node_server.pipeline, "fail", lambda name, batch_number, why: words.append(why))
        monkeypatch.setattr(node_server.pipeline, "on_load_failed", lambda name, layers, why: words.append(why))
        client = connect_to(machines.server_address)
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
            split_evenly(engine, 2)
            node_server, take = engine.backend.node_server, engine.backend.node_server._handle_reports

            def weighed(node, header, frames, node_server=node_server, take=take) -> None:
                sizes[node_server.int8] += sum(map(len, frames))  # and not the signs of life, which are more the longer it takes
                take(node, header, frames)

            node_server._handle_reports = weighed
            heard = listeners()
            found, wanted = write(engine, heard), alone(model, PROMPTS, LENGTHS)
            assert found == wanted or settings
            assert [len(tokens) for tokens in found] == LENGTHS
    assert 0 < sizes[True] < sizes[False]
