"""Every codec, rule, limit and kind of noise works with every strategy, and does something."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.runs.joining import Joined

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
]
RULES = [
    {"kind": "trimmed-mean"},
    {"kind": "median"},
    {"kind": "geometric-median"},
    {"kind": "krum", "byzantine": 1},
    {"kind": "multi-krum", "byzantine": 1},
    {"kind": "bulyan", "byzantine": 1},
    {"kind": "centered-clipping"},
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["kind"] + codec.get("values", ""))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_codec_sends_fewer_bytes_and_still_learns(cluster: Callable[..., Any], strategy: str, codec: Any) -> None:
    learning = {"training": {"max_steps": 40}, "evaluation": {"strategy": "epoch"}}
    plain = cluster(SMALL, STRATEGIES[strategy], learning, workers=2)
    encoded = cluster(SMALL, STRATEGIES[strategy], learning, {"updates": {"codec": codec}}, workers=2)
    sent = [sum(worker.member.counts["sent"] for worker in outcome.workers) for outcome in (plain, encoded)]
    assert encoded.summary["received_bytes"] / sent[1] < plain.summary["received_bytes"] / sent[0]
    assert encoded.loss < 2.0


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["kind"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rule_combines_the_contributions(cluster: Callable[..., Any], strategy: str, rule: Any) -> None:
    several = {"async": {"strategy": {"contributions_per_update": 7}}}.get(strategy, {})
    outcome = cluster(
        SMALL,
        STRATEGIES[strategy],
        several,
        {"updates": {"aggregation": rule}, "cluster": {"num_workers": 7}, "training": {"max_steps": 3}},
        workers=7,
    )
    rounds = 2 if strategy == "diloco" else 3  # of two steps each
    assert outcome.loop.step == rounds
    assert outcome.summary["contributions"]["accepted"] >= rounds * 7


@pytest.mark.parametrize(
    "mixing", [{"kind": "bucketing", "size": 2}, {"kind": "nearest-neighbours", "byzantine": 1}], ids=lambda one: one["kind"]
)
def test_mixing_comes_before_a_rule(cluster: Callable[..., Any], mixing: Any) -> None:
    updates = {"updates": {"aggregation": {"kind": "median"}, "mixing": mixing}, "training": {"max_steps": 3}}
    assert cluster(SMALL, STRATEGIES["syncps"], updates, workers=4).loop.step == 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_noise_and_clipping(cluster: Callable[..., Any], strategy: str) -> None:
    private = {"updates": {"clip_norm": 0.5, "privacy": {"enabled": True, "noise_multiplier": 1.0}}, "logging": {"every_steps": 1}}
    outcome = cluster(SMALL, STRATEGIES[strategy], private, workers=2)
    records = [record for record in outcome.loop.directory.metrics() if record["split"] == "train"]
    spent = [record["epsilon"] for record in records]
    assert spent == sorted(spent)
    assert 0 < spent[-1] < math.inf


@pytest.mark.parametrize("unit", ["contribution", "sample"])
def test_what_is_sent_is_clipped_by_the_unit_of_privacy(cluster: Callable[..., Any], unit: str) -> None:
    sent: list[torch.Tensor] = []
    by_sample: list[int] = []

    def watch(joined: Joined) -> None:
        member = joined.member
        assert member is not None
        send, taken = member._send, member.engine.gradients_by_sample
        member._send = lambda result, base, frames, soon: (  # type: ignore[method-assign]
            sent.append(torch.frombuffer(bytearray(frames[0]), dtype=torch.float32)),
            send(result, base, frames, soon),
        )[1]
        member.engine.gradients_by_sample = lambda batches, limit: (by_sample.append(1), taken(batches, limit))[1]

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
    worker = blended.workers[0].member
    assert worker is not None
    assert not torch.equal(worker.engine.vector, worker.base)


def test_a_poisoned_batch_is_never_sent(cluster: Callable[..., Any]) -> None:
    def poison(joined: Joined) -> None:
        member = joined.member
        assert member is not None
        compute, calls = member.engine.gradients, [0]

        def poisoned(batches: Any) -> Any:
            result = compute(batches)
            calls[0] += 1
            if calls[0] % 3 == 0:
                member.engine.gradient[5] = math.nan
            return result

        member.engine.gradients = poisoned  # type: ignore[method-assign]

    outcome = cluster(SMALL, STRATEGIES["syncps"], workers=2, change=poison)
    assert outcome.loop.step == 8
    assert all(worker.member.outgoing.poisoned >= 3 for worker in outcome.workers)
    assert all(bool(torch.isfinite(value).all()) for value in outcome.weights.values())


def test_a_worker_whose_gradients_are_never_finite_gives_up(cluster: Callable[..., Any]) -> None:
    def poison(joined: Joined) -> None:
        member = joined.member
        assert member is not None
        member.engine.vector.fill_(math.nan)
        member._take = lambda answer: None  # type: ignore[method-assign]

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
