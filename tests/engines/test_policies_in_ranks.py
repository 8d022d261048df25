"""Processes that learn together from a policy's own answers learn what one learns, whichever engine they are."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from tests.support import rank_processes
from tests.support.rank_processes import DDP, FSDP, LEARNING, ZERO, needs_deepspeed

pytestmark = pytest.mark.whole


@functools.cache
def alone(way: str) -> dict[str, Any]:
    return rank_processes.policy_after(None, '{"kind": "single"}', LEARNING[way])


def check(*asked: tuple[str, str]) -> None:
    found = rank_processes.together("policies", 2, *(json.dumps([json.loads(engine), way]) for engine, way in asked))
    for rank in found:
        for (name, there), (_, way) in zip(rank.items(), asked, strict=True):
            own = alone(way)
            torch.testing.assert_close(torch.tensor(there["vector"]), torch.tensor(own["vector"]), rtol=1e-4, atol=2e-6, msg=name)
            assert there["figures"] == pytest.approx(own["figures"], rel=1e-4, abs=1e-5), name
            assert there["judged"] == pytest.approx(own["judged"], rel=1e-4, abs=1e-5), name
            assert there["position"] == own["position"], name


def test_policies_under_ddp_and_fsdp_learn_what_one_process_learns() -> None:
    check((DDP, "online DPO"), (FSDP, "PPO"), (FSDP, "with a head"))


@pytest.mark.long
def test_the_other_algorithms_do_so_as_well() -> None:
    check((DDP, "PPO"), (FSDP, "RLOO"))


@pytest.mark.long
def test_policies_that_read_do_so_in_step() -> None:
    """Rows of different lengths find something new at different tokens, in one process and not in the other."""
    check((DDP, "reading"), (FSDP, "reading"))


@pytest.mark.long
@needs_deepspeed
def test_policies_under_zero_learn_what_one_process_learns() -> None:
    check((ZERO[0], "with a head"), (ZERO[2], "PPO"), (ZERO[2], "reading"))
