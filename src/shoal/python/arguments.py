"""Checks the arguments of `shoal.train` and turns them into settings and live objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from shoal.config.fields import Secret, as_data
from shoal.config.load import ConfigFile, LoadedConfig, Override, parse_override, resolve, resolve_data
from shoal.config.schema import Run
from shoal.config.show import flat
from shoal.config.trainer_config import TrainerConfig
from shoal.engines.optim.user_optimizer import UserOptimizer
from shoal.errors import ShoalError
from shoal.runs.live_objects import LiveObjects, import_function
from shoal.runs.monitoring.recorder import Reporter
from shoal.runs.rlhf.rewards.function import name_of

Config = TrainerConfig | Run | str | Path | Sequence[str | Path] | Mapping[str, Any]


class ArgumentError(ShoalError, TypeError):
    """An argument that `train` does not take."""

    def __init__(self, name: str, takes: str, found: object) -> None:
        shown = repr(found) if isinstance(found, (str, int, float, bool, type(None))) else ""
        super().__init__(f"{name}= takes {takes}; this is {type(found).__name__} {shown[:60]}".rstrip())


class ProgramObjects(NamedTuple):
    """Objects that a program passes, and the settings for those that it names as functions."""

    given: LiveObjects
    settings: list[Override]
    live: tuple[str, ...]
    """Names of the arguments that are live objects, which only threads of this process can use."""


# --- the configuration -------------------------------------------------------------------------------


def loader_of(config: Config, settings: Sequence[Override]) -> Callable[[Sequence[Override]], LoadedConfig]:
    """A function that loads the configuration with these settings and further ones on top."""
    if isinstance(config, TrainerConfig):
        return lambda more: config.resolve(overrides=[*settings, *more])
    if isinstance(config, (Run, Mapping)):
        plain = _plain(config) if isinstance(config, Run) else dict(config)
        dialect, name = str(plain.pop("dialect", "shoal")), "Run" if isinstance(config, Run) else "config"
        return lambda more: resolve_data(plain, name=name, dialect=dialect, overrides=[*settings, *more])
    several = [config] if isinstance(config, (str, Path)) else config
    if not isinstance(several, (list, tuple)) or not several or not all(isinstance(one, (str, Path)) for one in several):
        raise ArgumentError("config", "a file, a preset, a list of them, a dict of settings, a TrainerConfig or a Run", config)
    files = [ConfigFile(str(one)) for one in several]
    return lambda more: resolve(files, [*settings, *more])


def _plain(run: Run) -> dict[str, Any]:
    """The settings of a run as plain data, including secrets."""
    plain: dict[str, Any] = as_data(run, mask=None)
    for path, value in flat(run):
        if isinstance(value, Secret):
            *above, last = path
            branch = plain
            for name in above:
                branch = branch[name]
            branch[last] = value.reveal()
    return plain


def overrides_of(overrides: Iterable[str]) -> list[Override]:
    texts = list(overrides) if isinstance(overrides, Iterable) and not isinstance(overrides, str) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise ArgumentError("overrides", "a list of settings such as 'training.epochs=3'", overrides)
    return [parse_override(text, "overrides:") for text in texts]


# --- live parts --------------------------------------------------------------------------------------


def check_objects(model: Any, data: Any, eval_data: Any, collate: Any, loss: Any, metrics: Any, reward: Any) -> ProgramObjects:
    """Check the objects that the program passes. Raises ArgumentError."""
    if model is not None and not isinstance(model, nn.Module) and not _is_factory(model):
        made = " (a class: make an object of it)" if isinstance(model, type) else ""
        raise ArgumentError("model", f"a torch.nn.Module, or the name of a function that makes one as 'module:function'{made}", model)
    _check_data("data", data)
    _check_data("eval_data", eval_data)
    for name, function in (("collate", collate), ("loss", loss), ("reward", reward)):
        if function is not None and not callable(function) and not _is_factory(function):
            raise ArgumentError(name, "a function, or the name of one as 'module:function'", function)
    if metrics is not None and not (isinstance(metrics, Mapping) and all(callable(metric) for metric in metrics.values())):
        raise ArgumentError("metrics", "a dict of functions by name, each of which takes the model and a batch", metrics)
    settings = [*_settings("model", "model", model, loss=loss), *_settings("data", "data.source", data, eval_data, collate)]
    if reward is not None:
        settings.append(Override("rlhf.reward.kind", "function", f"reward={name_of(reward)}"))
    if _is_factory(reward):
        settings.append(Override("rlhf.reward.function", reward, f"reward={reward}"))
    parts = {"model": model, "data": data, "collate": collate, "loss": loss}
    live = tuple(name for name, part in parts.items() if part is not None and not _is_named(name, part, parts))
    objects = _live_objects(model, data, eval_data, collate, loss, metrics)
    return ProgramObjects(objects._replace(reward=None if _is_factory(reward) else reward), settings, live)


def with_optimizer(own: ProgramObjects, optimizer: Any, scheduler: Any) -> ProgramObjects:
    """The objects with an optimizer and a scheduler, and the settings for those that are named. Raises ArgumentError."""
    given = {"optimizer": optimizer, "scheduler": scheduler}
    live, settings = dict[str, Any](), list(own.settings)
    for name, part in given.items():
        if _is_factory(part):
            settings += [
                Override(f"training.{name}.{key}", value, f"{name}={part}") for key, value in (("kind", "function"), ("function", part))
            ]
        elif callable(part) or isinstance(part, Optimizer | LRScheduler):
            live[name] = part
        elif part is not None:
            of = "the model" if name == "optimizer" else "the optimizer"
            raise ArgumentError(name, f"an object of torch.optim, a function of {of}, or its name as 'module:function'", part)
    objects = own.given._replace(optimizer=UserOptimizer(**live)) if live else own.given
    return ProgramObjects(objects, settings, (*own.live, *live))


def _is_named(name: str, part: Any, parts: Mapping[str, Any]) -> bool:
    """Whether workers can import an argument by name. A loss needs a model, and a collate needs data, that is named as well."""
    beside = {"loss": "model", "collate": "data"}.get(name)
    return _is_factory(part) and (beside is None or _is_factory(parts[beside]))


def _live_objects(model: Any, data: Any, eval_data: Any, collate: Any, loss: Any, metrics: Any) -> LiveObjects:
    """The live objects. Functions that the settings name are called where the run is built."""
    return LiveObjects(
        model=None if _is_factory(model) else model,
        train=None if _is_factory(data) else data,
        eval=eval_data if not _is_factory(eval_data) else None if _is_factory(data) else import_function(eval_data)(),
        collate=import_function(collate) if _is_factory(collate) else collate,
        loss=import_function(loss) if _is_factory(loss) else loss,
        metrics=metrics,
    )


def _settings(argument: str, section: str, part: Any, eval_data: Any = None, collate: Any = None, loss: Any = None) -> Iterator[Override]:
    """Settings for a live or a named object."""
    if part is None:
        return
    if not _is_factory(part):
        yield Override(f"{section}.kind", "live", f"{argument}=live")
        return
    named = {"function": part, "eval_function": eval_data, "collate": collate, "loss": loss}
    yield Override(f"{section}.kind", "factory", f"{argument}=factory")
    for name, value in named.items():
        if _is_factory(value):
            yield Override(f"{section}.{name}", value, f"{argument}={value}")


def _is_factory(part: Any) -> bool:
    return isinstance(part, str) and part.count(":") == 1


def _check_data(name: str, data: Any) -> None:
    if data is None or _is_factory(data):
        return
    if isinstance(data, DataLoader):
        raise ArgumentError(name, "samples, and makes the batches itself: give loader.dataset, and collate=loader.collate_fn", data)
    if isinstance(data, (str, bytes, Mapping)) or (not hasattr(data, "__iter__") and not hasattr(data, "__getitem__")):
        raise ArgumentError(name, "a data set, a list of samples, something to iterate over, or 'module:function'", data)
    if isinstance(data, (tuple, list)) and len(data) == 2 and _are_inputs_and_targets(*data):
        raise ArgumentError(name, "samples, each an input with its target: give list(zip(inputs, targets))", data)
    if isinstance(data, Iterator):
        raise ArgumentError(name, "something that can be read again, such as a list or a data set, and not an iterator", data)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not len(data):
        raise ArgumentError(name, "at least one sample", data)


def _are_inputs_and_targets(inputs: Any, targets: Any) -> bool:
    """Whether two tensors or arrays are all inputs and all targets, and not two samples, which have the same shape."""
    first, second = (tuple(getattr(each, "shape", ())) for each in (inputs, targets))
    return first != second and first[:1] == second[:1] != ()


def check_workers(workers: object) -> None:
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ArgumentError("workers", "a number of workers, 1 or more", workers)


def reporters_of(reporters: Iterable[Reporter]) -> list[Reporter]:
    if isinstance(reporters, Reporter):
        return [reporters]
    found = list(reporters) if isinstance(reporters, Iterable) else [reporters]
    for reporter in found:
        if not isinstance(reporter, Reporter):
            raise ArgumentError("reporters", "objects of classes that are derived from shoal.Reporter", reporter)
    return found
