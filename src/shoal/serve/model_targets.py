"""The models that a command line names: runs, folders, files, and folders of LoRA adapters beside their base.

Holds: every name that a request may give is one model or adapter; what can never be loaded is refused before anything is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.config.load import Override
from shoal.config.schema import Run
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.models.huggingface.adapters import CONFIG, read_adapters
from shoal.models.huggingface.batched_lora import BatchedLora
from shoal.models.huggingface.model import HuggingFace
from shoal.runs.trained_model import find_model, settings_of
from shoal.serve.conversion import described_file
from shoal.serve.load_model import ServedModel, is_model, open_served
from shoal.serve.model_pool import ModelPool, ModelSource
from shoal.serve.serving_memory import adapter_bytes, estimated_bytes, fitting_weights, memory_limit, too_large

_NAME = r"[\w.-]{1,100}"
"""Names of adapters."""


class ModelTarget(NamedTuple):
    """A model, and the folders of its adapters by their names."""

    name: str
    """Empty: that which the model itself gives."""
    targets: tuple[str, ...]
    """A folder or a file; or the files of one configuration."""
    adapters: Mapping[str, Path]


def read_targets(targets: Sequence[str], named_adapters: Sequence[str]) -> list[ModelTarget]:
    """The models that targets name. `named_adapters`: as NAME=FOLDER. Raises ShoalError."""
    models = [target for target in targets if is_model(Path(target))]
    if not models or len(models) < len(targets):
        if models:
            other = next(target for target in targets if target not in models)
            raise ShoalError(f"{models[0]} is a model and {other} a configuration: serve models, or the files of one configuration")
        found = [ModelTarget("", tuple(targets), {})]
    else:
        found = _with_folders(models)
    for text in named_adapters:
        name, sign, folder = text.partition("=")
        if not sign or not re.fullmatch(_NAME, name):
            raise ShoalError(f"--adapter {text}: write NAME=FOLDER; a name has letters, digits, points and dashes")
        base = found[0] if len(found) == 1 else _base_of(Path(folder), found)
        if base is None:
            raise ShoalError(f"--adapter {text}: its base is {_named_base(Path(folder))}, which is not among the models")
        _add_adapter(base, name, Path(folder))
    return found


def _with_folders(models: Sequence[str]) -> list[ModelTarget]:
    """Every model with a name of its own, and the folders of adapters whose base is among them as its adapters."""
    folders = [target for target in models if _is_adapter(Path(target))]
    found = [ModelTarget(name, (target,), {}) for name, target in _names([one for one in models if one not in folders]).items()]
    alone = []
    for folder in folders:
        base = _base_of(Path(folder), found)
        if base is None:
            alone.append(folder)
        else:
            _add_adapter(base, Path(folder).resolve().name, Path(folder))
    if not alone:
        return found
    bases = [target for target in models if target not in folders or target in alone]
    adapters = {one.targets: one.adapters for one in found}
    return [ModelTarget(name, (target,), adapters.get((target,), {})) for name, target in _names(bases).items()]


def _is_adapter(place: Path) -> bool:
    return (place / CONFIG).is_file() and not (place / "config.json").is_file()


def _named_base(folder: Path) -> str:
    if not _is_adapter(folder):
        raise ShoalError(f"{folder} has no {CONFIG}: name a folder that peft, or `shoal export --adapters`, has written")
    return read_adapters(folder).base


def _base_of(folder: Path, models: Sequence[ModelTarget]) -> ModelTarget | None:
    """The model that the adapters in a folder belong to: the same place, else the same name."""
    base = Path(_named_base(folder))
    same = [one for one in models if one.targets and base.exists() and Path(one.targets[0]).resolve() == base.resolve()]
    same = same or [
        one for one in models if one.targets and base.name in (Path(one.targets[0]).resolve().name, _plain_name(one.targets[0]))
    ]
    return same[0] if same else None


def _add_adapter(base: ModelTarget, name: str, folder: Path) -> None:
    _named_base(folder)
    if not re.fullmatch(_NAME, name):
        raise ShoalError(f"{folder}: {name!r} is no name for an adapter; give it one: --adapter NAME={folder}")
    if name in base.adapters:
        raise ShoalError(f"{folder}: there is an adapter {name!r} already; give it another name: --adapter NAME={folder}")
    assert isinstance(base.adapters, dict)
    base.adapters[name] = folder


def _plain_name(target: str) -> str:
    place = Path(target).resolve()
    return place.stem if place.suffix == ".gguf" else place.name


def _names(targets: Sequence[str]) -> dict[str, str]:
    """Each target by its own name; where several are the same, as much of the path before it as tells them apart. Raises ShoalError."""
    places = {target: [*Path(target).resolve().parts[1:-1], _plain_name(target)] for target in targets}
    if len({Path(target).resolve() for target in targets}) < len(targets):
        raise ShoalError("the same model is named twice")
    found = {}
    for target, parts in places.items():
        others = [other for one, other in places.items() if one != target]
        same = (count for count in range(1, len(parts)) if all(other[-count:] != parts[-count:] for other in others))
        found["/".join(parts[-next(same, len(parts)) :])] = target
    if len(found) < len(targets):
        raise ShoalError("two models have the same name: rename the folder or the file of one")
    return found


def open_target(target: ModelTarget, overrides: list[Override], warn: Callable[[str], None], nodes: int | None = None) -> ServedModel:
    """Load a model and its adapters. `nodes` as in `open_served`. Raises ShoalError."""
    served = open_served(target.targets, overrides, warn, nodes)
    if not target.adapters:
        return served
    if served.nodes > 1:
        raise ShoalError("adapters are served by one machine: --nodes 1 (serving.num_nodes), or merge them with their base")
    if served.gpt_conversion is None and not isinstance(served.model, HuggingFace):
        raise ShoalError(f"{served.name} is no model of Hugging Face, to which adapters of peft belong")
    adapters = BatchedLora(served.model, served.gpt_conversion)
    for name, folder in target.adapters.items():
        adapters.add(name, read_adapters(folder))
    return served._replace(adapters=adapters)


def open_pool(
    targets: Sequence[ModelTarget], overrides: list[Override], warn: Callable[[str], None], tell: Callable[[str], None]
) -> ModelPool:
    """The pool of several models, of which the first is loaded. Raises ShoalError."""
    found = [_settings(target.targets[0], overrides, warn) for target in targets]
    first = found[0][1]
    limit = memory_limit(first.serving, choose_device(first.training.device))
    sources = []
    for target, (place, run) in zip(targets, found, strict=True):
        adapters = sum(map(adapter_bytes, target.adapters.values()))
        needed = estimated_bytes(place, run.serving.weights) + adapters
        if needed > limit:
            raise too_large(target.name, needed, limit, fitting_weights(place, run.model.kind, limit - adapters))
        sources.append(ModelSource(target.name, _opener(target, overrides, warn), needed, tuple(target.adapters)))
    return ModelPool(sources, first.serving, warn, tell, limit).with_first()


def _settings(target: str, overrides: list[Override], warn: Callable[[str], None]) -> tuple[str, Run]:
    """Where a model is, and its settings; it is not loaded. Raises ShoalError where there is none, or where it is for several machines."""
    place = Path(target)
    if place.suffix == ".gguf" and place.is_file():
        run = settings_of(str(described_file(place)), warn, overrides)
    elif _is_adapter(place):
        run = settings_of(read_adapters(place).base, warn, overrides)
    else:
        target = find_model(target, warn)
        run = settings_of(target, warn, overrides)
    if (run.serving.num_nodes or 1) > 1:
        raise ShoalError(
            f"{target}: its layers go over {run.serving.num_nodes} machines, and several models are served by one: set "
            "serving.num_nodes to 1"
        )
    return target, run


def _opener(target: ModelTarget, overrides: list[Override], warn: Callable[[str], None]) -> Callable[[], ServedModel]:
    return lambda: open_target(target, overrides, warn, 1)._replace(name=target.name)
