"""What many virtual workers learn is computed in one call, and is what each would have computed by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import Run
from shoal.config.load import ConfigFile, Override, resolve
from shoal.runs.live_objects import NO_LIVE_OBJECTS, players_for, task_for
from shoal.simulate import SimulatedMachine, SimulationReport, simulate
from shoal.simulate import batched_workers as together
from shoal.simulate.batched_workers import BatchedEngine, BatchedSteps, PrefetchedFeed, reason_not_batched
from shoal.simulate.meta_model import data_of
from shoal.tasks import Batch

MLP = {"model.hidden_sizes": "[16]"}
GPT = {
    "model.hidden_size": "16",
    "model.num_layers": "2",
    "model.num_heads": "2",
    "model.max_seq_len": "8",
    "data.sequence_length": "8",
    "data.max_train_samples": "200",
    "model.dropout": "0",
}
MODELS = {"mlp": ("starter", MLP), "gpt": ("demo-gpt", GPT), "rotary gpt": ("demo-gpt", GPT | {"model.positions": "rotary"})}
STRATEGIES = {
    "edp": {"strategy.kind": "edp"},
    "syncps": {"strategy.kind": "syncps"},
    "diloco": {"strategy.kind": "diloco", "strategy.inner_steps": "3", "strategy.balance_speeds": "true"},
}


def run_of(file: str, **settings: str) -> Run:
    common = {"training.batch_size": "4", "training.epochs": "5", "evaluation.strategy": "never"}
    loaded = resolve([ConfigFile(file)], [Override(name, value, name) for name, value in (common | settings).items()])
    assert loaded.ok, loaded.problems
    return loaded.run


def engine_of(run: Run, seed: int = 0) -> BatchedEngine:
    """An engine whose weights no other has."""
    info = data_of(run).info
    engine = BatchedEngine(run, task_for(run, NO_LIVE_OBJECTS, players_for(run, NO_LIVE_OBJECTS, info), info), 100)
    if seed:
        engine.vector.add_(torch.randn(engine.vector.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.01)
        engine.changed()
    return engine


def batches_of(run: Run, sizes: list[int]) -> list[Batch]:
    samples: Any = data_of(run).train
    return [samples.batch(range(10 * number, 10 * number + size)) for number, size in enumerate(sizes)]


def simulated(run: Run, count: int = 6) -> SimulationReport:
    there = [SimulatedMachine(f"w{number}", 1.0 + 0.1 * number) for number in range(count)]
    return simulate(run, there, hours=0.01, seed=3, learns=True)


@pytest.mark.parametrize("shared", [True, False], ids=["the same weights", "weights of their own"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_group_are_those_that_each_computes_by_itself(name: str, shared: bool) -> None:
    """Steps of two batches, of which one is smaller than the others."""
    file, settings = MODELS[name]
    run = run_of(file, **settings, **{"training.gradient_accumulation_steps": "2"})
    engines = [engine_of(run, 0 if shared else seed) for seed in range(1, 5)]
    batches = batches_of(run, [4, 4, 4, 3, 4, 4, 4, 4])
    pairs = [batches[at : at + 2] for at in range(0, 8, 2)]
    all_of_them = BatchedSteps(run, engine_of(run), 300, leased=False)
    for engine, pair in zip(engines, pairs, strict=True):
        all_of_them.begin(engine, PrefetchedFeed(iter(pair)), 0)
    all_of_them.finish(engines[2])
    assert all_of_them.reason == ""
    assert all_of_them.computed == 8
    for engine, pair in zip(engines, pairs, strict=True):
        found = engine.gradients(pair)
        gradient = engine.gradient.clone()
        again = engine.gradients(pair)
        torch.testing.assert_close(gradient, engine.gradient, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.metrics, again.metrics, rtol=1e-4, atol=1e-6)
        assert (found.weight, found.samples) == (again.weight, again.samples)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt", marks=pytest.mark.long)])
def test_workers_that_learn_together_learn_what_they_would_alone(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, settings = MODELS[name]
    run = run_of(file, **settings, **STRATEGIES[strategy])
    first, again = simulated(run), simulated(run)
    assert (first.digest, first.losses) == (again.digest, again.losses), "the same seed gives the same"
    calls = int(first.gradients.split(" in ")[1].split(" ")[0])
    assert calls < first.judged, "several are in a call"
    monkeypatch.setattr(together, "reason_not_batched", lambda *_: "as the test wants it")
    alone = simulated(run)
    assert alone.gradients == "one by one: as the test wants it"
    assert (alone.digest, alone.outcomes, alone.samples) == (first.digest, first.outcomes, first.samples)
    assert [loss for _, loss in first.losses] == pytest.approx([loss for _, loss in alone.losses], rel=1e-3)


@pytest.mark.parametrize(
    ("file", "settings", "reason"),
    [
        ("demo-gpt", GPT | {"model.dropout": "0.1"}, "drops activations at random"),
        ("demo-gpt", GPT | {"training.precision.kind": "bf16"}, "training.precision is bf16"),
        ("demo-gpt", GPT | {"model.kind": "moe"}, "keeps statistics or other state"),
        ("starter", MLP | {"strategy.kind": "workunits"}, "units that they lease"),
        ("starter", {"model.kind": "dcgan", "model.image_size": "8"}, "there are several networks"),
        ("dist-llm-train/wan-conservative", {"data.max_train_samples": "200"}, "torch cannot map this model over workers"),
    ],
)
def test_what_cannot_be_computed_together_is_computed_one_by_one_and_says_why(file: str, settings: dict[str, str], reason: str) -> None:
    run = run_of(file, **{"strategy.kind": "async"} | settings)
    report = simulated(run, 3)
    assert report.gradients.startswith("one by one: ")
    assert reason in report.gradients
    assert dict(report.rows())["gradients"] == report.gradients
    assert report.accepted > 3


def test_a_model_that_a_group_gets_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is lost: the engines get theirs back."""
    run = run_of("starter", **MLP)
    mapped = BatchedSteps._mapped

    def wrong(self: BatchedSteps, rows: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
        gradients, metrics = mapped(self, rows)
        return 1.5 * gradients, metrics

    monkeypatch.setattr(BatchedSteps, "_mapped", wrong)
    engine, (batch,) = engine_of(run), batches_of(run, [4])
    assert reason_not_batched(run, engine, leased=False) == ""
    group, feed = BatchedSteps(run, engine_of(run), 0, leased=False), PrefetchedFeed(iter([batch]))
    group.begin(engine, feed, 0)
    group.finish(engine)
    assert group.format_counts() == "one by one: mapped over workers, this model gives different gradients"
    assert next(feed) is batch


def test_what_a_worker_began_in_a_seat_that_it_lost_is_not_computed() -> None:
    run = run_of("starter", **MLP)
    one, other = engine_of(run), engine_of(run)
    group = BatchedSteps(run, engine_of(run), 0, leased=False)
    for engine, batch in zip((one, other), batches_of(run, [4, 4]), strict=True):
        group.begin(engine, PrefetchedFeed(iter([batch])), 0)
    group.drop(other)
    group.finish(one)
    assert group.computed == 1
    assert not other.ready
