"""What a run through a database shows to whoever looks at it: figures, and the newest grid of samples."""

from __future__ import annotations

from typing import Any

from shoal.errors import ShoalError
from shoal.reporters.metrics import metrics_of
from shoal.runs.monitoring.recorder import Recorder, Reporter


class Blackboard(Reporter):
    """Writes into the database that the run goes through. If that fails, the run goes on and a warning is shown."""

    def start(self, recorder: Recorder) -> None:
        self.recorder, self.server = recorder, recorder.blackboard
        self._shown = ""
        length, run = recorder.engine.total_steps, recorder.run
        plan = {
            "name": run.name or recorder.directory.path.name,
            "strategy": run.strategy.kind,
            "steps": length,
            "epochs": run.training.epochs,
        }
        self.server.set_fact("plan", plan | {"parameters": recorder.engine.size})
        self.server.set_fact("end", None)

    def record(self, record: dict[str, Any]) -> None:
        figures = metrics_of(record) | {name: record[name] for name in ("step", "samples", "epoch") if name in record}
        try:
            self.server.metrics([(record["step"], figures)])
            self._show_members()
            self._show_samples()
        except ShoalError as error:
            self.recorder.message(f"warning: step {record['step']} is not on the blackboard: {error}")

    def drawn(self) -> None:
        try:
            self._show_samples()
        except ShoalError as error:
            self.recorder.message(f"warning: the first picture is not on the blackboard: {error}")

    def _show_members(self) -> None:
        """Who takes part, where the database does not know it itself. At the end they have gone: those who were there last stay."""
        assert self.recorder.members is not None
        rows, in_database = self.recorder.members()
        if rows and not in_database:
            self.server.set_fact("members", rows)

    def _show_samples(self) -> None:
        """The newest grid, where there is one that was not shown yet."""
        grids = sorted((self.recorder.directory.path / "samples").glob("*.png"))
        if grids and grids[-1].name != self._shown:
            self.server.picture(self.recorder.step, grids[-1].read_bytes())
            self._shown = grids[-1].name

    def close(self, summary: dict[str, Any]) -> None:
        try:
            self.server.set_fact("end", summary["status"])
        except ShoalError as error:
            self.recorder.message(f"warning: how the run ended is not on the blackboard: {error}")
