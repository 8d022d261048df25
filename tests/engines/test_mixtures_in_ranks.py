"""A mixture of experts learns the same in several processes as in one, whichever engine they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import ranks
import torch
from ranks import DDP, FSDP, ZERO, needs_deepspeed

from shoal.config.schema.serving import Decoding
from shoal.models.generate import generate


def check(found: list[dict[str, Any]]) -> None:
    gradient, biases = map(torch.tensor, ranks.mixture_of(None, {"kind": "single"}))
    assert biases.unique().numel() > 2, "the biases have moved"
    for seen in found:
        for name, (own, state) in seen.items():
            torch.testing.assert_close(torch.tensor(own), gradient, rtol=1e-4, atol=1e-7, msg=name)
            torch.testing.assert_close(torch.tensor(state), biases, msg=name)


def test_ddp_and_fsdp_take_a_mixtures_gradient_as_one_process_does() -> None:
    found = ranks.together("several", 2, json.dumps(["mixtures", DDP, FSDP]), json.dumps(["half_mixtures", DDP, FSDP]))
    check([seen["mixtures"] for seen in found])
    single = ranks.losses_of(ranks.mixture_engine(None, {"kind": "single"}, precision={"kind": "bf16"}), 0, 5)
    for seen in found:
        for name, half in seen["half_mixtures"].items():
            assert half["losses"] == pytest.approx(single, rel=0.02), name
            assert half["types"] == ["torch.float32"], "routers are not rounded"


@needs_deepspeed
def test_zero_takes_a_mixtures_gradient_as_one_process_does_also_with_idle_experts() -> None:
    found = ranks.together("several", 2, json.dumps(["mixtures", *ZERO]), '["writing"]')
    check([seen["mixtures"] for seen in found])
    single = ranks.mixture_engine(None, {"kind": "single"})
    way, wanted = Decoding(active="greedy"), []
    for _ in range(2):
        tokens = generate(single.task.players["model"], torch.tensor([[1, 2, 3]]), max_new_tokens=5, decoding=way)
        wanted.append([int(one) for one in tokens])
        single.step(ranks.batches(0))
    for seen in found:
        assert seen["writing"] == {FSDP: wanted, ZERO[2]: wanted}, "all ranks write what one process writes"


@needs_deepspeed
def test_every_feature_learns_under_zero_as_in_one_process() -> None:
    found = ranks.together("several", 2, json.dumps(["features", *ZERO]), json.dumps(["remembering", *ZERO]))
    gradient = torch.tensor(ranks.feature_gradient(None, {"kind": "single"}))
    assert gradient.isfinite().all()
    for seen in found:
        for name, own in seen["features"].items():
            torch.testing.assert_close(torch.tensor(own), gradient, rtol=1e-4, atol=1e-6, msg=name)
    for name, first in found[0]["remembering"].items():
        assert first == found[1]["remembering"][name], "both ranks have kept the same"
        assert first["losses"][-1] < first["losses"][0], name
        assert any(first["kept"]), name
