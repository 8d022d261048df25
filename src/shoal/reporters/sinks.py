"""Destinations of metrics besides the run's own folder: TensorBoard, W&B, pictures, the run's database, the hub, alerts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shoal.config import Run
from shoal.config.fields import as_data
from shoal.config.schema import output as schema
from shoal.errors import ShoalError
from shoal.reporters.alerts import AlertReporter
from shoal.reporters.hub import HubUploads
from shoal.reporters.model_card import LocalCard
from shoal.reporters.plots import save_curves, save_heat_map
from shoal.runs.monitoring.recorder import Recorder, Reporter

_NOT_METRICS = ("step", "split", "samples", "epoch", "wall_s", "received_bytes", "sent_bytes")


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    """The metrics of a record, named by its split."""
    return {f"{record['split']}/{name}": value for name, value in record.items() if name not in _NOT_METRICS}


class TensorBoard(Reporter):
    """Event files for TensorBoard."""

    def __init__(self, settings: schema.TensorBoard, run: Run) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ShoalError("logging.sinks: tensorboard is not installed: pip install 'shoal[tensorboard]'") from None
        self._writer_class = SummaryWriter
        self.directory = run.logging.directory

    def start(self, recorder: Recorder) -> None:
        folder = self.directory or str(recorder.directory.path / "logs")
        self.writer = self._writer_class(folder, purge_step=recorder.step or None)

    def record(self, record: dict[str, Any]) -> None:
        for name, value in metrics_of(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self, summary: dict[str, Any]) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


class Wandb(Reporter):
    """Weights & Biases; works offline too."""

    def __init__(self, settings: schema.Wandb, run: Run) -> None:
        try:
            import wandb
        except ImportError:
            raise ShoalError("logging.sinks: wandb is not installed: pip install 'shoal[wandb]'") from None
        self._wandb: Any = wandb
        self._run = run

    def start(self, recorder: Recorder) -> None:
        path, project = recorder.directory.path, self._run.logging.project or "shoal"
        try:
            offline = self._wandb.setup().settings.mode == "online" and not self._wandb.login(prompt=False)
            if offline:
                recorder.message(f"W&B: this machine is not logged in, the record stays in {path / 'wandb'}; `wandb sync` sends it later")
            self.session = self._wandb.init(
                project=project,
                name=path.name,
                dir=str(path),
                config=as_data(self._run),
                resume="allow",
                id=path.name,
                mode="offline" if offline else None,
            )
        except self._wandb.Error as error:
            raise ShoalError(f"W&B does not start: {error}; WANDB_MODE=offline keeps the record here") from None

    def record(self, record: dict[str, Any]) -> None:
        self.session.log(metrics_of(record), step=record["step"])

    def close(self, summary: dict[str, Any]) -> None:
        if hasattr(self, "session"):
            self.session.finish(exit_code=0 if summary["status"] != "failed" else 1)


class LossCurve(Reporter):
    """loss.png in the run's folder, drawn when it ends."""

    def start(self, recorder: Recorder) -> None:
        self.directory, self.step_name = recorder.directory, recorder.step_name

    def close(self, summary: dict[str, Any]) -> None:
        if not hasattr(self, "directory"):
            return
        curves: dict[str, list[tuple[float, float]]] = {}
        for record in self.directory.metrics():
            for name, value in record.items():
                if name.endswith("loss") and isinstance(value, (int, float)):
                    curves.setdefault(f"{record['split']} {name}", []).append((record["step"], value))
        if curves:
            save_curves(curves, Path(self.directory.path) / "loss.png", x_title=self.step_name)


class LoadMap(Reporter):
    """experts.png in the run's folder: how the last recorded step's tokens were spread over the experts of each layer; drawn at the end."""

    def start(self, recorder: Recorder) -> None:
        self.path, self.loads = Path(recorder.directory.path), dict[tuple[int, int], float]()

    def record(self, record: dict[str, Any]) -> None:
        found = [(re.fullmatch(r"layers/(\d+)/load/(\d+)", name), value) for name, value in record.items()]
        self.loads |= {(int(match[1]), int(match[2])): float(value) for match, value in found if match}

    def close(self, summary: dict[str, Any]) -> None:
        if not getattr(self, "loads", None):
            return
        layers, experts = (1 + max(place[axis] for place in self.loads) for axis in (0, 1))
        rows = [[self.loads.get((layer, expert), 0.0) for expert in range(experts)] for layer in range(layers)]
        save_heat_map(rows, self.path / "experts.png", x_title="share of each expert,", y_title="layer")


class Blackboard(Reporter):
    """Writes into the database that the run uses as its transport. If that fails, the run continues and a warning is shown."""

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
        self.server.set_end(None)

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
        """Write the workers, where the database does not have them itself. When all have left at the end, the last list stays."""
        assert self.recorder.members is not None
        members = self.recorder.members()
        if members.rows and not members.in_database:
            self.server.set_fact("members", members.rows)

    def _show_samples(self) -> None:
        """The newest grid, where there is one that was not shown yet."""
        grids = sorted((self.recorder.directory.path / "samples").glob("*.png"))
        if grids and grids[-1].name != self._shown:
            self.server.picture(self.recorder.step, grids[-1].read_bytes())
            self._shown = grids[-1].name

    def close(self, summary: dict[str, Any]) -> None:
        try:
            self.server.set_end(summary["status"])
        except ShoalError as error:
            self.recorder.message(f"warning: how the run ended is not on the blackboard: {error}")


def sinks_for(run: Run) -> list[Reporter]:
    """The sinks that a run asks for."""
    made: list[Reporter] = [LossCurve(), LoadMap()]
    made += [sink.builder()(sink, run) for sink in run.logging.sinks]
    made += [Blackboard(), LocalCard()] if run.transport.kind == "postgres" and not run.alone else []
    made += [HubUploads(run)] if run.hub.enabled else []
    made += [AlertReporter(run)] if run.alerts.wanted else []
    return made
