"""A mixture of experts over workers: every strategy moves its weights, and the biases of its routers with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.coordinator.durable import replayed_state as book
from shoal.engines.expert_layout import expert_blocks
from shoal.reporters.sinks import LoadMap
from shoal.runs.build_run import assemble
from shoal.updates.experts import ExpertBlocks, believable, combine_apart, mean_by_experts
from tests.support.layered_settings import loaded, merged

MOE = {
    "model": {
        "kind": "moe",
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "max_seq_len": 16,
        "intermediate_size": 16,
        "experts": {"count": 4, "router": "sigmoid-bias", "bias_step": 0.01},
    },
    "training": {"batch_size": 4, "max_steps": 8, "optimizer": {"name": "SGD", "learning_rate": 0.1}, "device": "cpu"},
    "evaluation": {"batches": 2, "batch_size": 8},
    "data": {"max_samples": 400, "source": {"kind": "builtin", "name": "python-source"}},
}
AVERAGED = {"name": "SGD", "learning_rate": 1.0, "momentum": 0.0}
STRATEGIES = {
    "syncps": {"kind": "syncps", "round_timeout_s": 60.0},
    "edp": {"kind": "edp", "pull_every_steps": 2},
    "async": {"kind": "async", "max_staleness": 50},
    "workunits": {"kind": "workunits", "batches_per_unit": 1, "units_per_update": 2},
    "diloco": {"kind": "diloco", "inner_steps": 4, "outer": AVERAGED},
}


RECORDED = {"logging": {"every_steps": 1}}


def loads_of(loop: Any) -> list[list[float]]:
    """The loads of the experts in each record of training, layer after layer."""
    records = [record for record in loop.directory.metrics() if record["split"] == "train"]
    return [[record[f"layers/{layer}/load/{expert}"] for layer in range(2) for expert in range(4)] for record in records]


def biases(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value for name, value in weights.items() if name.endswith("bias_E")])


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_mixture_learns_under_every_strategy(cluster: Callable[..., Any], strategy: Any) -> None:
    together = cluster(MOE, {"strategy": strategy}, workers=2)
    found = biases(together.weights)
    assert together.loss < 5.6  # of 256 bytes, 5.55 know nothing
    assert found.any(), "the coordinator's biases have moved"
    assert float(found.abs().max()) <= 0.01 * together.summary["samples"] / 4 + 1e-6, "by one step for each of a worker's at most"


@pytest.mark.parametrize("strategy", [STRATEGIES["syncps"], STRATEGIES["diloco"]], ids=["syncps", "diloco"])
def test_one_worker_moves_weights_and_biases_and_records_loads_as_one_process_does(
    cluster: Callable[..., Any], alone: Callable[..., Any], strategy: Any
) -> None:
    together, single = cluster(MOE, RECORDED, {"strategy": strategy}, workers=1), alone(MOE, RECORDED)
    assert biases(single.engine.weights()).any()
    for name, value in single.engine.weights().items():
        torch.testing.assert_close(together.weights[name], value, rtol=0, atol=1e-6, msg=name)
    steps = 4 if strategy["kind"] == "diloco" else 1  # a round's loads are those of all its steps
    wanted = torch.tensor(loads_of(single)).view(-1, steps, 8).mean(1)
    torch.testing.assert_close(torch.tensor(loads_of(together.loop)), wanted)


def test_loads_are_not_told_where_the_data_is_to_stay_private() -> None:
    plain = {"model": {"experts": {"router": "switch"}}}
    private = {"strategy": STRATEGIES["syncps"], "updates": {"clip_norm": 1.0, "privacy": {"enabled": True}}}
    for changed, reports in ((private, False), ({"strategy": STRATEGIES["syncps"]}, True), ({"strategy": {"kind": "local"}}, False)):
        run = loaded(merged(MOE, plain, changed)).run
        assert assemble(run, None, None, lambda samples: 8).single.task.players["model"].loads.reports == reports


REMEMBERED = {"model": {"episodic_memory": {"enabled": True, "capacity": 32, "chunk_size": 4, "vectors": 2}}}


def test_a_coordinators_memory_is_made_of_what_its_workers_remember(cluster: Callable[..., Any]) -> None:
    together = cluster(MOE, REMEMBERED, {"strategy": STRATEGIES["syncps"]}, workers=2)
    kept, *others = (one.task.players["model"].memory for one in (together.loop.engine, *(one.worker.engine for one in together.workers)))
    known = {tuple(ids.tolist()) for ids in kept.ids_NT[kept.importance_N > 0]}
    assert len(known) > 8
    own = [{tuple(ids.tolist()) for ids in memory.ids_NT[memory.importance_N > 0]} for memory in others]
    forgotten = known - own[0] - own[1]
    assert len(forgotten) < len(known) // 4, "workers forget a few after the last version that they heard of"
    assert len(own[0] & own[1] & known) > 4, "each has also heard of what the other learned from"
    assert together.summary["metrics"]["eval"]["loss_without_memory"] > 0


WEIGHED = {"strategy": {"kind": "diloco", "inner_steps": 4, "round_timeout_s": 60.0, "expert_weight_cap": 1.5}}


@pytest.fixture
def seen_loads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The loads that each round's contributions were weighed by."""
    found: list[torch.Tensor] = []

    def noting(blocks: ExpertBlocks, vectors: Any, weights: Any, loads: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        found.append(loads)
        return mean_by_experts(blocks, vectors, weights, loads, out)

    monkeypatch.setattr(book, "mean_by_experts", noting)
    return found


@pytest.mark.parametrize("changed", [{}, {"fragments": 2}], ids=["whole", "fragments"])
def test_workers_report_the_tokens_that_experts_are_weighed_by(
    cluster: Callable[..., Any], seen_loads: list[torch.Tensor], changed: dict[str, Any]
) -> None:
    together = cluster(MOE, WEIGHED, {"strategy": changed}, RECORDED, workers=2, reporters=[LoadMap()])
    assert together.loss < 5.6
    assert len(seen_loads) == 2 * changed.get("fragments", 1)
    assert (together.loop.directory.path / "experts.png").exists()
    torch.testing.assert_close(torch.tensor(loads_of(together.loop)), torch.stack([loads.mean(0) for loads in seen_loads]).float())
    for loads in seen_loads:
        torch.testing.assert_close(loads.view(2, 2, 4).sum(2), torch.ones(2, 2, dtype=torch.float64))
        assert not torch.equal(loads[0], loads[1]), "each has tokens of its own"


def test_one_worker_that_reports_its_loads_learns_as_one_process_does(cluster: Callable[..., Any], alone: Callable[..., Any]) -> None:
    together = cluster(MOE, WEIGHED, {"strategy": {"outer": AVERAGED}}, workers=1).weights
    for name, value in alone(MOE).engine.weights().items():
        torch.testing.assert_close(together[name], value, rtol=0, atol=1e-6, msg=name)


def test_a_worker_that_claims_all_tokens_is_believed_no_further_than_its_batches(
    cluster: Callable[..., Any], seen_loads: list[torch.Tensor]
) -> None:
    def lie(joined: Any) -> None:
        if joined.protocol.name == "w1":
            joined.worker.engine.take_report = lambda: torch.full_like(joined.worker.engine.buffers, 1e30)

    together = cluster(MOE, WEIGHED, workers=2, change=lie)
    assert together.loss < 5.6
    for loads in seen_loads:
        assert float(loads.max()) <= 0.5, "of two experts for each token, one has half of the choices at most"
        torch.testing.assert_close(loads, believable(loads.view(-1, 4), 2).view_as(loads))
    told = together.loop.engine.task.players["model"].loads.details()
    assert max(float(one) for one in told.values()) <= 0.5, "nor do people see more"


def test_the_blocks_of_experts_are_where_the_network_has_them() -> None:
    biased = merged(MOE, WEIGHED, {"model": {"bias": True, "feed_forward": "gelu"}})
    engine = assemble(loaded(biased).run, None, None, lambda samples: 8).single
    blocks = expert_blocks(engine, 1.5)
    assert blocks is not None
    assert blocks.per_token == 2
    for number, spans in enumerate(blocks.spans_X):
        before = engine.vector.clone()
        part = engine.task.players["model"].blocks[number // 4].feed_forward
        with torch.no_grad():
            for parameter in (part.up, part.down, part.up_bias, part.down_bias):
                parameter[number % 4] += 1
        moved = torch.zeros_like(before, dtype=torch.bool)
        for start, end in spans:
            moved[start:end] = True
        assert torch.equal(engine.vector != before, moved)
    assert blocks.size == len(engine.vector)


def test_a_rule_takes_each_expert_from_a_worker_of_its_own_choice(cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[torch.Tensor] = []
    combined: list[torch.Tensor] = []

    def noting(blocks: ExpertBlocks, *given: Any) -> Any:
        update, state = combine_apart(blocks, *given)
        stacks.append(given[2])
        combined.append(update.clone())  # the learner steps along the vector itself, and may scale it
        return update, state

    monkeypatch.setattr(book, "combine_apart", noting)
    rule = {"updates": {"experts_apart": True, "aggregation": {"kind": "krum", "byzantine": 0}}, "training": {"max_steps": 2}}
    together = cluster(MOE, {"strategy": STRATEGIES["syncps"]}, rule, workers=3)
    blocks = together.loop.coordinator.plan.experts
    assert len(combined) == 2
    for stack, update in zip(stacks, combined, strict=True):
        for spans in blocks.spans_X:
            own = [torch.cat([values[..., start:end] for start, end in spans], -1) for values in (stack, update)]
            assert any(torch.equal(row, own[1]) for row in own[0]), "an expert's update is one worker's own"
