"""From the settings of a run to its networks."""

from __future__ import annotations

import torch
from torch import nn

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema.model import Model
from shoal.errors import ShoalError
from shoal.models.layers.value_head import ScoreModel, add_value_head

Players = dict[str, nn.Module]


def build(run: Run, shapes: DataShapes, device: str = "cpu") -> Players:
    """The networks of `run.model` by name. Holds: the same seed gives the same weights, whatever was drawn before. On the device `meta`
    tensors have shapes and no data."""
    builder = run.model.builder()
    with torch.random.fork_rng(devices=[]), torch.device(device):
        # torch.manual_seed would also seed the GPUs, whose state fork_rng does not restore here
        torch.default_generator.manual_seed(run.seed)
        players: Players = builder(run.model, run, shapes)
        if shapes.packs_documents:
            _expect_documents_apart(run, players)
        return _with_heads(run, players)


def _expect_documents_apart(run: Run, players: Players) -> None:
    """Raises ShoalError if a network cannot keep the documents of packed rows apart."""
    check = getattr(players["model"], "expect_documents_apart", None)
    if check is None:
        raise ShoalError(
            f"data.packing: a model of kind {run.model.kind} does not say that it keeps the documents of a packed row apart "
            "(expect_documents_apart): set data.packing to stream, or data.batching to dynamic"
        )
    check()


def _with_heads(run: Run, players: Players) -> Players:
    """Add the score or value head that the task needs."""
    task, rlhf = run.task, run.rlhf
    if task is not None and task.scores:
        return {"model": ScoreModel(players["model"], head_only=bool(getattr(task, "head_only", False)))}
    if task is not None and task.needs == "prompts" and rlhf is not None and rlhf.algorithm == "ppo":
        return players | add_value_head(players["model"], rlhf.value)
    return players


def refuse_live_model(settings: Model, run: Run, shapes: DataShapes) -> Players:
    """Raise ShoalError: only the program that passed in this model can build it."""
    came = f"the model of this run came from a Python program (model.kind {settings.kind})"
    raise ShoalError(f"{came}: only that program can put it together")
