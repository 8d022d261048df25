"""Who takes part in a run, and what this process does in it, is decided before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal import TrainerConfig, train
from shoal.cli.join_worker import check_trust
from shoal.config.dialects import in_words_of
from shoal.config.load import LoadedConfig, Override, resolve_data
from shoal.errors import ShoalError
from shoal.launch.start_mode import StartMode, StartOptions, StartPlan, plan_start


def loader(settings: dict[str, Any]) -> Callable[[Sequence[Override]], LoadedConfig]:
    return lambda more: resolve_data(settings, name="config", dialect="shoal", environ={}, overrides=more)


def planned(settings: dict[str, Any], **asked: Any) -> StartPlan:
    return plan_start(loader(settings), StartOptions(**asked))


DILOCO = {"strategy": {"kind": "diloco"}}
EDP = {"strategy": {"kind": "edp"}}


@pytest.mark.parametrize(
    ("settings", "asked", "way", "strategy", "workers"),
    [
        ({}, {}, StartMode.ALONE, "local", 0),
        ({}, {"workers": 3}, StartMode.COORDINATES, "syncps", 3),
        ({"engine": {"kind": "ddp"}}, {}, StartMode.RANKS, "local", 0),
        (DILOCO, {"workers": 2}, StartMode.COORDINATES, "diloco", 2),
        (DILOCO, {"default_workers": 1}, StartMode.COORDINATES, "diloco", 1),
        (DILOCO, {"resume": True}, StartMode.COORDINATES, "diloco", 0),
        (DILOCO, {"resume": True, "default_workers": 1}, StartMode.COORDINATES, "diloco", 0),
        (DILOCO | {"cluster": {"num_workers": 4}}, {}, StartMode.COORDINATES, "diloco", 4),
        (DILOCO | {"cluster": {"num_workers": 4}, "coordinator": {"trains": True}}, {}, StartMode.COORDINATES, "diloco", 5),
        (DILOCO | {"engine": {"kind": "collectives"}, "launch": {"devices_per_node": 2}}, {}, StartMode.COORDINATES, "diloco", 1),
        (DILOCO, {}, StartMode.COORDINATES, "diloco", 1),
        (DILOCO, {"invite": True}, StartMode.COORDINATES, "diloco", 0),
        (DILOCO | {"coordinator": {"trains": True}}, {"invite": True}, StartMode.COORDINATES, "diloco", 1),
    ],
)
def test_the_plan_follows_from_settings_and_wishes(
    settings: dict[str, Any], asked: dict[str, Any], way: StartMode, strategy: str, workers: int
) -> None:
    made = planned(settings, **asked)
    assert (made.mode, made.run.strategy.kind, made.workers) == (way, strategy, workers)


def test_workers_that_need_live_objects_are_threads() -> None:
    assert planned({}, workers=2, live=("model",)).run.transport.kind == "in-process"
    assert planned({}, live=("model",)).run.transport.kind == "zmq", "one process alone has no use for it"


@pytest.mark.parametrize(
    ("settings", "asked", "words"),
    [
        ({}, {"invite": True}, "no workers to coordinate"),
        (EDP, {}, "how many workers"),
        (DILOCO | {"transport": {"kind": "in-process"}}, {"invite": True}, "other machines do not reach"),
        (DILOCO | {"transport": {"kind": "postgres"}}, {"invite": True, "hosts": ("a", "b")}, "listens at one address"),
        (DILOCO | {"transport": {"kind": "xmlrpc"}}, {"invite": True, "announce": True}, "cannot check the key of xmlrpc"),
        (DILOCO | {"transport": {"kind": "postgres", "host": "db"}}, {"invite": True, "announce": True}, "a database of others"),
        (DILOCO | {"transport": {"kind": "xmlrpc"}}, {"workers": 2, "live": ("data",)}, "transport.kind is xmlrpc"),
        (DILOCO | {"engine": {"kind": "fsdp"}}, {"workers": 2, "live": ("data",)}, "the engine fsdp is several"),
    ],
)
def test_what_cannot_be_started_is_told(settings: dict[str, Any], asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ShoalError, match=words):
        planned(settings, **asked)


def test_a_start_with_too_few_workers_for_the_rule_says_how_many_to_start() -> None:
    krum = {"strategy": {"kind": "async", "contributions_per_update": 5}, "updates": {"aggregation": {"kind": "krum", "byzantine": 1}}}
    plan = planned(krum, workers=3)
    assert plan.note == "krum needs contributions of 5 workers, not 3: the run waits for 2 more; --workers 5 starts them all here"
    assert not planned(krum, workers=5).note


class FakeWorker:
    """A worker that has joined, as far as trust goes."""

    said = ""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.run = loader(settings)([]).run

    def refuse(self, problem: BaseException) -> None:
        self.said = str(problem)


def test_a_worker_calls_only_functions_that_it_was_told_to() -> None:
    settings = {"model": {"kind": "factory", "function": "parts:net"}, "data": {"source": {"kind": "factory", "function": "parts:rows"}}}
    worker: Any = FakeWorker(settings)
    check_trust(worker, ["parts:net", "parts:rows"])
    with pytest.raises(ShoalError, match="join with --factory parts:rows"):
        check_trust(worker, ["parts:net"])
    assert "parts:rows" in worker.said, "the coordinator hears why it goes"


def test_what_goes_wrong_at_the_start_is_told_in_the_words_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a few words to learn from. " * 60)
    config = TrainerConfig("start", "text.txt", max_steps=2, diloco_loops=1, seq_len=16, inner_opt_kwargs={"foreach": True, "fused": True})
    here = ["model.kind=gpt", "data.source.kind=text", "data.source.path=text.txt", "data.streaming=false", "data.tokenizer=bytes"]
    small = ["model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "engine.kind=single", "training.device=cpu"]
    with pytest.raises(ShoalError, match=r"^inner_opt: AdamW refuses its settings") as raised:
        train(config, workers=1, overrides=[*here, *small, "transport.kind=in-process"], progress=False)
    assert "training.optimizer" not in str(raised.value)


def test_settings_in_a_message_are_named_as_the_dialect_names_them() -> None:
    told = "training.optimizer.kwargs: `lr` has a setting of its own: training.optimizer.learning_rate"
    assert in_words_of(["diloco"], told) == "inner_opt_kwargs: `lr` has a setting of its own: lr"
    assert in_words_of(["shoal"], told) == told
    assert in_words_of(["ava"], "data.tokenizer is gone, data.sequence_length too") == "data.tokenizer_name is gone, data.max_length too"
