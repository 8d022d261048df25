"""The two implementations of leases under one set of names: the pure module, and the functions in PostgreSQL. One suite tests both.

Time is passed on both sides by hand. The database has a clock of its own, so there deadlines are moved towards it instead; leases and steps
are long enough that the seconds which a test itself takes do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from shoal.coordinator.units.lease_table import PATIENCE_LEASES, GivenUp, Leases
from shoal.transports.database_address import parse
from shoal.transports.postgres import ClaimedUnit, LeaseClient, PostgresServer
from shoal.transports.postgres.enrolment import own_access
from tests.support.postgres_server import Database
from tests.support.transport_harness import PATIENCE_S

LEASE_S = 1000.0
ATTEMPTS = 3


class Claimed(NamedTuple):
    """What a worker is told of a unit that it leased."""

    unit: int
    version: int
    attempt: int


class Keeper(Protocol):
    """What both can do. A unit is a number, a worker a name."""

    def issue(self, version: int, units: Sequence[int], quorum: int | None = None, most_lag: int = 0) -> None: ...
    def claim(self, worker: str) -> Claimed | None: ...
    def renew(self, worker: str) -> None: ...
    def holds(self, worker: str, unit: int) -> bool: ...
    def submit(self, worker: str, unit: int, version: int) -> str: ...
    def give_back(self, worker: str, unit: int) -> None: ...
    def fail(self, worker: str, unit: int) -> None: ...
    def leave(self, worker: str) -> None: ...
    def lose(self, worker: str) -> None: ...
    def wait(self, seconds: float) -> None:
        """Time passes, and leases that end are noticed."""
        ...

    def wait_unnoticed(self, seconds: float) -> None:
        """Time passes, and leases that ended are not noticed yet."""
        ...

    def compute(self, seconds: float) -> None:
        """Time passes while workers compute; from now on they may wait for a version that is near."""
        ...

    def given_up(self) -> dict[int, str]: ...
    def counts(self) -> dict[str, int]: ...
    def outcomes(self, worker: str) -> dict[str, int]: ...


class PureKeeper:
    """The module itself."""

    def __init__(self, *present: str) -> None:
        """`present`: who is there from the beginning, where each worker is somebody else. Without them all are one, which tries again, and
        no unit waits for anybody else."""
        self.present, self._apart = set(present), bool(present)
        patience = PATIENCE_LEASES if present else 0
        self.leases = Leases(LEASE_S, ATTEMPTS, present=lambda: self.present, patience_leases=patience)
        self.now = 0.0
        self._given_up: list[GivenUp] = []

    def issue(self, version: int, units: Sequence[int], quorum: int | None = None, most_lag: int = 0) -> None:
        self._given_up += self.leases.issue(version, units, quorum, self.now, most_lag)

    def claim(self, worker: str) -> Claimed | None:
        lease = self.leases.claim(worker, self.now)
        return Claimed(lease.unit, lease.version, lease.attempt) if lease is not None else None

    def renew(self, worker: str) -> None:
        if self._apart:
            self.present.add(worker)
        self.leases.renew(worker, self.now)

    def holds(self, worker: str, unit: int) -> bool:
        return self.leases.holds(worker, unit, self.now)

    def submit(self, worker: str, unit: int, version: int) -> str:
        return self.leases.submit(worker, unit, version, self.now)

    def give_back(self, worker: str, unit: int) -> None:
        self.leases.give_back(worker, unit)

    def fail(self, worker: str, unit: int) -> None:
        given_up = self.leases.fail(worker, unit, "broken", self.now)
        self._given_up += [given_up] if given_up is not None else []

    def leave(self, worker: str) -> None:
        self.present.discard(worker)
        self.leases.leave(worker)

    def lose(self, worker: str) -> None:
        self._given_up += self.leases.lose(worker, self.now)

    def wait(self, seconds: float) -> None:
        self.wait_unnoticed(seconds)
        self._given_up += self.leases.expire(self.now)

    def wait_unnoticed(self, seconds: float) -> None:
        self.now += seconds

    def compute(self, seconds: float) -> None:
        self.leases.per_version = self.leases.quorum
        self.now += seconds

    def given_up(self) -> dict[int, str]:
        assert dict(self._given_up) == self.leases.given_up, "each was told once, when it happened"
        return self.leases.given_up

    def counts(self) -> dict[str, int]:
        return self.leases.counts()

    def outcomes(self, worker: str) -> dict[str, int]:
        return {name: self.leases.workers[worker][name] for name in ("completed", "late", "cancelled", "failed")}

    def close(self) -> None:
        return None


class PostgresKeeper:
    """The real server's board, and a real desk for each worker. A unit is a batch of the first epoch."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.owner = database.connect()
        self._set_patience()
        self.server = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=1_000_000)
        self.desks: dict[str, LeaseClient] = {}
        self.units: dict[tuple[str, int, int], ClaimedUnit] = {}
        """By worker, unit and version: what the worker last leased of that."""
        self._given_up: dict[int, str] = {}

    def _set_patience(self) -> None:
        self.database.give_up_at_once()

    def desk(self, worker: str) -> LeaseClient:
        if worker not in self.desks:
            self.desks[worker] = LeaseClient(
                self.database.conninfo("coordinator"), poll_interval_s=1.0
            )  # a student may hold less, and fail less
            assert self.desks[worker].join(worker, {}) == worker
        return self.desks[worker]

    def issue(self, version: int, units: Sequence[int], quorum: int | None = None, most_lag: int = 0) -> None:
        """As the coordinator does: what came in is consumed, and the next units are issued, together."""
        with self.server.transaction():
            self._consume()
            self.server.issue(version, [(0, unit, 1) for unit in units], LEASE_S, ATTEMPTS, quorum, most_lag)

    def _consume(self) -> None:
        for request in self.server.poll(0):
            header = request.message.header
            if header["kind"] == "failed":
                assert header["start"] not in self._given_up
                self._given_up[header["start"]] = header["reason"]
            self.server.consume(request)

    def claim(self, worker: str) -> Claimed | None:
        for unit in self.desk(worker).claim(1, 0.0):
            self.units[worker, unit.start, unit.iteration] = unit
            return Claimed(unit.start, unit.iteration, unit.attempts + 1)
        return None

    def renew(self, worker: str) -> None:
        self.desk(worker).heartbeat("computing", {})

    def holds(self, worker: str, unit: int) -> bool:
        leased = self._leased(worker, unit)
        row = (
            self.owner.execute("SELECT shoal.is_lease_valid(%s, %s)", (leased.id, leased.lease)).fetchone() if leased is not None else None
        )
        return bool(row and row[0])

    def _leased(self, worker: str, unit: int) -> ClaimedUnit | None:
        """What the worker last leased of a unit."""
        found = [leased for (name, number, _), leased in self.units.items() if (name, number) == (worker, unit)]
        return max(found, key=lambda leased: leased.iteration, default=None)

    def submit(self, worker: str, unit: int, version: int) -> str:
        return self.desk(worker).submit(self.units[worker, unit, version], {}, [b"result"])

    def give_back(self, worker: str, unit: int) -> None:
        if (leased := self._leased(worker, unit)) is not None:
            self.desk(worker).return_unit(leased)

    def fail(self, worker: str, unit: int) -> None:
        if (leased := self._leased(worker, unit)) is not None:
            self.desk(worker).fail_unit(leased, "broken")

    def leave(self, worker: str) -> None:
        self.desk(worker).leave()

    def lose(self, worker: str) -> None:
        """It falls silent, and somebody comes who takes its name."""
        self.owner.execute("UPDATE shoal.workers SET seen_at = now() - interval '1 day' WHERE name = %s", (worker,))
        self.desks.pop(worker).close()
        self.desk(worker)

    def wait(self, seconds: float) -> None:
        self.wait_unnoticed(seconds)
        self.owner.execute("SELECT shoal.requeue_expired()")

    def wait_unnoticed(self, seconds: float) -> None:
        self.owner.execute("UPDATE shoal.units SET deadline = deadline - make_interval(secs => %s) WHERE state = 'claimed'", (seconds,))

    def compute(self, seconds: float) -> None:
        self.owner.execute("UPDATE shoal.units SET claimed_at = claimed_at - make_interval(secs => %s) WHERE state = 'claimed'", (seconds,))

    def given_up(self) -> dict[int, str]:
        waiting = self.owner.execute("SELECT start, reason FROM shoal.contributions WHERE kind = 'failed'").fetchall()
        return self._given_up | dict(waiting)

    def counts(self) -> dict[str, int]:
        return {state: units for state, units in self.server.table().items() if state != "dropped"}

    def outcomes(self, worker: str) -> dict[str, int]:
        rows = [row for row in self.server.workers() if row["name"] == worker]
        return {name: rows[0][name] if rows else 0 for name in ("completed", "late", "cancelled", "failed")}

    def forget(self) -> None:
        """Begin again, as if no worker had been here; the workers' connections stay."""
        self._consume()
        tables = ("units", "iterations", "workers", "unit_totals", "contributions", "failures", "standings", "note_times")
        self.owner.execute(f"TRUNCATE {', '.join(f'shoal.{table}' for table in tables)}".encode())
        for worker, desk in self.desks.items():
            assert desk.join(worker, {}) == worker
        self.units, self._given_up = {}, {}

    def close(self) -> None:
        for desk in self.desks.values():
            desk.close()
        self.server.close()
        self.owner.close()


class StudentsKeeper(PostgresKeeper):
    """As before, where each worker is a student with a role of its own. Nobody is made to wait for failing much: that is not a matter of
    leases, and tested elsewhere."""

    def __init__(self, database: Database, folder: Path, *students: str) -> None:
        super().__init__(database)
        self.accesses = {name: own_access(parse(database.conninfo("class")), name, folder / name, PATIENCE_S) for name in students}
        self._enter()

    def _set_patience(self) -> None:
        """As it is for a class."""

    def _enter(self) -> None:
        for name, access in self.accesses.items():
            if name not in self.desks:
                self.desks[name] = LeaseClient(access.address, poll_interval_s=1.0)
            assert self.desks[name].join(name, {}) == name

    def claim(self, worker: str) -> Claimed | None:
        self.owner.execute("UPDATE shoal.standings SET failed_in_row = 0, paused_until = NULL, quarantined = NULL")
        self.desk(worker)._after = 0  # a search goes on behind the last unit, so one that the student may try by now would come later
        return super().claim(worker)

    def wait_unnoticed(self, seconds: float) -> None:
        super().wait_unnoticed(seconds)
        passed = "make_interval(secs => %(s)s)"
        self.owner.execute(f"UPDATE shoal.failures SET at = at - {passed}, first_at = first_at - {passed}".encode(), {"s": seconds})

    def close(self) -> None:
        super().close()
        with self.database.connect() as owner:
            for access in self.accesses.values():
                ended = "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity WHERE usename = %s"
                owner.execute(ended, (int(1000 * PATIENCE_S), access.user))
                owner.execute("SELECT shoal.drop_student(%s)", (access.user,))
