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


def found_by_two(*asked: list[str]) -> list[dict[str, Any]]:
    """What two processes found, one after the other."""
    return rank_processes.together("several", 2, *map(json.dumps, asked))


def check_views_and_gradients(losses: list[float], in_two: list[dict[str, Any]]) -> None:
    check_agreement([found["agreement"] for found in in_two], losses)
    check_flat_view([found["flat_view"] for found in in_two])
    check_gradients([found["features"] for found in in_two], rank_processes.feature_gradient(None, {"kind": "single"}))


def test_the_third_stage_of_zero_learns_remembers_and_writes_what_one_process_does(alone: list[float]) -> None:  # noqa: F811
    """One test, so that one process of pytest-xdist starts DeepSpeed. A mixture has an expert that is idle."""
    third = ZERO[2]
    plain = [["agreement", third, OFFLOADED[1]], ["flat_view", ZERO[0], third]]
    in_two = found_by_two(*plain, ["features", third], ["remembering", third], ["writing", third])
    check_views_and_gradients(alone, in_two)
    check_memories([found["remembering"] for found in in_two])
    check_writing([found["writing"] for found in in_two])


@pytest.mark.long
def test_every_stage_of_zero_learns_what_one_process_does(alone: list[float]) -> None:  # noqa: F811
    check_views_and_gradients(
        alone, found_by_two(["agreement", *ZERO, OFFLOADED[-1]], ["flat_view", *ZERO, *OFFLOADED], ["features", *ZERO])
    )
