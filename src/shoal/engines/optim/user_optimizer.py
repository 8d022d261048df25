"""An optimizer and a scheduler of the user's program, in place of those of the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as Scheduler

from shoal.config.schema.training import Schedule
from shoal.engines.optim.learning_rate import learning_rate
from shoal.errors import ShoalError

_OF_A_MODEL = "pass a function that makes it: optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"


class UserOptimizer(NamedTuple):
    """What a program passes: objects, or functions that make them."""

    optimizer: Optimizer | Callable[[nn.Module], Optimizer]
    scheduler: Scheduler | Callable[[Optimizer], Scheduler] | None = None

    def make(self, model: nn.Module) -> UserSteps:
        """The optimizer for a model. Raises ShoalError where it is none, or does not step exactly the model's parameters."""
        found: Any = self.optimizer if isinstance(self.optimizer, Optimizer) else self.optimizer(model)
        if not isinstance(found, Optimizer):
            raise ShoalError(f"optimizer= must give an optimizer of torch: it gave {type(found).__name__}")
        _check_parameters(found, model)
        scheduler: Any = self.scheduler
        if scheduler is not None and not isinstance(scheduler, Scheduler):
            scheduler = scheduler(found)
        if scheduler is not None and not isinstance(scheduler, Scheduler):
            raise ShoalError(f"scheduler= must give a scheduler of torch.optim.lr_scheduler: it gave {type(scheduler).__name__}")
        if scheduler is not None and scheduler.optimizer is not found:
            raise ShoalError(
                "scheduler= is of another optimizer than optimizer=: pass a function that makes it, scheduler=lambda optimizer: …"
            )
        return UserSteps(found, scheduler)


class UserSteps:
    """An optimizer in use, with its learning rates: those of its scheduler, else its own times the course of `training.schedule`."""

    def __init__(self, optimizer: Optimizer, scheduler: Scheduler | None) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.peaks = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]

    def set_rates(self, schedule: Schedule, step: float, total: int, scale: float) -> None:
        """Called before a step."""
        if self.scheduler is None:
            for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
                group["lr"] = scale * learning_rate(schedule, peak, step, total)

    def stepped(self) -> None:
        """Called after a step."""
        if self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(dict(state))
            for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
                group["lr"] = rate


def _check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
    known = {id(one): name for name, one in model.named_parameters() if one.requires_grad}
    if stepped - known.keys():
        raise ShoalError(f"optimizer= steps parameters that are not those of the model that is trained: {_OF_A_MODEL}")
    if left := [name for number, name in known.items() if number not in stepped]:
        raise ShoalError(f"optimizer= does not step `{left[0]}`: add it to a group, or freeze it (requires_grad_(False))")
