"""What `shoal.train` gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shoal.config.derived_values import USER_KINDS
from shoal.errors import ShoalError
from shoal.models.huggingface.model import HuggingFace
from shoal.runs.coordinator_run import CoordinatorLoop
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.training.loop import TrainingLoop


@dataclass(frozen=True, eq=False)
class Result:
    """A run that has ended."""

    status: str
    """`completed`, `stopped early` or `interrupted`."""
    run_dir: Path
    model: nn.Module | None
    """The trained network: your own object, if you gave one. None in a process of torchrun's that does not coordinate."""
    metrics: Mapping[str, Mapping[str, float]]
    """The last figures on the data learned from (`train`) and on held-out data (`eval`)."""
    history: tuple[Mapping[str, Any], ...]
    """Every record of the run, as in `metrics.jsonl`: `step`, `split`, `samples` and the metrics."""
    contributions: Mapping[str, int]
    """What the coordinator did with what workers sent: `accepted`, `rejected` and so on; empty for one process alone."""
    summary: Mapping[str, Any]
    """All that `summary.json` has."""
    own_model: bool = False
    """Whether the network is one that the program, or a function that it named, has made."""

    @property
    def steps(self) -> int:
        """Updates of the weights."""
        return int(self.summary["steps"])

    def __repr__(self) -> str:
        last = self.metrics["eval"] or self.metrics["train"]
        figures = ", ".join(f"{name} {value:.4g}" for name, value in last.items() if name in ("loss", "accuracy"))
        return f"Result({self.status} after {self.steps} steps: {figures}; {self.run_dir})"

    def export(self, path: str | Path) -> Path:
        """Write the trained model into a new folder, for other programs: a model of transformers as `from_pretrained` loads it, another
        one as `model.safetensors`. Raises ShoalError."""
        from shoal.runs.trained_model import export, export_network

        folder = Path(path)
        if self.model is None:
            raise ShoalError("the trained model is in the process that coordinates: export it there")
        if self.own_model:
            export_network(self.model, folder)
        else:
            export(str(self.run_dir), folder, lambda text: None)
        return folder


def result_of(loop: TrainingLoop | CoordinatorLoop, summary: Mapping[str, Any]) -> Result:
    """The result in the process that trained, or coordinated."""
    loop.engine.finish()
    players = loop.engine.task.players
    model = players["model"] if len(players) == 1 else nn.ModuleDict(players)
    own = loop.run.model.kind in USER_KINDS
    if own and isinstance(model, HuggingFace):  # wrapped, since it learned from text that the settings name
        model = model.inner
    return _made(loop.directory, model.eval(), summary, own)


def result_elsewhere(folder: Path, summary: Mapping[str, Any]) -> Result:
    """The result in a process that followed another one."""
    return _made(RunDirectory(folder), None, summary, False)


def _made(directory: RunDirectory, model: nn.Module | None, summary: Mapping[str, Any], own: bool) -> Result:
    return Result(
        status=summary["status"],
        run_dir=directory.path,
        model=model,
        metrics=summary["metrics"],
        history=tuple(directory.metrics()),
        contributions=summary.get("contributions", {}),
        summary=summary,
        own_model=own,
    )
