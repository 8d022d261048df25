"""Ranks that share the experts of a mixture learn what one process learns, and continue each other's checkpoints."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engines.expert_shards import ExpertRanks
from shoal.engines.world import World
from shoal.errors import ShoalError
from tests.support import rank_processes
from tests.support.rank_processes import FEATURES, MIXTURE, ZERO, mixture, needs_deepspeed, sharing

pytestmark = pytest.mark.whole

SINGLE, FSDP, DDP = {"kind": "single"}, {"kind": "fsdp"}, {"kind": "ddp"}
CROWDED = mixture(capacity_factor=0.5)
TWO_EXPERTS = mixture(count=2, per_token=1, router="switch")
SIX_EXPERTS = mixture(count=6, router="switch", intermediate_size=5) | {"feed_forward": "gelu"}
BIASED = MIXTURE | {"bias": True, "feed_forward": "gelu"}
SHARED = mixture(count=8, per_token=3, intermediate_size=4, shared_size=8, shared_gate=True, dense_layers=1) | {
    "qk_norm": "head",
    "mtp": {"enabled": True},
}
HELD = [0, 2, 3, 5]
HALF = {"double": False, "precision": {"kind": "bf16"}, "clipping": {"max_norm": 1.0}}
TOLERANCE = 1e-10
Found = list[list[Any]]


def answers(count: int, questions: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What each rank answers to each question."""
    found: Found = rank_processes.together("answers", count, *map(json.dumps, questions.values()))
    return {name: [rank[number] for rank in found] for number, name in enumerate(questions)}


def check_equal(found: Any, expected: Any, tolerance: float = TOLERANCE, at: str = "") -> None:
    """All numbers that are expected are found."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            check_equal(found[name], value, tolerance, f"{at}/{name}")
    elif expected and isinstance(expected, list) and isinstance(expected[0], dict):
        for number, pair in enumerate(zip(found, expected, strict=True)):
            check_equal(*pair, tolerance, f"{at}/{number}")
    else:
        own, other = (torch.tensor(one, dtype=torch.float64) for one in (found, expected))
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{at}: {text}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def in_two(folder: str) -> dict[str, list[Any]]:
    rank_processes.saved_sharing(None, SINGLE, MIXTURE, f"{folder}/one")
    steps = partial(lambda settings, engine, more: ["steps_of", engine, settings, more])
    return answers(
        2,
        {
            "plain": steps(MIXTURE, sharing(2), {}),
            "recomputed": steps(MIXTURE, sharing(2), {"gradient_checkpointing": True}),
            "features": steps(FEATURES, sharing(2), {}),
            "features, gathered": steps(FEATURES, FSDP, {}),
            "crowded": steps(CROWDED, sharing(2), {}),
            "crowded, gathered": steps(CROWDED, FSDP, {}),
            "half": steps(MIXTURE, sharing(2), HALF),
            "held": steps(mixture(router="switch"), sharing(2, experts=HELD), {}),
            "shared": steps(SHARED, sharing(2), {}),
            "order": ["order", sharing(2), SHARED],
            "idle": ["idle", sharing(2)],
            "written": ["written", sharing(2)],
            "saved": ["saved_sharing", sharing(2), MIXTURE, f"{folder}/two"],
            "resumed": ["resumed_sharing", FSDP, MIXTURE, f"{folder}/two"],
            "resumed from one": ["resumed_sharing", sharing(2), MIXTURE, f"{folder}/one"],
        },
    )


def test_two_ranks_share_experts_and_learn_what_one_process_learns(in_two: dict[str, list[Any]]) -> None:
    expected = rank_processes.steps_of(None, SINGLE, MIXTURE, {})
    assert all(figures["gradient_norm"] > 0.05 for figures in expected["figures"]), "the steps are clipped"
    for found in (*in_two["plain"], *in_two["recomputed"]):
        check_equal(found, expected)
        loads = [found["loads"][f"layers/0/rank_load/{rank}"] for rank in range(2)]
        own = [sum(found["loads"][f"layers/0/load/{expert}"] for expert in range(4 * rank, 4 * rank + 4)) for rank in range(2)]
        assert sum(loads) == pytest.approx(1)
        assert loads == pytest.approx(own, abs=0.1), "each rank computes four experts, also for tokens that do not count"


def test_a_worker_that_holds_some_experts_shares_them_between_its_ranks(in_two: dict[str, list[Any]]) -> None:
    expected = rank_processes.steps_of(None, SINGLE | {"experts": HELD}, mixture(router="switch"), {})
    for found in in_two["held"]:
        check_equal(found, expected)


def test_shared_experts_are_computed_while_rows_travel(in_two: dict[str, list[Any]]) -> None:
    expected = rank_processes.steps_of(None, SINGLE, SHARED, {})
    for found in in_two["shared"]:
        check_equal(found, expected)
    for forward, backward in in_two["order"]:
        assert forward == ["send", "send", "shared", "receive", "receive", "send", "receive"], "rows and gates, then outputs"
        assert backward == ["send", "receive", "send", "send", "shared", "receive", "receive"]


def test_a_capacity_and_layers_beside_the_experts_are_as_without_sharing(in_two: dict[str, list[Any]]) -> None:
    assert in_two["crowded"][0]["figures"][0]["layers/0/dropped"] > 0.1
    for name in ("crowded", "features"):
        for found, expected in zip(in_two[name], in_two[f"{name}, gathered"], strict=True):
            check_equal(found, expected)


def test_half_precision_differs_by_rounding(in_two: dict[str, list[Any]]) -> None:
    expected = rank_processes.steps_of(None, SINGLE, MIXTURE, HALF)
    for found in in_two["half"]:
        for seen, figures in zip(found["figures"], expected["figures"], strict=True):
            assert seen["loss"] == pytest.approx(figures["loss"], rel=2e-3)
        gradient, own = torch.tensor(expected["gradient"]), torch.tensor(found["gradient"])
        assert float((own - gradient).norm() / gradient.norm()) < 0.03


def test_a_rank_without_rows_or_samples_computes_along(in_two: dict[str, list[Any]]) -> None:
    for found in in_two["idle"]:
        check_equal(found, rank_processes.idle(None, SINGLE))


def test_ranks_that_share_experts_write_what_one_process_writes(in_two: dict[str, list[Any]]) -> None:
    assert in_two["written"] == [rank_processes.written(None, SINGLE)] * 2


def test_checkpoints_continue_with_shared_experts_and_without(in_two: dict[str, list[Any]], folder: str) -> None:
    expected = rank_processes.resumed_sharing(None, SINGLE, MIXTURE, f"{folder}/one")
    check_equal(rank_processes.resumed_sharing(None, SINGLE, MIXTURE, f"{folder}/two"), expected)
    for found in (*in_two["resumed"], *in_two["resumed from one"]):
        check_equal(found, expected)


def test_groups_that_do_not_fit_the_processes_are_refused() -> None:
    with pytest.raises(ShoalError, match=r"engine\.expert_parallel: 2 does not divide the 3 processes"):
        ExpertRanks(2, torch.device("cpu"), World(0, 3))


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", [MIXTURE, TWO_EXPERTS, SIX_EXPERTS, BIASED], ids=["whole experts", "parts of one", "parts of three", "biases"]
)
def test_four_ranks_in_two_groups_learn_what_one_process_learns(settings: dict[str, Any], tmp_path: Path) -> None:
    """With two experts each rank holds half of one; with six, some rows of three, or two or one of them."""
    folder, again = f"{tmp_path}/four", f"{tmp_path}/again"
    found = answers(
        4,
        {
            "plain": ["steps_of", sharing(2), settings, {}],
            "kept": ["steps_of", sharing(2, reshard_after_forward=False), settings, {}],
            "saved": ["saved_sharing", sharing(2), settings, folder],
            **{json.dumps(engine): ["resumed_sharing", engine, settings, folder] for engine in (sharing(2), FSDP, DDP)},
            "again": ["saved_sharing", FSDP, settings, again],
            "from fsdp": ["resumed_sharing", sharing(2), settings, again],
        },
    )
    expected = rank_processes.steps_of(None, SINGLE, settings, {})
    for one in (*found["plain"], *found["kept"]):
        check_equal(one, expected)
    resumed = rank_processes.resumed_sharing(None, SINGLE, settings, folder)
    for name in (*(json.dumps(engine) for engine in (sharing(2), FSDP, DDP)), "from fsdp"):
        for one in found[name]:
            check_equal(one, resumed)
    for one in answers(2, {"two": ["resumed_sharing", sharing(2), settings, folder]})["two"]:
        check_equal(one, resumed)


@pytest.mark.long
@needs_deepspeed
def test_zero_continues_a_checkpoint_of_shared_experts_and_the_other_way_round(tmp_path: Path) -> None:
    """DeepSpeed trains in float32."""
    four, zero = f"{tmp_path}/four", f"{tmp_path}/zero"
    plain = {"double": False}
    answers(4, {"saved": ["saved_sharing", sharing(4), MIXTURE, four, plain]})
    expected = rank_processes.resumed_sharing(None, SINGLE, MIXTURE, four, plain)
    for stage in ZERO[1:]:
        found = answers(
            2,
            {
                "resumed": ["resumed_sharing", json.loads(stage), MIXTURE, four, plain],
                "saved": ["saved_sharing", json.loads(stage), MIXTURE, zero, plain],
            },
        )
        for one in (*found["resumed"], *answers(2, {"back": ["resumed_sharing", sharing(2), MIXTURE, zero, plain]})["back"]):
            check_equal(one[:2], expected[:2], 1e-4)  # the third is of an average, which ZeRO does not keep
