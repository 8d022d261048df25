"""Optimizers and schedulers of the user's program, and those that functions and plugins make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as Scheduler

from shoal.config.schema.training import Schedule
from shoal.engines.optim.learning_rate import learning_rate
from shoal.errors import ShoalError

_OF_A_MODEL = "give a function that makes it, such as lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"


class UserOptimizer(NamedTuple):
    """Objects, or functions that make them for each network."""

    optimizer: Optimizer | Callable[[nn.Module], Optimizer] | None = None
    """None: the engine's own, as the settings say."""
    scheduler: Scheduler | Callable[[Optimizer], Scheduler] | None = None
    """None: `training.schedule`."""
    optimizer_from: str = "optimizer="
    """The argument or setting that gave it, for messages."""
    scheduler_from: str = "scheduler="

    def make(self, model: nn.Module, own: Optimizer) -> UserSteps:
        """The optimizer and the scheduler for a network, whose engine has made its `own` optimizer. Raises ShoalError where they are none,
        or do not step exactly the network's parameters."""
        found = own if self.optimizer is None else self._optimizer(model)
        return UserSteps(found, None if self.scheduler is None else self._scheduler(found))

    def _optimizer(self, model: nn.Module) -> Optimizer:
        found: Any = self.optimizer if isinstance(self.optimizer, Optimizer) else self.optimizer(model)  # type: ignore[misc]
        if not isinstance(found, Optimizer):
            raise ShoalError(f"{self.optimizer_from} must give an optimizer of torch: it gave {type(found).__name__}")
        _check_parameters(found, model, self.optimizer_from)
        return found

    def _scheduler(self, optimizer: Optimizer) -> Scheduler:
        found: Any = self.scheduler if isinstance(self.scheduler, Scheduler) else self.scheduler(optimizer)  # type: ignore[misc]
        if not isinstance(found, Scheduler):
            raise ShoalError(f"{self.scheduler_from} must give a scheduler of torch.optim.lr_scheduler: it gave {type(found).__name__}")
        if found.optimizer is not optimizer:
            raise ShoalError(
                f"{self.scheduler_from} is of another optimizer than the run's: give a function of the optimizer that makes it"
            )
        return found


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


def _check_parameters(optimizer: Optimizer, model: nn.Module, origin: str) -> None:
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
    known = {id(one): name for name, one in model.named_parameters() if one.requires_grad}
    if stepped - known.keys():
        raise ShoalError(f"{origin} steps parameters that are not those of the model that is trained: {_OF_A_MODEL}")
    if left := [name for number, name in known.items() if number not in stepped]:
        raise ShoalError(f"{origin} does not step `{left[0]}`: add it to a group, or freeze it (requires_grad_(False))")
