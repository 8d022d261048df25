"""Workers that hold some of a mixture's experts take part like any other: they learn, are counted once, and send no more than they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import audit
from shoal.errors import ShoalError
from shoal.models.moe import Moe
from shoal.updates.expert_subsets import size_of
from tests.strategies.test_mixtures_over_workers import MOE, STRATEGIES, biases
from tests.support.layered_settings import loaded, merged

PARTS = {1: ("engine.experts=[0,1,2]",), 2: ("engine.experts=[1,2,3]",)}


@pytest.mark.parametrize("strategy", [STRATEGIES["syncps"], STRATEGIES["diloco"]], ids=["syncps", "diloco"])
def test_two_workers_with_some_of_the_experts_each_train_all_of_them(cluster: Callable[..., Any], strategy: Any) -> None:
    together = cluster(MOE, {"strategy": strategy}, workers=2, own=PARTS)
    assert together.loss < 5.6  # of 256 bytes, 5.55 know nothing
    assert bool((biases(together.weights) != 0).any())
    blocks, whole = together.loop.coordinator.plan.experts, len(together.loop.engine.vector)
    for joined in together.workers:
        assert len(joined.worker.engine.vector) == size_of(blocks, joined.protocol.experts) < whole
        assert sum(line.sent_bytes for line in joined.connections) < 4 * whole * (together.loop.coordinator.state.version + 1)
    ledger = [json.loads(line) for line in (together.loop.directory.path / "coordinator" / "ledger.jsonl").read_text().splitlines()]
    held = {one[0]: one[9] for line in ledger for one in line.get("from", ())}
    assert held == {"w1": [0, 1, 2], "w2": [1, 2, 3]}
    violations = list[str]()
    evidence = gather(together.loop.directory.path / "coordinator", (together.loop.directory.path / "workers").glob("*.jsonl"), violations)
    assert audit(evidence, violations).violations == []


def test_a_worker_cannot_hold_what_is_not_there(cluster: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="the coordinator refused: experts 0, 9: the experts of this run have the numbers 0 to 3"):
        cluster(MOE, {"strategy": STRATEGIES["syncps"]}, workers=1, own={1: ("engine.experts=[0,9]",)})


def test_a_coordinator_holds_all_experts(cluster: Callable[..., Any]) -> None:
    with pytest.raises(ShoalError, match="a coordinator holds all experts"):
        cluster(MOE, {"strategy": STRATEGIES["syncps"], "engine": {"experts": [0, 1]}}, workers=1)


@pytest.mark.parametrize("router", ["switch", "gshard", "stochastic", "sigmoid-bias"])
def test_a_part_gives_what_the_whole_gives_with_other_logits_masked(router: str) -> None:
    settings = loaded(merged(MOE, {"model": {"experts": {"router": router, "capacity_factor": None}}})).run.model
    torch.manual_seed(0)
    whole, part, held = Moe(settings, 31).eval(), Moe(settings, 31, (1, 3)).eval(), [1, 3]
    given = {name: value[held] if name.endswith((".up", ".down")) else value for name, value in whole.state_dict().items()}
    part.load_state_dict(given)
    for block in whole.blocks:
        block.feed_forward.router.logits = masked(block.feed_forward.router.logits, held)
        if router == "sigmoid-bias":
            block.feed_forward.router.bias_E[[0, 2]] = -1.0
    tokens = torch.randint(31, (2, 8))
    torch.testing.assert_close(part(tokens), whole(tokens))


def masked(logits: Any, held: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def with_mask(x_TD: torch.Tensor) -> torch.Tensor:
        found = logits(x_TD)
        return torch.full_like(found, -1e30).index_copy(1, torch.tensor(held), found[:, held])

    return with_mask
