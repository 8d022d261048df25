"""Live objects of the calling program (model, data, loss) that replace what the settings describe."""

from __future__ import annotations

import copy
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from shoal import data, models, tasks
from shoal.config import Run
from shoal.config.schema.data import FactoryData
from shoal.config.schema.model import FactoryModel
from shoal.config.schema.training import FunctionOptimizer, FunctionScheduler, RateScheduler, TorchOptimizer
from shoal.data.user_data import Collate, UserSamples, UserStream, stack_samples
from shoal.engines.optim.user_optimizer import UserOptimizer
from shoal.errors import ShoalError, printable
from shoal.models.huggingface.model import HuggingFace
from shoal.tasks.user_task import LossFunction, Metric, UserTask, WithMetrics, named


class LiveObjects(NamedTuple):
    """Objects of this process that its threads may share. They are never sent to other processes."""

    model: nn.Module | None = None
    train: Any = None
    eval: Any = None
    collate: Collate | None = None
    loss: LossFunction | None = None
    metrics: Mapping[str, Metric] | None = None
    reward: Callable[..., Any] | None = None
    optimizer: UserOptimizer | None = None

    def copied(self) -> LiveObjects:
        """The same objects with a copy of the model, for one worker."""
        return self._replace(model=copy.deepcopy(self.model))


NO_LIVE_OBJECTS = LiveObjects()


def data_for(run: Run, live: LiveObjects, load: Callable[[], data.Data]) -> data.Data:
    """The data of a run: the program's, what a factory of the settings makes, or what the settings describe (`load`)."""
    source, train, held_out, collate = run.data.source, live.train, live.eval, live.collate
    if isinstance(source, FactoryData):
        train = import_function(source.function)() if train is None else train
        held_out = import_function(source.eval_function)() if held_out is None and source.eval_function else held_out
        collate = import_function(source.collate) if collate is None and source.collate else collate
    batch = partial(_batch, collate or stack_samples)
    if train is None:
        loaded = load()
        return loaded if held_out is None else loaded._replace(eval=_with_numbers(held_out, batch))
    name = source.function if isinstance(source, FactoryData) else type(train).__name__
    found = _with_numbers(train, batch) if is_indexable(train) else UserStream(train, batch)
    return data.Data(found, None if held_out is None else _with_numbers(held_out, batch), data.Info("own", name))


def is_indexable(samples: Any) -> bool:
    return hasattr(samples, "__len__") and hasattr(samples, "__getitem__")


def _with_numbers(samples: Any, batch: Callable[[Sequence[Any]], data.Batch]) -> UserSamples:
    return UserSamples(samples if is_indexable(samples) else list(samples), batch)


def _batch(collate: Collate, samples: Sequence[Any]) -> data.Batch:
    """A function of the module, since loader processes find functions by their name."""
    return named(collate(list(samples)))


def players_for(run: Run, live: LiveObjects, info: data.Info) -> dict[str, nn.Module]:
    """The networks of a run, by name: the program's, a factory's, or those of the settings."""
    model = live.model
    if model is None and isinstance(run.model, FactoryModel):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(run.seed)
            model = import_function(run.model.function)()
        if not isinstance(model, nn.Module):
            raise ShoalError(f"model.function: {run.model.function} made {type(model).__name__}, which is no torch.nn.Module")
    if model is None:
        return models.build(run, info.shapes)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ShoalError(f"the model ({type(model).__name__}) has no parameter to train: all of them are frozen, or there are none")
    in_transformers = run.chosen_task.shows == "text" and hasattr(model, "get_input_embeddings")
    if not in_transformers:
        return {"model": model}
    network = HuggingFace(model)
    network.kept_layers = "the layers of transformers are kept: the program passes the model, and gets the same one back"
    return {"model": network}


def task_for(run: Run, live: LiveObjects, players: dict[str, nn.Module], info: data.Info) -> tasks.Task:
    """The task: the program's loss, or the task of the settings."""
    loss = live.loss
    if loss is None and isinstance(run.model, FactoryModel) and run.model.loss:
        loss = import_function(run.model.loss)
    if (loss is not None or live.metrics) and set(players) != {"model"}:
        raise ShoalError(f"loss= and metrics= are for one network, and a model of kind {run.model.kind} is {len(players)}")
    task: tasks.Task = UserTask(players, loss) if loss is not None else tasks.build(run, players, info.shapes)
    return WithMetrics(task, live.metrics) if live.metrics else task


def steps_for(run: Run, live: LiveObjects, total_steps: int) -> UserOptimizer | None:
    """The optimizer and the scheduler of a run: the program's, or those of its settings; None: an optimizer of torch.optim by name."""
    own, chosen, scheduler = live.optimizer or UserOptimizer(), run.training.optimizer, run.training.scheduler
    if own.optimizer is None and not isinstance(chosen, TorchOptimizer):
        own = own._replace(optimizer=lambda model: chosen.builder()(chosen, model), optimizer_from=f"training.optimizer ({_shown(chosen)})")
    if own.scheduler is None and scheduler is not None:
        made = partial(_scheduler_for, scheduler, total_steps)
        own = own._replace(scheduler=made, scheduler_from=f"training.scheduler ({_shown(scheduler)})")
    return own if own != UserOptimizer() else None


def _scheduler_for(settings: RateScheduler, total_steps: int, optimizer: Optimizer) -> Any:
    return settings.builder()(settings, optimizer, total_steps)


def optimizer_of(settings: FunctionOptimizer, model: nn.Module) -> Any:
    return import_function(settings.function)(model)


def scheduler_of(settings: FunctionScheduler, optimizer: Optimizer, total_steps: int) -> Any:
    return import_function(settings.function)(optimizer)


def _shown(part: Any) -> str:
    """A part for messages: its function, or its kind."""
    return getattr(part, "function", None) or f"`{part.kind}`"


# --- functions that settings name --------------------------------------------------------------------


def factory_names(run: Run) -> list[str]:
    """The functions that the settings of a run name, as `module:function`."""
    source, named_ones = run.data.source, list[str | None]()
    if isinstance(run.model, FactoryModel):
        named_ones += [run.model.function, run.model.loss]
    if isinstance(source, FactoryData):
        named_ones += [source.function, source.eval_function, source.collate]
    named_ones += [
        part.function
        for part in (run.training.optimizer, run.training.scheduler)
        if isinstance(part, FunctionOptimizer | FunctionScheduler)
    ]
    return [name for name in named_ones if name]


def refuse_unknown_functions(run: Run, trusted: Sequence[str]) -> None:
    """Raises ShoalError where a run names functions that the user of this machine does not allow. A run never sends code."""
    unknown = [name for name in factory_names(run) if name not in trusted]
    if unknown:
        wanted = " ".join(f"--factory {shlex.quote(printable(name))}" for name in unknown)
        raise ShoalError(f"this run calls functions on the worker's machine. If you know them, join with {wanted}")


def import_function(name: str) -> Any:
    """The function named `module:function`. Modules in the current folder are found too."""
    module, _, function = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ShoalError(f"there is no `{name}`: {error}. Write it as module:function, with a module that Python finds here") from None
