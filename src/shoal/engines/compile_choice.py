"""Whether compiling a model pays (`training.compile: auto`)."""

from __future__ import annotations

import torch

from shoal.config import Run
from shoal.models.transformer import Trunk
from shoal.tasks import Task

_OPERATIONS_PER_S = 2e14
"""What an H100 computes in bf16 without the compiler, about. A slower GPU trains longer, and gains more."""
_LAUNCH_S = 1e-3
"""Time in which a processor launches the kernels of a layer, with their backward pass and without the compiler."""
_PAYS_FROM_S = 180.0
"""Compiling takes half a minute to a minute, and saves a third of the time of a step."""


def reason_to_compile(run: Run, task: Task, device: torch.device, total_steps: int) -> str:
    """A note for the user if the model is to be compiled, else an empty text. The choice follows from the settings alone, so a resumed run
    makes the same one."""
    trunks = [player for player in task.players.values() if isinstance(player, Trunk)]
    length = run.data.sequence_length
    if device.type != "cuda" or len(trunks) != len(task.players) or task.learns_from_answers or length is None:
        return ""
    parameters = sum(parameter.numel() for trunk in trunks for parameter in trunk.parameters())
    layers = sum(len(trunk.blocks) for trunk in trunks)
    batches = total_steps * run.training.gradient_accumulation_steps
    tokens = (run.training.batch_size or 1) * length
    seconds = batches * max(6 * parameters * tokens / _OPERATIONS_PER_S, layers * _LAUNCH_S)
    if seconds < _PAYS_FROM_S:
        return ""
    return "the model is compiled, which takes up to a minute and shortens every step (training.compile: false leaves it out)"
