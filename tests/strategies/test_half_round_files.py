"""What a worker keeps in the middle of a round, on the disk and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engines import SingleEngine
from shoal.protocol.messages import SeatAssigned
from shoal.runs.build_run import assemble
from shoal.runs.folder.worker_checkpoint import SaveSchedule, WorkerCheckpoints
from shoal.updates.state_packing import packed
from shoal.updates.worker_state import PartialRound, RoundStart
from tests.strategies.test_mixtures_over_workers import MOE, REMEMBERED, STRATEGIES
from tests.support.layered_settings import loaded, merged

BEGAN = RoundStart(2, 17, SeatAssigned(1, 0, 12))
HALF = PartialRound(BEGAN, SeatAssigned(1, 0, 15), 3, 4, 48, 700, {"loss": 2.5})


def engine_of(steps: int) -> SingleEngine:
    """A worker's engine with everything that a step can leave behind: moments, biases, loads, episodes."""
    adam = {"training": {"optimizer": {"name": "AdamW", "learning_rate": 0.01}}}
    parts = assemble(loaded(merged(MOE, REMEMBERED, adam, {"strategy": STRATEGIES["diloco"]})).run, joins=True)
    assert isinstance(parts.engine, SingleEngine)
    for _ in range(steps):
        parts.engine.step([next(parts.feed)])
    return parts.engine


def keepsakes_of(engine: SingleEngine, folder: Path, told: list[str], shape: str = "a") -> WorkerCheckpoints:
    return WorkerCheckpoints(engine, folder, None, SaveSchedule(lambda version: True, 3, shape), 1, told.append)


def test_a_half_round_holds_all_that_steps_leave_behind(tmp_path: Path) -> None:
    engine, told = engine_of(3), list[str]()
    assert [keepsakes_of(engine, tmp_path, told).steps_until_save(step) for step in (3, 4, 5)] == [3, 2, 1]
    keepsakes_of(engine, tmp_path, told).save_partial_round(HALF, torch.arange(3.0))
    drawn = torch.rand(2)
    another, residual = engine_of(0), torch.zeros(3)
    keepsakes = keepsakes_of(another, tmp_path, told)
    assert keepsakes.find_partial_round(BEGAN) == HALF
    keepsakes.resume_partial_round(residual, within=True)
    assert torch.equal(torch.rand(2), drawn), "random numbers go on where they were"
    assert residual.tolist() == [0, 1, 2]
    assert torch.equal(another.vector, engine.vector)
    assert another.step_count == 3
    reports = another.take_report(), engine.take_report()
    assert torch.equal(*reports)
    assert len(reports[0].unique()) > 50, "loads and episodes are in the report"
    assert not told


@pytest.mark.parametrize(
    ("change", "shape", "why"),
    [
        ({"version": 3}, "a", "the run is at round 4"),
        ({"weights": 18}, "a", "the round begins with other weights"),
        ({"place": SeatAssigned(0, 0, 12)}, "a", "this worker has another place at the data"),
        ({"place": SeatAssigned(1, 0, 16)}, "a", "this worker has another place at the data"),
        ({}, "b", "settings have changed"),
    ],
    ids=["round", "weights", "seat", "position", "settings"],
)
def test_a_half_round_of_anything_else_is_deleted_with_a_word(tmp_path: Path, change: dict[str, Any], shape: str, why: str) -> None:
    engine, told = engine_of(0), list[str]()
    keepsakes_of(engine, tmp_path, told).save_partial_round(HALF, None)
    assert keepsakes_of(engine, tmp_path, told, shape).find_partial_round(BEGAN._replace(**change)) is None
    assert told == [f"the partial round that this worker saved (3 of 4 steps of round 3) cannot be resumed: {why}; it is deleted"]
    assert not (tmp_path / "half-round").exists()


def test_a_round_that_was_finished_and_taken_lends_its_optimizer_to_the_next(tmp_path: Path) -> None:
    engine, told = engine_of(3), list[str]()
    whole = HALF._replace(steps=4)
    keepsakes_of(engine, tmp_path, told).save_partial_round(whole, None)
    another = engine_of(0)
    weights, keepsakes = another.vector.clone(), keepsakes_of(another, tmp_path, told)
    assert keepsakes.find_partial_round(RoundStart(5, 99, HALF.place)) == whole
    keepsakes.resume_partial_round(None, within=False)
    assert torch.equal(another.vector, weights), "the coordinator's weights are newer"
    assert torch.equal(_moments(another), _moments(engine))
    assert not torch.equal(another.take_report(), engine.take_report()), "what it reported is not reported twice"
    assert keepsakes.find_partial_round(RoundStart(1, 17, HALF.place)) is None, "no run goes back"


def _moments(engine: SingleEngine) -> torch.Tensor:
    tensors = dict[str, torch.Tensor]()
    packed(engine.state_dict()["optimizers"], "", tensors)
    return torch.cat([value.flatten().float() for _, value in sorted(tensors.items())])


def test_only_the_newest_half_round_is_kept_beside_the_rounds(tmp_path: Path) -> None:
    engine, told = engine_of(0), list[str]()
    keepsakes = keepsakes_of(engine, tmp_path, told)
    keepsakes.save(2, None)
    for engine.step_count in (3, 6):
        keepsakes.save_partial_round(HALF, None)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("step-*")) == ["half-round/step-00000006", "step-00000002"]
    assert [path.name for path in keepsakes.places[0].all()] == ["step-00000002"], "it is not taken for a whole round"
    keepsakes.delete_partial_round()
    assert keepsakes.find_partial_round(BEGAN) is None
    assert not told
