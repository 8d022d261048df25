"""The workers that take part in a run, and notices of those that join or leave a class."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from shoal.coordinator import Coordinator
from shoal.coordinator.driver_interfaces import LeaseDatabase
from shoal.errors import printable
from shoal.protocol.messages import PAUSED

_QUERY_EVERY_S = 1.0
_MOST_NAMED = 5
"""If more workers than this join or leave at once, the notice gives only their number."""


class Members(NamedTuple):
    """One row for each worker."""

    rows: list[dict[str, Any]]
    in_database: bool
    """Whether the rows come from a database that leases units; it stores other columns than the coordinator's own table."""
    lost: frozenset[str] = frozenset()
    """Names of workers that have vanished without leaving, and have not come back."""
    here: int = 0
    """Number of workers that take part now."""
    rests: bool = False
    """Whether no progress is expected: the owner has paused the run, or no worker is here and some have left for a while."""


class ArrivalNotices:
    """Compares the workers of a class with those of the last call."""

    present: frozenset[str] = frozenset()

    def update(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """A sentence for each worker that joined or left since the last call."""
        before, self.present = self.present, frozenset(printable(str(row["name"])) for row in rows if row["alive"])
        before -= {printable(str(row["name"])) for row in rows if _is_paused(row)}  # the database has noted these
        for names, what in ((self.present - before, "joined"), (before - self.present, "left")):
            if len(names) > _MOST_NAMED:
                yield f"{len(names)} workers {what}"
            else:
                yield from (f"{name} {what}" for name in sorted(names))


def _is_paused(row: Mapping[str, Any]) -> bool:
    return bool(row.get("left_at")) and str(row["state"]).startswith(PAUSED)


class MemberOverview:
    """The workers of a run: those that lease units in a database, else the coordinator's members."""

    def __init__(self, coordinator: Coordinator, board: LeaseDatabase | None, tell: Callable[[str], None]) -> None:
        """`tell`: receives a notice for each worker that joins or leaves a class."""
        self.coordinator, self.board, self.tell = coordinator, board, tell
        self.arrivals = ArrivalNotices()
        self.latest = Members([], in_database=board is not None)
        """The rows of the last `read`, which any thread may look at."""
        self._next_query_at = 0.0

    def read(self) -> Members:
        """The current rows. Belongs to the thread that coordinates. The database is queried at most once a second."""
        if self.board is None:
            members = self.coordinator.members
            here = len(members.by_name)
            self.latest = Members(self._completed(members.table()), False, frozenset(members.lost), here, self._rests(here, self.paused()))
        elif time.monotonic() >= self._next_query_at:
            rows, self._next_query_at = self.board.workers(), time.monotonic() + _QUERY_EVERY_S
            lost = frozenset(str(row["name"]) for row in rows if not row["alive"] and row.get("left_at") is None)
            here = sum(bool(row["alive"]) for row in rows)
            self.latest = Members(rows, True, lost, here, self._rests(here, [row for row in rows if _is_paused(row)]))
            for notice in self.arrivals.update(self.latest.rows):
                self.tell(notice)
        return self.latest

    def _rests(self, here: int, away: Sized) -> bool:
        return self.coordinator.state.paused or (here == 0 and len(away) > 0)

    def paused(self) -> dict[str, str]:
        """Workers that left for a while, by their names, and why, as they said."""
        if self.board is None:
            return dict(self.coordinator.state.away)
        return {str(row["name"]): str(row["state"]) for row in self.latest.rows if _is_paused(row)}

    def figures(self) -> dict[str, Mapping[str, Any]]:
        """The figures of the last heartbeat of each worker that is here, by its name."""
        if self.board is None:
            return {name: worker.figures for name, worker in self.coordinator.members.by_name.items()}
        return {str(row["name"]): row["figures"] for row in self.latest.rows if row["alive"]}

    def accepted(self, name: str) -> int:
        """How many contributions of a worker were accepted, in all its sessions."""
        return self.coordinator.state.accepted.get(name, 0)

    def _completed(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows with what the coordinator knows of each worker beyond its session, and its task, where a scheduler assigns tasks."""
        tasks, by_name = self.coordinator.tasks, self.coordinator.members.by_name
        rows = [row | {"accepted": self.accepted(row["worker"])} for row in rows]
        return rows if tasks is None else [row | {"task": tasks.task_of(by_name[row["worker"]])} for row in rows]

    def map_members(self, describe: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows that `describe` makes of the coordinator's members, completed."""
        return self._completed([describe(worker) for worker in self.coordinator.members.by_name.values()])
