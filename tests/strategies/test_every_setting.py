"""Every codec, rule, limit and kind of noise works with every strategy, and does something."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.config.schema.cluster import InProcess
from shoal.reporters import class_table
from shoal.reporters.progress import PlainProgress, figures
from shoal.runs.build_run import assemble, feed_for_seat
from shoal.runs.coordinator_setup import prepare
from shoal.runs.worker_run import JoinedWorker
from shoal.updates.rules import aggregation
from tests.support.layered_settings import loaded, merged
from tests.support.rules import bulyan, geometric_median, krum, multi_krum

SMALL = {
    "model": {"kind": "mlp", "hidden_sizes": [16]},
    "training": {"batch_size": 20, "max_steps": 8, "optimizer": {"name": "SGD", "learning_rate": 0.1}},
    "evaluation": {"strategy": "never"},
}
STRATEGIES = {
    "syncps": {"strategy": {"kind": "syncps", "round_timeout_s": 60.0}},
    "edp": {"strategy": {"kind": "edp", "pull_every_steps": 2}},
    "async": {"strategy": {"kind": "async", "contributions_per_update": 2}},
    "diloco": {"strategy": {"kind": "diloco", "inner_steps": 2, "round_timeout_s": 60.0}},
}
CODECS = [
    {"kind": "fp16"},
    {"kind": "int8"},
    {"kind": "int4"},
    {"kind": "ternary"},
    {"kind": "topk", "ratio": 0.05},
    {"kind": "topk", "ratio": 0.1, "values": "int4", "error_decay": 0.9},
    {"kind": "topk", "ratio": 0.1, "values": "2-bit", "chunk": 256},
]
RULES = [
    {"kind": "trimmed-mean"},
    {"kind": "median"},
    {"kind": "geometric-median"},
    {"kind": "krum", "byzantine": 1},
    {"kind": "multi-krum", "byzantine": 1},
    {"kind": "bulyan", "byzantine": 1},
    {"kind": "centered-clipping", "radius": 0.1},
]
SEVEN = {"cluster": {"num_workers": 7}, "training": {"max_steps": 4, "device": "cpu"}}
LEARNING = {"training": {"max_steps": 40}, "evaluation": {"strategy": "epoch"}}


@pytest.fixture(scope="module")
def plain(shared_cluster: Callable[..., Any]) -> Callable[[str], Any]:
    """A strategy's run without a codec. It is trained once for all codecs."""
    return functools.cache(lambda strategy: shared_cluster(SMALL, STRATEGIES[strategy], LEARNING, workers=2))


def bytes_per_contribution(outcome: Any) -> float:
    return float(outcome.summary["received_bytes"] / sum(worker.worker.counts["sent"] for worker in outcome.workers))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["kind"] + codec.get("values", ""))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_codec_sends_fewer_bytes_and_still_learns(
    cluster: Callable[..., Any], plain: Callable[[str], Any], strategy: str, codec: Any
) -> None:
    encoded = cluster(SMALL, STRATEGIES[strategy], LEARNING, {"updates": {"codec": codec}}, workers=2)
    assert bytes_per_contribution(encoded) < bytes_per_contribution(plain(strategy))
    assert encoded.loss < 2.0


def seats_by_round(outcome: Any) -> list[list[int]]:
    """Whose contributions a round took, in the order in which it combined them."""
    ledger = (outcome.loop.directory.path / "coordinator" / "ledger.jsonl").read_text().splitlines()
    return [[line[5] for line in entry["from"]] for entry in map(json.loads, ledger) if "from" in entry]


def moved_by_hand(settings: dict[str, Any], rounds: list[list[int]], combine: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The weights after the rounds, where all workers send in each and `combine` makes one update of what they send."""
    run, workers = loaded(settings).run, len(rounds[0])
    inner = getattr(run.strategy, "inner_steps", 0)
    islands = [assemble(run, length=lambda samples: run.training.max_steps or 0) for _ in range(workers)]
    feeds = [feed_for_seat(run, island.data, seat, workers) for seat, island in enumerate(islands)]
    weights = torch.nn.Parameter(islands[0].engine.vector.clone())
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True} if inner else {"lr": 0.1}
    optimizer = torch.optim.SGD([weights], **outer)
    for seats in rounds:
        sent = []
        for island, feed in zip(islands, feeds, strict=True):
            island.engine.vector.copy_(weights.detach())
            for _ in range(inner):
                island.engine.step([next(feed)])
            if not inner:
                island.engine.gradients([next(feed)])
            sent.append(weights.detach() - island.engine.vector if inner else island.engine.gradient.clone())
        weights.grad = combine(torch.stack(sent)[seats])
        optimizer.step()
    for feed in feeds:
        feed.close()
    return weights.detach()


def centered_clipping(radius: float, iterations: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """It begins each time at its last result."""
    last: list[torch.Tensor] = []

    def combine(stack: torch.Tensor) -> torch.Tensor:
        last[:] = [aggregation.centered_clipping(stack, last[0] if last else None, radius, iterations)]
        return last[0]

    return combine


def combination(rule: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a rule's settings say, in the functions that tests/updates compares with numpy."""
    return {
        "trimmed-mean": lambda stack: aggregation.trimmed_mean(stack, 0.3),
        "median": aggregation.median,
        "geometric-median": geometric_median,
        "krum": lambda stack: krum(stack, 1),
        "multi-krum": lambda stack: multi_krum(stack, 1),
        "bulyan": lambda stack: bulyan(stack, 1),
        "centered-clipping": centered_clipping(0.1, 3),
    }[rule["kind"]]


@pytest.fixture(scope="module")
def by_mean() -> Callable[[str], torch.Tensor]:
    """Where the mean would lead. No rule may be mistaken for it."""
    rounds = {"syncps": 4 * [list(range(7))], "diloco": 2 * [list(range(7))]}
    by_hand = functools.partial(moved_by_hand, combine=lambda stack: stack.mean(0))
    return functools.cache(lambda strategy: by_hand(merged(SMALL, STRATEGIES[strategy], SEVEN), rounds[strategy]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["kind"])
@pytest.mark.parametrize("strategy", ["syncps", "diloco"])
def test_a_rule_makes_of_each_round_what_its_arithmetic_says(
    cluster: Callable[..., Any], by_mean: Callable[[str], torch.Tensor], strategy: str, rule: Any
) -> None:
    settings = merged(SMALL, STRATEGIES[strategy], SEVEN, {"updates": {"aggregation": rule}})
    outcome = cluster(settings, workers=7)
    rounds = seats_by_round(outcome)
    assert [sorted(seats) for seats in rounds] == (2 if strategy == "diloco" else 4) * [list(range(7))]
    expected = moved_by_hand(settings, rounds, combination(rule))
    assert torch.allclose(outcome.loop.engine.vector, expected, atol=2e-6)
    assert not torch.allclose(by_mean(strategy), expected, atol=1e-4)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["kind"])
@pytest.mark.parametrize("strategy", ["edp", pytest.param("async", marks=pytest.mark.long)])
def test_without_rounds_a_rule_learns_beside_a_worker_that_pulls_all_weights_down(
    cluster: Callable[..., Any], strategy: str, rule: Any
) -> None:
    several = {"strategy": {"contributions_per_update": 7}} if strategy == "async" else {}
    learning = {"updates": {"aggregation": rule}, "training": {"max_steps": 20}, "evaluation": {"strategy": "epoch"}}
    outcome = cluster(SMALL, STRATEGIES[strategy], several, SEVEN, learning, workers=7, change=lie)
    assert outcome.loop.step == 20
    assert outcome.loss < 2.2  # 2.3 at first; with the mean more than a thousand


def lie(joined: JoinedWorker) -> None:
    """The gradient of the seventh worker is a million for every weight, whatever its data."""
    if joined.name != "w7":
        return
    assert joined.worker is not None
    task = joined.worker.engine.task
    losses, parameters = task.losses, list(task.players["model"].parameters())
    task.losses = lambda batch: (loss._replace(value=1e6 * sum(map(torch.sum, parameters))) for loss in losses(batch))


def neighbours_averaged(stack: torch.Tensor) -> torch.Tensor:
    """The median, after each contribution became the mean of the three of four that are nearest to it."""
    nearest = torch.cdist(stack.double(), stack.double()).argsort(dim=1)[:, :3]
    return aggregation.median(torch.stack([stack[near].mean(0) for near in nearest]))


@pytest.mark.parametrize(
    ("mixing", "combine"),
    [
        ({"kind": "none"}, aggregation.median),
        ({"kind": "bucketing", "size": 4}, lambda stack: stack.mean(0)),  # the median of one bucket, which holds all
        ({"kind": "nearest-neighbours", "byzantine": 1}, neighbours_averaged),
    ],
    ids=["none", "bucketing", "nearest-neighbours"],
)
def test_mixing_comes_before_a_rule(cluster: Callable[..., Any], mixing: Any, combine: Callable[[torch.Tensor], torch.Tensor]) -> None:
    updates = {"aggregation": {"kind": "median"}, "mixing": mixing}
    settings = merged(SMALL, STRATEGIES["syncps"], {"updates": updates, "training": {"max_steps": 3, "device": "cpu"}})
    outcome = cluster(settings, workers=4)
    assert torch.allclose(outcome.loop.engine.vector, moved_by_hand(settings, seats_by_round(outcome), combine), atol=2e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_noise_and_clipping(cluster: Callable[..., Any], strategy: str) -> None:
    private = {"updates": {"clip_norm": 0.5, "privacy": {"enabled": True, "noise_multiplier": 1.0}}, "logging": {"every_steps": 1}}
    outcome = cluster(SMALL, STRATEGIES[strategy], private, workers=2)
    records = [record for record in outcome.loop.directory.metrics() if record["split"] == "train"]
    spent = [record["epsilon"] for record in records]
    assert spent == sorted(spent)
    assert 0 < spent[-1] < math.inf


@pytest.mark.parametrize(("noise", "warned"), [(0.1, True), (50.0, False)])
def test_noise_that_protects_nobody_is_told_at_the_start_in_the_user_s_words(
    tmp_path: Path, noise: float, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = merged(SMALL, STRATEGIES["syncps"], {"updates": {"clip_norm": 0.5, "privacy": {"enabled": True, "noise_multiplier": noise}}})
    shown = PlainProgress(sys.stderr)
    loop, _ = prepare(loaded(settings), run_dir=str(tmp_path / "run"), resume=False, reporters=[shown], workers=2, transport=InProcess())
    loop.server.close()
    told = capsys.readouterr().err
    assert ("too much to protect the data" in told) == warned
    assert not warned or "raise updates.privacy.noise_multiplier" in told


def test_what_privacy_has_spent_is_on_the_terminal_and_in_status() -> None:
    assert figures({"loss": 1.0, "epsilon": 3.25}) == "loss 1  epsilon 3.25"
    view = SimpleNamespace(facts={"members": []}, figures={"epsilon": 1046.0}, workers=[], picture=None, coordinator_seen_at=None)
    assert dict(class_table.lines(view))["privacy"] == "ε = 1046 spent so far, too much to protect the data"
    view.figures["epsilon"] = 2.5
    assert dict(class_table.lines(view))["privacy"] == "ε = 2.5 spent so far"


@pytest.mark.parametrize("unit", ["contribution", "sample"])
def test_what_is_sent_is_clipped_by_the_unit_of_privacy(cluster: Callable[..., Any], unit: str) -> None:
    sent: list[torch.Tensor] = []
    by_sample: list[int] = []

    def watch(joined: JoinedWorker) -> None:
        worker = joined.worker
        assert worker is not None
        send, taken = worker._send, worker.engine.gradients_by_sample
        worker._send = lambda made, frames, soon: (  # type: ignore[method-assign]
            sent.append(torch.frombuffer(bytearray(frames[0]), dtype=torch.float32)),
            send(made, frames, soon),
        )[1]
        worker.engine.gradients_by_sample = lambda batches, limit: (by_sample.append(1), taken(batches, limit))[1]

    private = {"updates": {"clip_norm": 0.05, "privacy": {"enabled": True, "unit": unit, "noise_multiplier": 0.0}}}
    cluster(SMALL, STRATEGIES["syncps"], private, workers=1, change=watch)
    assert len(sent) >= 8
    assert all(float(vector.norm()) <= 0.05 * 1.0001 for vector in sent)
    assert len(by_sample) == (len(sent) if unit == "sample" else 0)


def test_polyak_blends_what_is_pulled(cluster: Callable[..., Any]) -> None:
    blended = cluster(SMALL, STRATEGIES["syncps"], {"strategy": {"pull_every_steps": 4}, "training": {"polyak_alpha": 0.5}}, workers=2)
    replaced = cluster(SMALL, STRATEGIES["syncps"], {"strategy": {"pull_every_steps": 4}}, workers=2)
    assert blended.loop.step == replaced.loop.step == 8
    assert any(not torch.equal(blended.weights[name], replaced.weights[name]) for name in blended.weights)
    worker = blended.workers[0].worker
    assert worker is not None
    assert not torch.equal(worker.engine.vector, worker.weights.base)


def test_a_poisoned_batch_is_never_sent(cluster: Callable[..., Any]) -> None:
    def poison(joined: JoinedWorker) -> None:
        worker = joined.worker
        assert worker is not None
        compute, calls = worker.engine.gradients, [0]

        def poisoned(batches: Any) -> Any:
            result = compute(batches)
            calls[0] += 1
            if calls[0] % 3 == 0:
                worker.engine.gradient[5] = math.nan
            return result

        worker.engine.gradients = poisoned  # type: ignore[method-assign]

    outcome = cluster(SMALL, STRATEGIES["syncps"], workers=2, change=poison)
    assert outcome.loop.step == 8
    assert all(worker.worker.encoder.poisoned >= 3 for worker in outcome.workers)
    assert all(bool(torch.isfinite(value).all()) for value in outcome.weights.values())


def test_a_worker_whose_gradients_are_never_finite_gives_up(cluster: Callable[..., Any]) -> None:
    def poison(joined: JoinedWorker) -> None:
        worker = joined.worker
        assert worker is not None
        worker.engine.vector.fill_(math.nan)
        worker.weights.load = lambda news: False  # type: ignore[method-assign]

    with pytest.raises(AssertionError, match="not finite"):
        cluster(SMALL, STRATEGIES["syncps"], workers=1, change=poison)


def test_statistics_of_a_gan_reach_the_coordinator(cluster: Callable[..., Any]) -> None:
    gan = {
        "model": {"kind": "dcgan", "image_size": 16, "latent_dim": 8, "generator_features": 4, "discriminator_features": 4},
        "training": {"max_steps": 4, "batch_size": 16},
        "evaluation": {"strategy": "never"},
    }
    outcome = cluster(gan, STRATEGIES["syncps"], workers=2)
    moved = [value for name, value in outcome.weights.items() if name.endswith("running_mean")]
    assert moved
    assert all(float(value.abs().sum()) > 0 for value in moved)
