"""From the settings of a run to its networks."""

from __future__ import annotations

import torch
from torch import nn

from shoal.config import Run
from shoal.models.shapes import Shapes

Players = dict[str, nn.Module]


def build(run: Run, shapes: Shapes) -> Players:
    """The networks of `run.model` by name. The same seed gives the same weights, on the CPU, whatever was drawn before."""
    builder = run.model.builder()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would also seed the GPUs, and nothing puts those back
        torch.default_generator.manual_seed(run.seed)
        players: Players = builder(run.model, run, shapes)
        return players
