"""Layers on several machines: the tokens of one process, whatever happens to the machines."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from shoal.config.schema import model as schema
from shoal.config.schema.cluster import Zmq
from shoal.models.generation.decoding import TokenDraws, Warp
from shoal.models.gpt import Gpt
from shoal.models.moe import Moe
from shoal.serve.api.embedding import HiddenStateMean
from shoal.serve.backend import LocalBackend
from shoal.serve.batching import batch_scheduler
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.batching.generation_job import Finished, GenerationJob
from shoal.serve.batching.token_logprobs import PromptLogprobs
from shoal.serve.nodes.distributed_model import DistributedModel
from shoal.serve.nodes.layer_host import LayerHost, LayerRange
from shoal.serve.nodes.messages import Endpoint
from shoal.serve.nodes.model_description import describe_huggingface_model, describe_own_model
from shoal.serve.nodes.node import NodeProcess, connect_to
from shoal.serve.nodes.placement import SERVER_NODE, LayerPlanner, LayerSize, NodePlacement, NodeState, RouteStage, spare_nodes
from shoal.serve.nodes.server import NodeServer
from shoal.serve.nodes.weights import RemoteWeights
from shoal.transports import Message, Refused, Server
from shoal.transports.connect import serve
from shoal.transports.in_process import InProcessServer
from shoal.transports.interface import ListenOptions, Unreachable
from shoal.transports.keys import Keys, new_keys, new_token
from tests.support.eventually import eventually
from tests.support.processes import HANG_S
from tests.support.small_service import small_served

VOCABULARY = 40
SIZES = {"hidden_size": 24, "num_layers": 6, "num_heads": 4, "max_seq_len": 96}


def make(kind: str) -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(1)
    if kind == "gpt":
        settings = schema.Gpt(**SIZES, positions="rotary", norm="rms", num_kv_heads=2)
        model: torch.nn.Module = Gpt(settings, VOCABULARY)
    elif kind in ("hash", "switch"):
        settings = schema.Moe(**SIZES, experts=schema.Experts(count=4, per_token=2, router=kind))
        model = Moe(settings, VOCABULARY)
    else:
        transformers = pytest.importorskip("transformers")
        from shoal.models.huggingface.model import HuggingFace

        sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": VOCABULARY}
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        window = {"sliding_window": 6} if kind == "mistral" else {}
        window |= {"num_key_value_heads": 2} if kind in ("mistral", "qwen2") else {}
        window |= {"num_experts": 4, "num_experts_per_tok": 2} if kind == "olmoe" else {}
        config = transformers.AutoConfig.for_model(kind, **sizes, **none, **window, max_position_embeddings=96)
        model = HuggingFace(transformers.AutoModelForCausalLM.from_config(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.eval(), describe_huggingface_model(model) if hasattr(model, "inner") else describe_own_model(settings, model)


class Heard:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end = ""

    def __call__(self, heard) -> bool:
        if isinstance(heard, Finished):
            self.end = heard.reason
        else:
            self.tokens.append(heard.token)
        return False


def job(prompt: list[int], heard: Heard, tokens: int) -> GenerationJob:
    return GenerationJob(prompt, tokens, TokenDraws(3, prompt), heard, Warp(1.0))


class Machines:
    """Threads of this process that hold layers, each with a server's invitation."""

    def __init__(self, server: Server, token: str, key: str | None) -> None:
        self.server, self.server_address = server, Endpoint(server.address, token, key)
        self.running: dict[str, tuple[NodeProcess, threading.Thread]] = {}
        self.problems: list[Exception] = []

    def join(self, name: str, kind: type[NodeProcess] = NodeProcess) -> None:
        patience_s = 0.0 if kind is NodeProcess else HANG_S
        node = kind(self.server_address, name, slowdown=1.0, patience_s=patience_s, tell=lambda text: None)
        thread = threading.Thread(target=self._work, args=(node,), name=name)
        thread.start()
        self.running[name] = (node, thread)

    def _work(self, node: NodeProcess) -> None:
        try:
            node.work()
        except Exception as problem:  # the test has ended, or pulled the plug, or something is wrong
            self.problems.append(problem)

    def unplug(self, name: str, node_server: NodeServer) -> None:
        """As when its process is killed: it says nothing more, and whoever started it notices."""
        node, thread = self.running.pop(name)
        node.session_id = ""
        node.stop()
        node.client.close()
        node_server.remove(name, "it was unplugged")
        thread.join()


@contextmanager
def spread(
    model, described, names: list[str], expected: int | None = None, keys: Keys | None = None, served: dict | None = None, **settings
) -> Iterator[tuple[BatchingEngine, Machines]]:
    """`keys`: machines come over TCP, encrypted; else without any network. `served`: other fields of the served model."""
    token = new_token()
    server: Server = InProcessServer(token=token, max_frame_bytes=1 << 24)
    if keys is not None:
        server = serve(Zmq(port=0), ListenOptions(("127.0.0.1",), token, keys, 1 << 24))
    nodes = 1 + len(names) if expected is None else expected
    served = small_served(model, **settings)._replace(nodes=nodes, described=described, **served or {})
    backend, machines = DistributedModel(served, server, lambda text: None), Machines(server, token, keys and keys.public)
    try:
        for name in names:
            machines.join(name)
        eventually(lambda: machines.problems or len([one for one in backend.machines() if one.alive]) == 1 + len(names))
        if machines.problems:
            raise machines.problems[0]
        yield BatchingEngine(backend, most_running=4, most_waiting=100, clock=time.monotonic), machines
    finally:
        backend.close()
        for _, thread in machines.running.values():
            thread.join()


def finish(engine: BatchingEngine, after_each_step: Callable[[], None] = lambda: None) -> None:
    while engine.busy:
        engine.step()
        after_each_step()


def alone(model, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    found = []
    for prompt, length in zip(prompts, lengths, strict=True):
        engine, heard = BatchingEngine(LocalBackend(model), most_running=1, most_waiting=1, clock=time.monotonic), Heard()
        engine.submit(job(prompt, heard, length))
        finish(engine)
        found.append(heard.tokens)
    return found


PROMPTS, LENGTHS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [8], list(range(30))], [8, 12, 14, 6]


@pytest.mark.parametrize(
    ("kind", "machines"),
    [
        ("gpt", 1),
        ("gpt", 3),
        ("switch", 3),
        ("qwen2", 2),
        ("olmoe", 2),
        *(pytest.param(kind, 2, marks=pytest.mark.long) for kind in ("hash", "llama", "gpt2")),
    ],
)
def test_several_machines_write_the_tokens_of_one(kind, machines):
    model, described = make(kind)
    with spread(model, described, [f"pi{i}" for i in range(machines)]) as (engine, _):
        assert sum(one.layers[1] - one.layers[0] + 1 for one in engine.backend.machines()) == 6
        heard = [Heard() for _ in PROMPTS]
        for prompt, length, one in zip(PROMPTS, LENGTHS, heard, strict=True):
            engine.submit(job(prompt, one, length))
            engine.step()
        finish(engine)
        assert [one.tokens for one in heard] == alone(model, PROMPTS, LENGTHS)
        assert not engine.backend.requests.active
        assert not engine.backend.dispatch.in_flight


@pytest.mark.parametrize("kind", ["gpt", "qwen2"])
def test_the_tokens_of_prompts_are_scored_over_machines(kind, monkeypatch):
    """In chunks of 8 tokens; in the middle of it a machine is lost."""
    monkeypatch.setattr(batch_scheduler, "_NUMBERS_AT_ONCE", 8 * VOCABULARY)
    model, described = make(kind)
    with spread(model, described, ["pi1", "pi2"]) as (engine, machines):
        split_evenly(engine, 3)
        lost = next(stage.name for stage in engine.backend.placement.current.stages if stage.name != SERVER_NODE)
        collectors, heard = [PromptLogprobs(prompt, 1) for prompt in PROMPTS], [Heard() for _ in PROMPTS]
        means = [HiddenStateMean(pooling) for pooling in ("mean", "last")]
        for prompt, collector, one in zip(PROMPTS, collectors, heard, strict=True):
            engine.submit(replace(job(prompt, one, 3), collector=collector))
        engine.submit(*(replace(job(PROMPTS[3], Heard(), 0), collector=mean) for mean in means))
        eventually(lambda: engine.step() or len(collectors[3].found) > 8)
        machines.unplug(lost, engine.backend.node_server)
        finish(engine)
        assert [one.tokens for one in heard] == alone(model, PROMPTS, [3] * 4)
    with torch.no_grad():
        for prompt, collector in zip(PROMPTS, collectors, strict=True):
            logprobs_LV = model(torch.tensor([prompt]))[0].double().log_softmax(-1)
            expected = [logprobs_LV[at, token].item() for at, token in enumerate(prompt[1:])]
            assert [one.logprob for one in collector.found[1:]] == pytest.approx(expected, abs=1e-4)
        hidden_LD = model.hidden(torch.tensor([PROMPTS[3]]))[0].double()
    for mean, expected_D in zip(means, (hidden_LD.mean(0), hidden_LD[-1]), strict=True):
        assert mean.embedding() == pytest.approx((expected_D / expected_D.norm()).tolist(), abs=1e-5)


def test_layers_that_go_evenly_go_to_slow_machines_and_to_late_ones():
    model, described = make("gpt")
    with spread(model, described, ["pi1", "pi2"], spread="even") as (engine, machines):
        placement = engine.backend.placement
        for node in placement.nodes.values():
            node.layer_s = 1000.0 if node.name == "pi2" else 0.001  # a fast split would leave it out
        engine.backend.placement.replan()
        assert [stage.layers for stage in placement.current.stages] == [(0, 2), (2, 4), (4, 6)]
        machines.join("pi3")
        eventually(lambda: len(placement.current.stages) == 4)
        assert {stage.name for stage in placement.current.stages} == {SERVER_NODE, "pi1", "pi2", "pi3"}
        machines.unplug("pi2", engine.backend.node_server)
        assert {stage.name for stage in placement.current.stages} == {SERVER_NODE, "pi1", "pi3"}
        machines.join("pi2")
        eventually(lambda: len(placement.current.stages) == 4)
        heard = Heard()
        engine.submit(job([3, 1, 4], heard, 12))
        finish(engine)
        assert [heard.tokens] == alone(model, [[3, 1, 4]], [12])


def test_a_machine_without_the_files_gets_its_layers_over_encrypted_tcp(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    model, described = make("gpt")
    received = []
    monkeypatch.setattr(RemoteWeights, "_receive", lambda self, name, *rest: received.append(name) or original(self, name, *rest))
    with spread(model, described, ["pi1"], keys=new_keys()) as (engine, machines):
        split_evenly(engine, 2)
        heard = Heard()
        engine.submit(job([3, 1, 4], heard, 12))
        finish(engine)
        assert [heard.tokens] == alone(model, [[3, 1, 4]], [12])
        assert received
        assert all(name.startswith("blocks.") for name in received)
        stranger = connect_to(Endpoint(machines.server.address, "another token", new_keys().public))
        with pytest.raises((Unreachable, Refused)):
            stranger.call(Message({"kind": "node"}), 0.3)
        stranger.close()


original = RemoteWeights._receive


def split_evenly(engine: BatchingEngine, machines: int) -> None:
    """Machines of equal speed: a split that uses all of them, whatever was measured in this moment."""
    backend = engine.backend
    with backend._changed:
        for node in backend.placement.nodes.values():
            node.layer_s, node.fixed_s = 1.0, 0.0
        backend.placement.use_route(backend.placement.plan())
        backend.rerouting.reroute()
        assert len(backend.placement.current.stages) == machines


def test_a_machine_without_a_stop_loads_as_many_layers_as_it_has_room_for():
    planner, stages = (
        LayerPlanner([LayerSize(10, 10)] * 4),
        (RouteStage("pi1", LayerRange(0, 2)), RouteStage("pi2", LayerRange(2, 3)), RouteStage("pi3", LayerRange(3, 4))),
    )
    assert planner.reserve(stages, NodeState("pi4", 1.0, 40)) == [(0, 2), (2, 3), (3, 4)]
    assert planner.reserve(stages, NodeState("pi4", 1.0, 20)) == [(0, 2)]
    assert planner.reserve(stages, NodeState("pi4", 1.0, 19)) == [(2, 3)]
    ready = NodeState("pi5", 1.0, 40, assigned={LayerRange(2, 3)})
    assert planner.with_replacement(stages, "pi2", [NodeState("pi4", 1.0, 40), ready]) == (
        stages[0],
        RouteStage("pi5", LayerRange(2, 3)),
        stages[2],
    ), "it need not load"


@pytest.mark.parametrize("spare", [False, True])
def test_a_machine_that_is_unplugged_in_mid_sentence_changes_no_token(spare):
    model, described = make("gpt")
    with spread(model, described, ["pi1", "pi2", "pi3"] if spare else ["pi1", "pi2"]) as (engine, machines):
        split_evenly(engine, 3)
        backend = engine.backend
        lost = backend.placement.current.stages[1].name
        wanted = {stage.layers for stage in backend.placement.current.stages if stage.name != SERVER_NODE}
        reserves = [node.assigned for node in spare_nodes(backend.placement.current.stages, backend.placement.alive())]
        assert [wanted <= assigned for assigned in reserves] == [True] * spare, "a spare has loaded them beforehand"
        heard = [Heard() for _ in PROMPTS]
        for prompt, length, one in zip(PROMPTS, LENGTHS, heard, strict=True):
            engine.submit(job(prompt, one, length))

        def pull() -> None:
            if lost in machines.running and len(heard[2].tokens) >= 8:
                machines.unplug(lost, engine.backend.node_server)

        finish(engine, pull)
        assert lost not in machines.running
        assert len(engine.backend.placement.current.stages) == (3 if spare else 2)
        assert [one.end for one in heard] == ["length"] * 4
        assert [one.tokens for one in heard] == alone(model, PROMPTS, LENGTHS)
        assert [one.alive for one in engine.backend.machines() if one.name == lost] == [False]


@pytest.fixture
def nothing_fits(monkeypatch):
    """The machines of these names load one layer, to measure it before they join, and none afterwards."""
    names, load = set[str](), LayerHost.load

    def refuse(self, layers):
        if threading.current_thread().name in names and layers not in self.loaded and hasattr(self, "joined"):
            raise MemoryError(f"no room for {layers}")
        self.joined = True
        return load(self, layers)

    monkeypatch.setattr(LayerHost, "load", refuse)
    return names


def holds_nothing(backend: DistributedModel, name: str) -> bool:
    """Whether a machine has not even two layers, and is not asked to load any. While it says so itself, half of that is written down."""
    with backend._changed:
        node = backend.placement.nodes.get(name)
        return node is not None and node.memory_bytes < backend.placement.planner.bytes_of(LayerRange(0, 2)) and not node.assigned


def test_a_spare_machine_that_could_not_load_takes_nobodys_place(nothing_fits):
    model, described = make("gpt")
    with spread(model, described, ["pi1", "pi2"]) as (engine, machines):
        split_evenly(engine, 3)
        backend, heard = engine.backend, Heard()
        nothing_fits.add("pi3")
        machines.join("pi3")
        eventually(lambda: holds_nothing(backend, "pi3"))
        assert backend.placement.upcoming is None
        engine.submit(job([3, 1, 4], heard, 20))
        while len(heard.tokens) < 5:
            engine.step()
        machines.unplug("pi2", backend.node_server)
        finish(engine)
        assert (heard.end, [heard.tokens]) == ("length", alone(model, [[3, 1, 4]], [20]))
        assert not backend.placement.current.uses_node("pi3")


@pytest.mark.parametrize("failing", ["pi1", SERVER_NODE])
def test_layers_that_a_machine_cannot_load_go_to_others_and_a_request_waits_for_that(failing, nothing_fits):
    model, described = make("gpt")
    with spread(model, described, ["pi1"], expected=99) as (engine, _):
        heard = Heard()
        nothing_fits.add("shoal-layers" if failing == SERVER_NODE else failing)
        engine.submit(job([3, 1, 4], heard, 10))
        engine.step()
        split_evenly(engine, 2)
        finish(engine)
        assert (heard.end, [heard.tokens]) == ("length", alone(model, [[3, 1, 4]], [10]))
        assert [stage.name for stage in engine.backend.placement.current.stages] == [SERVER_NODE if failing == "pi1" else "pi1"]


def test_a_cache_that_cannot_be_cut_is_refilled_from_the_beginning_after_a_restart():
    model, described = make("mistral")  # whose attention has a window
    with spread(model, described, ["pi1", "pi2", "pi3"]) as (engine, machines):
        split_evenly(engine, 3)
        backend, heard = engine.backend, Heard()
        engine.submit(job([3, 1, 4, 1, 5, 9, 2, 6], heard, 20))
        while len(heard.tokens) < 8:
            engine.step()
        last = backend.placement.current.stages[-1].name
        backend.placement.nodes[last].commands = Deaf()  # the others have read the next token, and this machine has not heard of it
        engine.scheduler.start(engine.running)
        eventually(lambda: any(2 in in_flight.sent for in_flight in backend.dispatch.in_flight.values()))
        machines.unplug(last, backend.node_server)
        finish(engine)
        assert (heard.end, [heard.tokens]) == ("length", alone(model, [[3, 1, 4, 1, 5, 9, 2, 6]], [20]))


class Deaf(deque):
    """Orders that nobody reads."""

    def append(self, command) -> None:
        pass


def test_all_machines_but_the_server_may_go_one_after_the_other():
    model, described = make("hash")
    with spread(model, described, ["pi1", "pi2"]) as (engine, machines):
        split_evenly(engine, 3)
        heard = Heard()
        engine.submit(job([3, 1], heard, 30))

        def pull() -> None:
            for name, tokens in (("pi2", 5), ("pi1", 15)):
                if name in machines.running and len(heard.tokens) >= tokens:
                    machines.unplug(name, engine.backend.node_server)

        finish(engine, pull)
        assert [heard.tokens] == alone(model, [[3, 1]], [30])
        assert [stage.name for stage in engine.backend.placement.current.stages] == [SERVER_NODE]


def test_a_machine_that_comes_back_under_its_name_has_none_of_its_caches():
    model, described = make("gpt")
    with spread(model, described, ["pi1"]) as (engine, machines):
        split_evenly(engine, 2)
        backend, heard = engine.backend, Heard()
        backend.placement.nodes[SERVER_NODE].memory_bytes = 3.5 * max(
            backend.placement.planner.layer_bytes
        )  # nobody has room for all layers
        engine.submit(job([3, 1], heard, 20))
        while len(heard.tokens) < 5:
            engine.step()
        machines.unplug("pi1", backend.node_server)
        engine.step()
        assert backend.placement.current is None
        machines.join("pi1")
        finish(engine)
        assert [heard.tokens] == alone(model, [[3, 1]], [20])


def test_a_machine_that_joins_while_others_answer_is_used_by_new_requests():
    model, described = make("gpt")
    with spread(model, described, [], expected=1) as (engine, machines):
        engine.backend.placement.nodes[SERVER_NODE].layer_s = 1.0  # so slow that any other machine helps
        first, second = Heard(), Heard()
        engine.submit(job([3, 1], first, 40))
        for _ in range(3):
            engine.step()
        machines.join("pi1")
        eventually(lambda: engine.backend.placement.current.uses_node("pi1"))
        assert [stage.name for stage in engine.backend.placement.current.stages] == ["pi1"]
        assert engine.backend.microbatches == 2, "the server embeds and chooses tokens meanwhile"
        engine.submit(job([4, 4], second, 5))
        finish(engine)
        assert [first.tokens, second.tokens] == alone(model, [[3, 1], [4, 4]], [40, 5])


def test_a_machine_that_turns_out_to_be_slow_gets_fewer_layers_for_new_requests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.serve.nodes.pipeline._REPLAN_EVERY", 30)
    monkeypatch.setattr("shoal.serve.nodes.distributed_model._WINDOW_S", 0.0)  # what the server itself takes is not looked at
    model, described = make("gpt")
    with spread(model, described, ["pi1"]) as (engine, _):
        split_evenly(engine, 2)
        backend, first, second = engine.backend, Heard(), Heard()
        before, done = backend.placement.current, backend.on_read

        def reported(name, number, y_BLD, seconds, handed_on=False):
            done(name, number, y_BLD, 12.0 if name == "pi1" else 3.0, handed_on)

        monkeypatch.setattr(backend, "on_read", reported)
        (number,) = engine.submit(job([3, 1], first, 80))
        while len(first.tokens) < 40:
            engine.step()
        assert backend.requests.active[number].route == before, "what is under way stays where its caches are"
        eventually(lambda: backend.placement.current != before)
        layers = {stage.name: stage.layers.last - stage.layers.first for stage in backend.placement.current.stages}
        assert layers["server"] == 5
        engine.submit(job([4, 4], second, 20))
        finish(engine)
        assert [first.tokens, second.tokens] == alone(model, [[3, 1], [4, 4]], [80, 20])


def test_what_the_server_does_beside_its_layers_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.serve.nodes.pipeline._REPLAN_EVERY", 30)
    model, described = make("gpt")
    with spread(model, described, ["pi1"]) as (engine, _):
        split_evenly(engine, 2)
        backend, heard = engine.backend, Heard()
        monkeypatch.setattr(backend, "_now_spent", iter([(0.0, 0.0, 0.0), (10.0, 9.0 * torch.get_num_threads(), 3.0)] * 100).__next__)
        backend._spent = backend._now_spent()
        engine.submit(job([3, 1], heard, 40))
        finish(engine)
        assert backend.placement.nodes[SERVER_NODE].fixed_s == pytest.approx(6.0 / 30)


def test_requests_that_end_early_are_forgotten_on_all_machines():
    model, described = make("gpt")
    with spread(model, described, ["pi1"]) as (engine, _):
        split_evenly(engine, 2)
        left, kept = Heard(), Heard()
        numbers = engine.submit(job([3, 1], left, 60), job([5], kept, 20))
        for _ in range(6):
            engine.step()
        engine.cancel(numbers[:1])
        finish(engine)
        assert (left.end, kept.end) == ("cancelled", "length")
        assert [kept.tokens] == alone(model, [[5]], [20])
        own = engine.backend.local_node
        eventually(lambda: not own.node.commands and not any(loaded.caches.requests for loaded in own.host.loaded.values()))


def test_a_machine_that_answers_nonsense_is_let_go_and_the_answer_goes_on():
    model, described = make("gpt")
    with spread(model, described, ["pi1"]) as (engine, _):
        split_evenly(engine, 2)
        backend, heard = engine.backend, Heard()
        original = backend.node_server._handle_reports

        def short(node, header, frames):
            lies = [{**done, "shape": [1, 1, 3]} if done["kind"] == "read" else done for done in header["done"]]
            original(node, {**header, "done": lies}, frames)

        backend.node_server._handle_reports = short
        engine.submit(job([3, 1], heard, 10))
        finish(engine)
        assert [heard.tokens] == alone(model, [[3, 1]], [10])
        assert [one.name for one in backend.machines() if one.alive] == [SERVER_NODE]


def test_training_workers_and_strangers_are_told_what_this_is():
    model, described = make("gpt")
    with spread(model, described, [], expected=1) as (_, machines):
        client = connect_to(machines.server_address)
        answer = client.call(Message({"kind": "join", "name": "w1"}), HANG_S)
        assert "--node" in answer.header["detail"]
        assert client.call(Message({"kind": "turn"}), HANG_S).header["kind"] == "refused"
        assert client.call(Message({"kind": "turn", "session": "no", "done": []}), HANG_S).header["detail"] == "session"
        assert client.call(Message({"kind": "enter", "layer_s": -1, "memory_bytes": 1}), HANG_S).header["kind"] == "refused"
        client.close()
        with pytest.raises(Unreachable):
            client.call(Message({"kind": "node"}), 0.1)


def test_a_machine_that_reports_again_and_again_what_it_reaches_is_heard_once():
    """Each report is told to the user, and thousands fit into a message."""
    told: list[str] = []
    placement = NodePlacement(LayerPlanner([LayerSize(10, 10)] * 4, even=True), expected=2, probes=True, tell=told.append)
    for name in ("pi1", "pi2"):
        placement.add(NodeState(name, 0.1, 1000.0, endpoint=Endpoint(name, "token", None)))
    for reached in (True, False) * 10:
        placement.on_probed("pi1", "pi2", reached)
        placement.on_probed("pi1", "nobody", reached)
    assert list(placement.reachable.values()) == [True]
    assert [line for line in told if "pi1 sends" in line] == ["pi1 sends to pi2 directly"]
