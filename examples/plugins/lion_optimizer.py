"""An optimizer: Lion, which steps by the sign of the momentum (Chen et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from shoal.plugins import Decay, NonNegativeFloat, Optimizer, builds


class LionSettings(Optimizer):
    """Every weight moves by the learning rate, up or down."""

    kind: Literal["lion"] = "lion"
    learning_rate: NonNegativeFloat = 3e-4
    """Step size, before the schedule."""
    beta1: Decay = 0.9
    """Share of the momentum in the direction of a step."""
    beta2: Decay = 0.99
    """Decay of the momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay."""


@builds(LionSettings)
def lion(settings: LionSettings, network: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return Lion(trained, settings.learning_rate, (settings.beta1, settings.beta2), settings.weight_decay)


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state: dict[str, Any] = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(group["lr"] * torch.lerp(parameter.grad, momentum, beta1).sign_())
                    momentum.lerp_(parameter.grad, 1 - beta2)
