"""status.json of a run with workers, replaced each second: `shoal status`, `shoal top` and the dashboard read it.

What workers report was checked when it arrived. Here its amount is bounded, so that many workers do not make the file large.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from shoal.config.schema.updates import Privacy
from shoal.coordinator import Coordinator
from shoal.coordinator.members.table import Member
from shoal.errors import ShoalError
from shoal.protocol.server import Traffic
from shoal.runs.folder.run_reader import STATUS, clean_text
from shoal.runs.monitoring.history import History
from shoal.runs.monitoring.members import MemberOverview
from shoal.runs.monitoring.recorder import Recorder
from shoal.strategies import RunLength

FILE = "status.json"
_EVERY_S = 1.0
_MOST_MEMBERS, _MOST_GONE, _MOST_TASKS, _MOST_FIGURES = 500, 64, 500, 64
_PACE_OVER_S = 60.0
"""The remaining time is computed from the speed of the last minute."""


_HEARTBEAT_FIGURES = (
    *("computing_s", "data_s", "forward_backward_s", "communication_s", "optimizer_s", "sending_s"),
    *("samples", "tokens_per_s", "mfu", "memory_bytes", "latency_ms", "bandwidth_mbps"),
)
_SHOWN_FIGURES = {name: name for name in _HEARTBEAT_FIGURES} | {"idle_s": "waiting_s"}
"""Figures of a worker's heartbeat, and their names in the file."""


class TrafficTotals:
    """Bytes, and refused messages by reason, over all starts of a coordinator. Snapshots store them; records of figures store the bytes."""

    def __init__(self, traffic: Traffic, coordinator: Coordinator) -> None:
        self._traffic, self._coordinator = traffic, coordinator
        self._bytes_before = {"received_bytes": 0, "sent_bytes": 0}
        self._refused_before: dict[str, int] = {}

    @property
    def bytes(self) -> dict[str, int]:
        return {name: before + int(getattr(self._traffic, name)) for name, before in self._bytes_before.items()}

    def state_dict(self) -> dict[str, Any]:
        return {**self.bytes, "refused": added(self._refused_before, self._coordinator.refused, self._traffic.refused)}

    def restore(self, saved: Mapping[str, Any], last_record: Mapping[str, Any]) -> None:
        """Continue from a snapshot and from the last record, which may be newer."""
        for name in self._bytes_before:
            self._bytes_before[name] = max(int(saved.get(name, 0)), int(last_record.get(name, 0)))
        self._refused_before = dict(saved.get("refused", {}))


def added(*counts: Mapping[str, int]) -> dict[str, int]:
    """The sum of several counts, name by name."""
    names = dict.fromkeys(name for several in counts for name in several)
    return {name: sum(several.get(name, 0) for several in counts) for name in names}


class StatusWriter:
    def __init__(
        self, recorder: Recorder, coordinator: Coordinator, length: RunLength, members: MemberOverview, traffic: TrafficTotals
    ) -> None:
        self.recorder, self.coordinator, self.length, self.members, self.traffic = recorder, coordinator, length, members, traffic
        self.run, self.directory, self.history = recorder.run, recorder.directory, History(recorder.directory.path)
        self._next_at, self._state = 0.0, ""
        self.latest: dict[str, Any] = {}
        self._pace: deque[tuple[float, int]] = deque(maxlen=64)
        self._workers_before: dict[str, dict[str, Any]] = {}
        self._gone: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def update(self, state: str = "running") -> None:
        """Write the status, once a second at most, and when the run's state changes."""
        now = time.monotonic()
        if now < self._next_at and state == self._state:
            return
        self._next_at, self._state = now + _EVERY_S, state
        status = self.latest = self.status(state)
        self.history.append(status, now)
        self._write(status)

    def _write(self, status: dict[str, Any]) -> None:
        with suppress(ShoalError):  # the run does not depend on the file
            STATUS.write(self.directory.path / FILE, status)

    def show_waiting(self, state: str) -> None:
        """Write the last status with another state, while the run waits for what it would read the status from."""
        self._state = state
        if self.latest:
            self.latest = self.latest | {"at": round(time.time(), 3), "state": state, "events": list(self.recorder.events)}
            self._write(self.latest)

    def as_json(self) -> bytes:
        """The current status, for an owner on another machine."""
        return json.dumps(self.status(self._state or "running")).encode()

    def status(self, state: str) -> dict[str, Any]:
        recorder, coordinator, run, now = self.recorder, self.coordinator, self.run, time.time()
        rows = self._members(now)
        tasks = coordinator.tasks
        return {
            STATUS.key: STATUS.version,
            "at": round(now, 3),
            "pid": os.getpid(),
            "run": run.name or self.directory.path.name,
            "state": state,
            "strategy": run.strategy.kind,
            "scheduler": run.scheduler.kind,
            "transport": run.transport.kind,
            "version": coordinator.state.version,
            "of": recorder.known_steps,
            "step_name": recorder.step_name,
            "expected": coordinator.plan.expected,
            "wall_s": round(recorder.wall_s, 3),
            "samples": recorder.samples,
            **self._progress(),
            "figures": {split: _bounded(recorder.latest[split]) for split in ("train", "eval")},
            "contributions": dict(coordinator.state.contributions),
            **self.traffic.state_dict(),
            "privacy": self._privacy(),
            "members": rows[:_MOST_MEMBERS],
            "members_left_out": max(0, len(rows) - _MOST_MEMBERS),
            "gone": self.remember_gone(rows),
            "tasks": tasks.table()[:_MOST_TASKS] if tasks is not None else [],
            "tasks_done": tasks.finished_pieces if tasks is not None else 0,
            "events": list(recorder.events),
        }

    def _progress(self) -> dict[str, Any]:
        """Progress of the run, and the remaining seconds at the speed of the last minute."""
        recorder, now = self.recorder, time.monotonic()
        done, total = recorder.completed, max(1, recorder.engine.total_steps)
        self._pace.append((now, done))
        while now - self._pace[0][0] > _PACE_OVER_S:
            self._pace.popleft()
        (then, before), left = self._pace[0], max(0, total - done)
        eta = left * (now - then) / (done - before) if done > before else None
        return {"progress": round(min(1.0, done / total), 4), "eta_s": None if eta is None else round(eta, 1)}

    def _privacy(self) -> dict[str, Any] | None:
        settings = self.run.updates.privacy
        if not settings.enabled:
            return None
        spent = self.recorder.latest["train"].get("epsilon")
        return {"epsilon": spent, "delta": settings.delta, "protects_up_to": Privacy.protects_up_to}

    # --- workers ---------------------------------------------------------------------------------------

    def _members(self, now: float) -> list[dict[str, Any]]:
        members = self.members.read()
        if members.in_database:
            return [_lessee(row, now) for row in members.rows if row["alive"]]
        return self.members.map_members(lambda worker: _member(worker, self.coordinator.now, now))

    def remember_gone(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Workers that have left, paused or vanished (`gone`), the last ones last."""
        connected, paused = {row["worker"]: row for row in rows}, self.members.paused()
        self._gone |= {name: row | {"state": "gone"} for name, row in self._workers_before.items() if name not in connected}
        for name in paused:  # also those that paused before the coordinator was started again
            self._gone.setdefault(name, {"worker": name, "lag": 0, "accepted": 0, "rejected": 0, "bytes": 0})
        for name in connected:
            self._gone.pop(name, None)
        while len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
        self._workers_before = connected
        lost = self.members.latest.lost
        return [self._gone_row(row, paused.get(name, "gone" if name in lost else "left")) for name, row in self._gone.items()]

    def _gone_row(self, row: dict[str, Any], state: str) -> dict[str, Any]:
        """The last row of a worker that is not here. What it sent after that row was made is counted, too."""
        counted = {} if self.members.latest.in_database else {"accepted": self.members.accepted(row["worker"])}
        return row | {"state": clean_text(state)} | counted


def _member(worker: Member, now: float, wall: float) -> dict[str, Any]:
    """The row of a coordinator's member. `now`: the coordinator's clock; `wall`: the wall clock."""
    return {
        "worker": worker.name,
        "state": worker.state,
        "since": round(wall - (now - worker.joined_at), 1),
        "heard_s": round(now - worker.seen_at, 1),
        "address": worker.address,
        "guest": worker.guest,
        "rate": worker.rate,
        "lag": worker.lag,
        "accepted": worker.accepted,
        "rejected": worker.rejected,
        "why": dict(worker.reasons),
        "bytes": worker.received_bytes,
        **_heartbeat_figures(worker.figures),
        **{key: worker.about[key] for key in ("device", "system") if key in worker.about},
    }


def _lessee(row: Mapping[str, Any], wall: float) -> dict[str, Any]:
    """The row of a worker that leases units in a database."""
    here_s = max(1e-9, (row["seen_at"] - row["joined_at"]).total_seconds())
    rejected = {name: row[name] for name in ("late", "cancelled", "failed") if row[name]}
    return {
        "worker": str(row["name"]),
        "state": "".join(character if character.isprintable() else "?" for character in str(row["state"]))[:40],
        "since": round(row["joined_at"].timestamp(), 1),
        "heard_s": round(max(0.0, wall - row["seen_at"].timestamp()), 1),
        "rate": row["completed"] / here_s,
        "lag": 0,
        "accepted": row["completed"],
        "rejected": sum(rejected.values()),
        "why": rejected,
        "bytes": 0,
        **_heartbeat_figures(row["figures"]),
        **{key: str(row["about"][key])[:200] for key in ("device", "system") if key in row["about"]},
    }


def _heartbeat_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a worker's last heartbeat."""
    return {shown: figures[name] for name, shown in _SHOWN_FIGURES.items() if isinstance(figures.get(name), (int, float))}


def _bounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in figures.items() if isinstance(value, (int, float)) and math.isfinite(value)}
    return dict(list(plain.items())[:_MOST_FIGURES])
