"""A mixture of experts learns the same in several processes as in one, whichever engine they are. ZeRO's are in test_zero.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shoal.config.schema.serving import Decoding
from shoal.models.generation.generate import generate
from tests.support import rank_processes
from tests.support.rank_processes import DDP, FSDP

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def in_two() -> list[dict[str, Any]]:
    """What two processes found, one after the other."""
    asked = [["mixtures", DDP, FSDP], ["half_mixtures", DDP, FSDP], ["features", DDP, FSDP], ["remembering", DDP, FSDP], ["writing", FSDP]]
    return rank_processes.together("several", 2, *map(json.dumps, asked))


def check_gradients(found: list[dict[str, Any]], single: tuple[list[float], list[float]]) -> None:
    """The gradients and biases of all ranks are those of one process."""
    gradient, biases = map(torch.tensor, single)
    assert gradient.isfinite().all()
    assert biases.unique().numel() > 2, "the biases have moved"
    for seen in found:
        for name, (own, state) in seen.items():
            torch.testing.assert_close(torch.tensor(own), gradient, rtol=1e-4, atol=1e-6, msg=name)
            torch.testing.assert_close(torch.tensor(state), biases, msg=name)


def check_memories(found: list[dict[str, Any]]) -> None:
    for name, first in found[0].items():
        assert first == found[1][name], "both ranks have kept the same"
        assert first["losses"][-1] < first["losses"][0], name
        assert any(importance > 0 for importance in first["kept"]), name


def check_writing(found: list[dict[str, Any]]) -> None:
    """All ranks write what one process writes."""
    single = rank_processes.mixture_engine(None, {"kind": "single"})
    way, wanted = Decoding(active="greedy"), []
    for _ in range(2):
        tokens = generate(single.task.players["model"], torch.tensor([[1, 2, 3]]), max_new_tokens=5, decoding=way)
        wanted.append([int(one) for one in tokens])
        single.step(rank_processes.batches(0))
    assert all(written == wanted for seen in found for written in seen.values())


def test_ddp_and_fsdp_take_a_mixtures_gradient_as_one_process_does(in_two: list[dict[str, Any]]) -> None:
    check_gradients([seen["mixtures"] for seen in in_two], rank_processes.mixture_of(None, {"kind": "single"}))
    check_gradients([seen["features"] for seen in in_two], rank_processes.feature_gradient(None, {"kind": "single"}))


def test_routers_are_not_rounded_in_half_precision(in_two: list[dict[str, Any]]) -> None:
    single = rank_processes.losses_of(rank_processes.mixture_engine(None, {"kind": "single"}, precision={"kind": "bf16"}), 0, 5)
    for seen in in_two:
        for name, half in seen["half_mixtures"].items():
            assert half["losses"] == pytest.approx(single, rel=0.02), name
            assert half["types"] == ["torch.float32"]


def test_all_ranks_remember_and_write_the_same(in_two: list[dict[str, Any]]) -> None:
    check_memories([seen["remembering"] for seen in in_two])
    check_writing([seen["writing"] for seen in in_two])
