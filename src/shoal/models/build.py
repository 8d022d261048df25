"""From the settings of a run to its networks. A new kind of model is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.config import Run
from shoal.config.derive import OWN
from shoal.errors import ShoalError
from shoal.models import dcgan, gpt, huggingface, lstm, mlp
from shoal.models.shapes import Shapes

Players = dict[str, nn.Module]
BUILDERS: dict[str, Callable[[Any, Run, Shapes], Players]] = {
    "mlp": mlp.players,
    "lstm": lstm.players,
    "gpt": gpt.players,
    "dcgan": dcgan.players,
    "huggingface": huggingface.players,
}


def build(run: Run, shapes: Shapes) -> Players:
    """The networks of `run.model` by name. The same seed gives the same weights, on the CPU, whatever was drawn before."""
    kind = run.model.kind
    if kind in OWN:
        raise ShoalError(f"the model of this run came from a Python program (model.kind {kind}): only that program can put it together")
    if kind not in BUILDERS:
        raise ShoalError(f"models of kind {kind} are not built yet; choose another model.kind: {', '.join(BUILDERS)}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would also seed the GPUs, and nothing puts those back
        torch.default_generator.manual_seed(run.seed)
        return BUILDERS[kind](run.model, run, shapes)
