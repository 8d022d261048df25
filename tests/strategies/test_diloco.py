"""DiLoCo, against the same arithmetic written out by hand, and each mistake on record."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.runs.build_run import RunParts, assemble, feed_for_seat
from shoal.runs.worker_run import JoinedWorker
from tests.support.layered_settings import loaded, merged

MLP = {"model": {"kind": "mlp", "hidden_sizes": [16]}}
LEARNING = {
    "training": {
        "batch_size": 20,
        "device": "cpu",
        "optimizer": {"name": "AdamW", "learning_rate": 0.005},
        "schedule": {"kind": "cosine", "warmup_steps": 3},
    },
    "evaluation": {"strategy": "never"},
    "logging": {"every_steps": 1},
}
SMALL = MLP | LEARNING
DILOCO = {"strategy": {"kind": "diloco", "inner_steps": 5, "rounds": 4, "round_timeout_s": 60.0}}
PLAIN_OUTER = {"strategy": {"outer": {"learning_rate": 1.0, "momentum": 0.0}}}


def by_hand(settings: dict[str, Any], workers: int, outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> torch.Tensor:
    """The weights after all rounds: θ₀, inner steps from it in every worker, the mean of θ₀ − θ as the gradient at θ₀."""
    run = loaded(settings).run
    strategy: Any = run.strategy
    total = run.training.max_steps
    assert total is not None
    islands: list[RunParts] = [assemble(run, length=lambda samples: total) for _ in range(workers)]
    feeds = [feed_for_seat(run, one.data, seat, workers) for seat, one in enumerate(islands)]
    shared = torch.nn.Parameter(islands[0].engine.vector.clone())
    optimizer = outer([shared])
    for _ in range(strategy.rounds):
        moved = []
        for island, feed in zip(islands, feeds, strict=True):
            island.engine.vector.copy_(shared.detach())
            for _ in range(strategy.inner_steps):
                island.engine.step([next(feed) for _ in range(run.training.gradient_accumulation_steps)])
            moved.append(shared.detach() - island.engine.vector)
        shared.grad = torch.stack(moved).mean(0)
        optimizer.step()
    for feed in feeds:
        feed.close()
    return shared.detach()


def vector_of(outcome: Any) -> torch.Tensor:
    vector: torch.Tensor = outcome.loop.engine.vector
    return vector


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_rounds_are_what_the_arithmetic_says(cluster: Callable[..., Any], workers: int) -> None:
    """Fails on a step on top of θᵢ, on a sum for the mean, on momentum applied twice, on inner state or schedules that start over."""
    together = cluster(SMALL, DILOCO, workers=workers)
    expected = by_hand(merged(SMALL, DILOCO), workers, lambda vector: torch.optim.SGD(vector, lr=0.7, momentum=0.9, nesterov=True))
    assert together.loop.step == 4
    assert together.summary["samples"] == 4 * 5 * 20 * workers
    assert torch.allclose(vector_of(together), expected, atol=1e-6)


def test_one_worker_with_a_plain_outer_step_is_plain_training(cluster: Callable[..., Any], alone: Callable[..., Any]) -> None:
    together = cluster(SMALL, DILOCO, PLAIN_OUTER, workers=1)
    single = alone(SMALL, {"training": {"max_steps": 20}})
    assert torch.equal(vector_of(together), single.engine.vector)


def test_also_with_dropout_accumulation_and_a_short_last_round(cluster: Callable[..., Any], alone: Callable[..., Any]) -> None:
    model = {
        "model": {"kind": "gpt", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 16, "dropout": 0.2},
        "data": {"max_samples": 400},
        "training": {"batch_size": 4, "max_steps": 17, "gradient_accumulation_steps": 2},
    }
    together = cluster(LEARNING, DILOCO, PLAIN_OUTER, model, {"strategy": {"rounds": None}}, workers=1)
    single = alone(LEARNING, model)
    assert together.loop.step == 4
    assert together.summary["samples"] == single.recorder.samples
    assert torch.equal(vector_of(together), single.engine.vector)


def test_one_worker_with_momentum_is_not_plain_training(cluster: Callable[..., Any], alone: Callable[..., Any]) -> None:
    together = cluster(SMALL, DILOCO, workers=1)
    assert not torch.allclose(vector_of(together), alone(SMALL, {"training": {"max_steps": 20}}).engine.vector, atol=1e-3)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_mean_of_the_workers_is_what_a_plain_outer_step_leaves(cluster: Callable[..., Any], accumulation: int) -> None:
    more = {"training": {"gradient_accumulation_steps": accumulation}}
    together = cluster(SMALL, DILOCO, PLAIN_OUTER, more, workers=2)
    expected = by_hand(merged(SMALL, DILOCO, more), 2, lambda vector: torch.optim.SGD(vector, lr=1.0))
    assert torch.allclose(vector_of(together), expected, atol=1e-6)


def test_the_inner_learning_rate_follows_one_schedule_through_all_rounds(cluster: Callable[..., Any]) -> None:
    together = cluster(SMALL, DILOCO, workers=2)
    rates = [record["inner_learning_rate"] for record in together.loop.directory.metrics() if record["split"] == "train"]
    assert len(rates) == 4
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1 * rates[0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.7, 0.7, 0.7, 0.7]),
        ("linear", [0.7, 0.525, 0.35, 0.175]),
        ("cosine", [0.7, 0.5975, 0.35, 0.1025]),
        ("polynomial", [0.7, 0.39375, 0.175, 0.04375]),
    ],
)
def test_the_outer_learning_rate_follows_its_schedule(cluster: Callable[..., Any], kind: str, expected: list[float]) -> None:
    together = cluster(SMALL, DILOCO, {"strategy": {"outer_schedule": kind}}, workers=1)
    rates = [record["outer_learning_rate"] for record in together.loop.directory.metrics() if record["split"] == "train"]
    assert rates == pytest.approx(expected, abs=1e-4)


def test_the_outer_gradient_is_clipped_after_it_was_averaged(cluster: Callable[..., Any]) -> None:
    clipped = {"strategy": {"rounds": 1, "outer_clip_norm": 0.01, "outer": {"learning_rate": 1.0, "momentum": 0.0}}}
    together = cluster(SMALL, DILOCO, clipped, workers=2)
    start = assemble(loaded(merged(SMALL, DILOCO)).run, length=lambda samples: 5).engine.vector
    assert float((vector_of(together) - start).norm()) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Muon", "Adafactor"])
def test_any_outer_optimizer_moves_the_weights(cluster: Callable[..., Any], name: str) -> None:
    """Momentum reaches those that take one, and nobody else."""
    outer = {"strategy": {"rounds": 2, "outer": {"name": name, "learning_rate": 0.01}}}
    together = cluster(SMALL, DILOCO, outer, workers=1)
    assert together.loop.step == 2
    assert bool(torch.isfinite(vector_of(together)).all())


def test_arguments_of_the_outer_optimizer_count_and_wrong_ones_are_told(cluster: Callable[..., Any]) -> None:
    heavy = cluster(SMALL, DILOCO, {"strategy": {"outer": {"kwargs": {"nesterov": False}}}}, workers=1)
    usual = cluster(SMALL, DILOCO, workers=1)
    assert not torch.equal(vector_of(heavy), vector_of(usual))
    with pytest.raises(ShoalError, match=r"strategy\.outer\.name: SGD refuses its settings"):
        cluster(SMALL, DILOCO, {"strategy": {"outer": {"kwargs": {"weight_decay": -1.0}}}}, workers=1)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Muon", "RMSprop"])
def test_any_inner_optimizer_learns(cluster: Callable[..., Any], name: str) -> None:
    rate = {"SGD": 0.1, "Adam": 0.005, "Muon": 0.01, "RMSprop": 0.002}[name]
    learning = {
        "training": {"optimizer": {"name": name, "learning_rate": rate}, "schedule": {"kind": "constant", "warmup_steps": 0}},
        "strategy": {"inner_steps": 10, "rounds": 8},
        "evaluation": {"strategy": "steps"},
    }
    assert cluster(SMALL, DILOCO, learning, workers=2).accuracy > 0.8


def test_the_held_out_data_is_judged_once_a_round_and_no_worker_sees_it(cluster: Callable[..., Any]) -> None:
    seen: list[torch.Tensor] = []

    def watch(joined: JoinedWorker) -> None:
        assert joined.worker is not None
        step = joined.worker.engine.step
        joined.worker.engine.step = lambda batches: (seen.extend(batch["image"] for batch in batches), step(batches))[1]  # type: ignore[method-assign]

    together = cluster(SMALL, DILOCO, {"evaluation": {"strategy": None}}, workers=2, change=watch)
    judged = [record["step"] for record in together.loop.directory.metrics() if record["split"] == "eval"]
    assert judged == [1, 2, 3, 4]
    held_out = torch.cat([batch["image"] for batch in together.loop.evaluator.batches()]).flatten(1)
    learned = torch.cat(seen).flatten(1)
    assert len(learned) == 2 * 4 * 5 * 20
    shared = (torch.cdist(learned.double(), held_out.double()) == 0).any(1).sum()
    assert shared <= 2  # a few digits of the set are drawn twice


def test_an_evaluation_that_a_gpu_has_no_room_for_is_done_on_the_cpu(cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def on_a_full_gpu(run: Any, task: Any, device: torch.device, steps: int) -> SingleEngine:
        tried.append(device.type)
        if device.type == "cuda":
            raise RuntimeError("CUDA error: out of memory")
        return SingleEngine(run, task, device, steps)

    monkeypatch.setattr("shoal.runs.training.background_eval.SingleEngine", on_a_full_gpu)
    monkeypatch.setattr("shoal.runs.coordinator_setup._evaluation_device", lambda run, warn: torch.device("cuda"))
    together = cluster(SMALL, DILOCO, {"evaluation": {"strategy": None}}, workers=1)
    judged = [record["step"] for record in together.loop.directory.metrics() if record["split"] == "eval"]
    assert judged == [1, 2, 3, 4]
    assert tried == ["cuda", "cpu"], "and from then on there"


def test_steps_in_settings_are_those_of_a_worker(cluster: Callable[..., Any]) -> None:
    """checkpoint_steps: 10 with 5 inner steps saves after every other round."""
    together = cluster(SMALL, DILOCO, {"checkpoint": {"strategy": "steps", "every_steps": 10}}, workers=1)
    assert [path.name for path in together.loop.recorder.checkpoints.all()] == ["step-00000002", "step-00000004"]


def test_a_poisoned_round_is_not_sent_and_does_not_poison_the_next(cluster: Callable[..., Any]) -> None:
    def poison(joined: JoinedWorker) -> None:
        assert joined.worker is not None
        engine, calls = joined.worker.engine, [0]
        step = engine.step

        def poisoned(batches: Any) -> Any:
            result = step(batches)
            calls[0] += 1
            if calls[0] == 7:
                engine.vector[3] = float("nan")
            return result

        engine.step = poisoned  # type: ignore[method-assign]

    together = cluster(SMALL, DILOCO, workers=1, change=poison)
    assert together.loop.step == 4
    assert together.workers[0].worker.encoder.poisoned == 1
    assert bool(torch.isfinite(vector_of(together)).all())


def test_a_worker_that_leaves_and_one_that_joins_late_are_no_trouble(cluster: Callable[..., Any]) -> None:
    def leave(joined: JoinedWorker) -> None:
        worker = joined.worker
        assert worker is not None
        if joined.name != "w2":
            return
        note = worker._note

        def counted(*arguments: Any) -> None:
            note(*arguments)
            worker.protocol.stopping = worker.counts["accepted"] >= 2

        worker._note = counted  # type: ignore[method-assign]

    together = cluster(SMALL, DILOCO, workers=3, change=leave)
    assert together.loop.step == 4
    assert together.summary["contributions"]["accepted"] == 2 + 4 + 4


def test_statistics_of_batch_normalisation_travel(cluster: Callable[..., Any]) -> None:
    gan = {
        "model": {"kind": "dcgan", "image_size": 16, "latent_dim": 8, "generator_features": 4, "discriminator_features": 4},
        "training": {"batch_size": 16, "optimizer": {"name": "Adam", "learning_rate": 0.001}},
    }
    outcome = cluster(LEARNING, gan, DILOCO, {"strategy": {"rounds": 2}}, workers=2)
    moved = [value for name, value in outcome.weights.items() if name.endswith("running_mean")]
    assert moved
    assert all(float(value.abs().sum()) > 0 for value in moved)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_run_continued_from_a_checkpoint_comes_to_the_same_numbers(cluster: Callable[..., Any], codec: str) -> None:
    """Both optimizers, both schedules, the data and what a codec owes go on; rounds that were done are not done again."""
    often = {"checkpoint": {"strategy": "steps", "every_steps": 5}, "updates": {"codec": {"kind": codec}}}
    whole = cluster(SMALL, DILOCO, often, workers=2)
    middle = whole.loop.directory.path / "checkpoints" / "step-00000002"
    rest = cluster(SMALL, DILOCO, often, {"checkpoint": {"resume_from": str(middle)}}, workers=2)
    assert rest.loop.step == 4
    assert rest.summary["contributions"]["accepted"] == 2 * 2
    if codec == "none":
        assert torch.equal(vector_of(rest), vector_of(whole))
    assert torch.allclose(vector_of(rest), vector_of(whole), atol=2e-3)  # a worker that comes back gets weights without the codec's losses


def test_a_worker_that_lost_its_state_starts_its_optimizer_over(cluster: Callable[..., Any]) -> None:
    often = {"checkpoint": {"strategy": "steps", "every_steps": 5}}
    whole = cluster(SMALL, DILOCO, often, workers=1)
    middle = whole.loop.directory.path / "checkpoints" / "step-00000002"
    for kept in (whole.loop.directory.path / "workers" / "w1").glob("step-*"):
        shutil.rmtree(kept)
    rest = cluster(SMALL, DILOCO, often, {"checkpoint": {"resume_from": str(middle)}}, workers=1)
    assert rest.loop.step == 4
    assert not torch.equal(vector_of(rest), vector_of(whole))
