"""What a run through a database shows to whoever looks at it: figures, and the newest grid of samples."""

from __future__ import annotations

from typing import Any

from shoal.errors import ShoalError
from shoal.runs.loop import Loop
from shoal.runs.reporter import Reporter
from shoal.watch.sinks import metrics_of


class Blackboard(Reporter):
    """Writes into the database that the run goes through. Nobody trains worse because it could not be written."""

    def start(self, loop: Loop) -> None:
        self.loop, self.server = loop, loop.server  # type: ignore[attr-defined]
        self._shown = ""
        self.members = loop.coordinator.members if loop.board is None else None  # type: ignore[attr-defined]
        """None: the database itself knows who leases what."""
        length, run = loop.engine.total_steps, loop.run
        plan = {"name": run.name or loop.directory.path.name, "strategy": run.strategy.kind, "steps": length, "epochs": run.training.epochs}
        self.server.set_fact("plan", plan | {"parameters": loop.engine.size})
        self.server.set_fact("end", None)

    def record(self, record: dict[str, Any]) -> None:
        figures = metrics_of(record) | {name: record[name] for name in ("step", "samples", "epoch") if name in record}
        try:
            self.server.metrics([(record["step"], figures)])
            if self.members is not None and self.members.by_name:  # at the end they have gone: who was there last stays
                self.server.set_fact("members", self.members.table())
            self._show_samples()
        except ShoalError as error:
            self.loop.message(f"warning: step {record['step']} is not on the blackboard: {error}")

    def _show_samples(self) -> None:
        """The newest grid, where there is one that was not shown yet."""
        grids = sorted((self.loop.directory.path / "samples").glob("*.png"))
        if grids and grids[-1].name != self._shown:
            self.server.picture(self.loop.step, grids[-1].read_bytes())
            self._shown = grids[-1].name

    def close(self, summary: dict[str, Any]) -> None:
        try:
            self.server.set_fact("end", summary["status"])
        except ShoalError as error:
            self.loop.message(f"warning: how the run ended is not on the blackboard: {error}")
