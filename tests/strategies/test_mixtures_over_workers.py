"""A mixture of experts over workers: every strategy moves its weights, and the biases of its routers with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
def test_one_worker_moves_weights_and_biases_as_one_process_does(
    cluster: Callable[..., Any], alone: Callable[..., Any], strategy: Any
) -> None:
    together, single = cluster(MOE, {"strategy": strategy}, workers=1).weights, alone(MOE).engine.weights()
    assert biases(single).any()
    for name, value in single.items():
        torch.testing.assert_close(together[name], value, rtol=0, atol=1e-6, msg=name)
