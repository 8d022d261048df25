"""Several processes under DeepSpeed give what one gives. They are started once: loading it takes longer than most of what they do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engines.test_mixtures_in_ranks import check_gradients, check_memories, check_writing
from tests.engines.test_several import alone, check_agreement, check_flat_view  # noqa: F401 (a fixture)
from tests.support import rank_processes
from tests.support.rank_processes import OFFLOADED, ZERO, needs_deepspeed

pytestmark = [pytest.mark.whole, needs_deepspeed]


@pytest.fixture(scope="module")
def in_two() -> list[dict[str, Any]]:
    """What two processes found, one after the other."""
    plain = [["agreement", *ZERO, OFFLOADED[-1]], ["flat_view", *ZERO, *OFFLOADED]]
    mixtures = [["features", *ZERO], ["remembering", ZERO[2]], ["writing", ZERO[2]]]
    return rank_processes.together("several", 2, *map(json.dumps, [*plain, *mixtures]))


def test_zero_1_2_and_3_follow_one_process_over_fifty_steps(alone: list[float], in_two: list[dict[str, Any]]) -> None:  # noqa: F811
    check_agreement([found["agreement"] for found in in_two], alone)


def test_every_rank_of_zero_sees_the_whole_gradient_and_the_whole_weights(in_two: list[dict[str, Any]]) -> None:
    check_flat_view([found["flat_view"] for found in in_two])


def test_a_mixture_with_an_idle_expert_learns_under_zero_as_in_one_process(in_two: list[dict[str, Any]]) -> None:
    check_gradients([found["features"] for found in in_two], rank_processes.feature_gradient(None, {"kind": "single"}))


def test_all_ranks_of_zero_3_remember_and_write_the_same(in_two: list[dict[str, Any]]) -> None:
    check_memories([found["remembering"] for found in in_two])
    check_writing([found["writing"] for found in in_two])
