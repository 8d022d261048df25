"""Processes that learn together from a policy's own answers learn what one learns, whichever engine they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.support import rank_processes
from tests.support.rank_processes import DDP, FSDP, LEARNING, ZERO, needs_deepspeed

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: rank_processes.policy_after(None, '{"kind": "single"}', rlhf) for name, rlhf in LEARNING.items()}


def check(alone: dict[str, Any], *asked: tuple[str, str]) -> None:
    found = rank_processes.together("policies", 2, *(json.dumps([json.loads(engine), way]) for engine, way in asked))
    for rank in found:
        for (name, there), (_, way) in zip(rank.items(), asked, strict=True):
            own = alone[way]
            torch.testing.assert_close(torch.tensor(there["vector"]), torch.tensor(own["vector"]), rtol=1e-4, atol=2e-6, msg=name)
            assert there["figures"] == pytest.approx(own["figures"], rel=1e-4, abs=1e-5), name
            assert there["judged"] == pytest.approx(own["judged"], rel=1e-4, abs=1e-5), name
            assert there["position"] == own["position"], name


def test_policies_under_ddp_and_fsdp_learn_what_one_process_learns(alone: dict[str, Any]) -> None:
    check(alone, (DDP, "PPO"), (DDP, "online DPO"), (FSDP, "PPO"), (FSDP, "with a head"), (FSDP, "RLOO"))


@pytest.mark.long
def test_policies_that_read_do_so_in_step(alone: dict[str, Any]) -> None:
    """Rows of different lengths find something new at different tokens, in one process and not in the other."""
    check(alone, (DDP, "reading"), (FSDP, "reading"))


@pytest.mark.long
@needs_deepspeed
def test_policies_under_zero_learn_what_one_process_learns(alone: dict[str, Any]) -> None:
    check(alone, (ZERO[0], "with a head"), (ZERO[2], "PPO"), (ZERO[2], "reading"))
