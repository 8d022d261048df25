"""A class in one process: a real database, the real coordinator, real workers with a student's rights; threads instead of laptops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.config.fields import Secret
from shoal.config.load import LoadedConfig, resolve_data
from shoal.config.schema.cluster import Postgres
from shoal.runs.connections import JoinOptions
from shoal.runs.coordinator_setup import ReadyCoordinator, prepare
from shoal.runs.worker_run import JoinedWorker
from shoal.transports.database_address import Access
from shoal.transports.postgres import schema
from shoal.transports.postgres.access import connect
from tests.support.processes import HANG_S

DIGITS: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden_sizes": [8]},
    "data": {"source": {"kind": "builtin", "name": "digits"}},
    "training": {"batch_size": 32, "epochs": 1, "optimizer": {"name": "Adam", "learning_rate": 0.01}},
    "strategy": {"kind": "workunits", "batches_per_unit": 2, "units_per_update": 3},
    "coordinator": {"heartbeat_interval_s": 1.0},
}


def all_there(count: int) -> Callable[[JoinedWorker], None]:
    """For workers that a test wants to see: none of them begins before `count` have joined, or the quicker ones could do all the work."""
    come = threading.Barrier(count)

    def wait(worker: JoinedWorker) -> None:
        come.wait(HANG_S)

    return wait


class School:
    """A database, and who comes to work in it."""

    def __init__(self, folder: Path, access: Access) -> None:
        self.folder, self.access = folder, access
        self.student = access._replace(user="pupil", password="secret")
        self.threads: list[threading.Thread] = []
        self.workers: list[JoinedWorker] = []
        self.problems: list[BaseException] = []
        self.told: dict[str, list[str]] = {}
        """By worker: what its user was told."""
        with connect(access) as connection:
            schema.init(connection)
            schema.grant(connection, "pupil", "secret", "class")

    @property
    def transport(self) -> Postgres:
        where = self.access
        password = Secret(where.password or "")
        return Postgres(host=where.host, port=where.port, database=where.database, user=where.user, password=password)

    def loaded(self, *layers: Mapping[str, Any]) -> LoadedConfig:
        settings: dict[str, Any] = {}
        for layer in ({"transport": {"kind": "postgres", "host": self.access.host, "port": self.access.port}}, DIGITS, *layers):
            for section, values in layer.items():
                keep = isinstance(values, Mapping) and values.get("kind") in (None, settings.get(section, {}).get("kind"))
                settings[section] = settings.get(section, {}) | values if keep else values
        found = resolve_data(settings, name="class", dialect="shoal", environ={})
        assert found.ok, found.problems
        return found

    def coordinate(self, *layers: Mapping[str, Any], resume: bool = False, run_dir: str = "run", workers: int = 3) -> ReadyCoordinator:
        folder = str(self.folder / run_dir)
        return prepare(self.loaded(*layers), run_dir=folder, resume=resume, reporters=[], workers=workers, transport=self.transport)

    def worker(self, name: str, change: Callable[[JoinedWorker], None] = lambda worker: None) -> threading.Thread:
        """Somebody joins with the class's token, and works with no more than a student's rights."""

        def work() -> None:
            try:
                receipts = self.folder / "run" / "workers" / f"{name}.jsonl"
                told = self.told.setdefault(name, [])
                joined = JoinedWorker(
                    JoinOptions(self.student.address, "", None, name=name, receipts=receipts, patience_s=HANG_S), told.append
                )
                joined.prepare()
                self.workers.append(joined)
                change(joined)
                joined.work()
            except BaseException as problem:
                self.problems.append(problem)

        thread = threading.Thread(target=work, daemon=True, name=name)
        self.threads.append(thread)
        thread.start()
        return thread

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with connect(self.access) as connection:
            return connection.execute(query.encode()).fetchall()

    def balance(self) -> dict[str, int]:
        """Units by state. What must hold at any time is checked: nothing is without an owner, and every unit is in one state."""
        with connect(self.access) as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            orphans = connection.execute("SELECT * FROM shoal.orphans()").fetchall()
            counts = dict(connection.execute("SELECT state, units FROM shoal.unit_counts").fetchall())
        assert orphans == []
        states = ("pending", "claimed", "completed", "failed", "cancelled")
        assert counts.get("issued", 0) == sum(counts.get(state, 0) for state in states), counts
        return counts

    def finish(self) -> None:
        for thread in self.threads:
            thread.join(HANG_S)
        assert not self.problems, self.problems
        assert not any(thread.is_alive() for thread in self.threads)
