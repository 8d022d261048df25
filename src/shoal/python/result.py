"""The result of `shoal.train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shoal.config.derived_values import USER_KINDS
from shoal.errors import ShoalError
from shoal.models.huggingface.adapted_gpt import AdaptedTrunk
from shoal.models.huggingface.as_gpt import as_huggingface
from shoal.models.huggingface.model import HuggingFace
from shoal.reporters.progress import figures
from shoal.runs.coordinator_run import CoordinatorLoop
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.training.loop import TrainingLoop


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of a run."""

    status: str
    """`completed`, `stopped early` or `interrupted`."""
    run_dir: Path
    model: nn.Module | None
    """The trained network; the same object if the program passed one. None in a torchrun process that does not coordinate."""
    metrics: Mapping[str, Mapping[str, float]]
    """The last metrics on training data (`train`) and held-out data (`eval`)."""
    history: tuple[Mapping[str, Any], ...]
    """Every record of the run, as in `metrics.jsonl`: `step`, `split`, `samples` and the metrics."""
    contributions: Mapping[str, int]
    """Number of contributions by outcome (`accepted`, `rejected` …); empty for a single-worker run."""
    summary: Mapping[str, Any]
    """The content of `summary.json`."""
    own_model: bool = False
    """Whether the network is the program's own."""

    @property
    def steps(self) -> int:
        """Number of updates of the weights."""
        return int(self.summary["steps"])

    def __repr__(self) -> str:
        last = self.metrics["eval"] or self.metrics["train"]
        shown = figures(last, every=bool(self.metrics["eval"]))
        return f"Result({self.status} after {self.steps} updates of the weights{': ' if shown else ''}{shown}; {self.run_dir})"

    def export(self, path: str | Path) -> Path:
        """Write the trained model into a new folder: a Transformers model for `from_pretrained`, another one as `model.safetensors`.

        Raises ShoalError."""
        from shoal.runs.export.folder import export, export_network

        folder = Path(path)
        if self.model is None:
            raise ShoalError("the trained model is in the process that coordinates: export it there")
        if self.own_model:
            export_network(self.model, folder)
        else:
            export(str(self.run_dir), folder, lambda text: None)
        return folder


def result_of(loop: TrainingLoop | CoordinatorLoop, summary: Mapping[str, Any]) -> Result:
    """The result in the process that trained or coordinated."""
    loop.load_result()
    loop.engine.finish()
    players = loop.engine.task.players
    model = players["model"] if len(players) == 1 else nn.ModuleDict(players)
    own = loop.run.model.kind in USER_KINDS
    if own and isinstance(model, HuggingFace):  # wrapped, since it learned from text that the settings name
        model = model.inner
    if getattr(model, "conversion", None) is not None:  # trained with Shoal's own layers
        model = model.as_huggingface() if isinstance(model, AdaptedTrunk) else as_huggingface(model)
    return _made(loop.directory, model.eval(), summary, own)


def result_elsewhere(folder: Path, summary: Mapping[str, Any]) -> Result:
    """The result in a process that worked for a coordinator elsewhere."""
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
