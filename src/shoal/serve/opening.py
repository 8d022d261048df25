"""What is served: a finished run, a folder of Hugging Face, or what a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal import data
from shoal.config.load import File, Loaded, Override, resolve, resolve_data
from shoal.config.problems import ConfigError
from shoal.config.schema import Run
from shoal.config.schema.serving import Serving
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.models.huggingface import HuggingFace
from shoal.models.pretrained import load
from shoal.runs.trained import open_run
from shoal.serve.chat import ChatTemplate, template_in
from shoal.serve.gguf import converted


class Served(NamedTuple):
    """A model with all that it needs to answer."""

    name: str
    model: Any
    tokenizer: data.Tokenizer
    template: ChatTemplate
    settings: Serving
    start_ids: tuple[int, ...]
    """What the model expects before every text that is no conversation."""
    eos_ids: frozenset[int]


def open_served(targets: Sequence[str], overrides: list[Override], warn: Callable[[str], None]) -> Served:
    """The model that is named on the command line: one folder, or files of a configuration. Raises ShoalError."""
    served = _opened(targets, overrides, warn)
    if served.settings.num_nodes not in (None, 1):
        raise ShoalError(
            f"serving over several machines is not built yet, and serving.num_nodes is {served.settings.num_nodes}: "
            "--set serving.num_nodes=1 serves from this machine alone"
        )
    return served


def _opened(targets: Sequence[str], overrides: list[Override], warn: Callable[[str], None]) -> Served:
    target, folder = targets[0], Path(targets[0])
    if len(targets) == 1 and ((folder / "config.yaml").is_file() or (folder / "state.json").is_file()):
        return _run(target, overrides, warn)
    if len(targets) == 1 and folder.suffix == ".gguf":
        target, folder = str(converted(folder)), converted(folder)
    if len(targets) == 1 and (folder / "config.json").is_file():
        return _hugging_face(
            _checked(resolve_data(_named(target), name=target, dialect="shoal", overrides=overrides)), folder.resolve().name
        )
    run = _checked(resolve([File(one) for one in targets], overrides))
    if run.model.kind != "huggingface":
        raise ShoalError(f"{target} names a model of kind {run.model.kind}, which must be trained first: serve the folder of its run")
    return _hugging_face(run, str(getattr(run.model, "pretrained", target)))


def _named(folder: str) -> dict[str, Any]:
    """The settings under which a folder of Hugging Face is a model."""
    return {"model": {"kind": "huggingface", "pretrained": folder}}


def _checked(loaded: Loaded) -> Run:
    if not loaded.ok:
        raise ConfigError(loaded.problems)
    return loaded.run


def _run(target: str, overrides: list[Override], warn: Callable[[str], None]) -> Served:
    trained = open_run(target, warn)
    model, tokenizer = trained.task.players.get("model"), trained.tokenizer
    if tokenizer is None or model is None:
        raise ShoalError(f"the run at {target} trained a model of kind {trained.run.model.kind}, which does not write text")
    settings = _checked(resolve([File(str(trained.root / "config.yaml"))], overrides, resolved=True)).serving
    folders = [trained.root / "tokenizer", Path(str(getattr(trained.run.model, "pretrained", trained.root)))]
    return Served(trained.root.resolve().name, model, tokenizer, template_in(folders), settings, (), _ends(model, tokenizer))


def _hugging_face(run: Run, name: str) -> Served:
    token = run.hub.token.reveal() if run.hub.token else None
    settings: Any = run.model
    model = HuggingFace(load(settings, token)).to(choose_device(run.training.device)).eval()
    tokenizer = data.load_tokenizer(settings.pretrained, token=token)
    template = template_in([Path(settings.pretrained)])
    return Served(name, model, tokenizer, template, run.serving, getattr(tokenizer, "opening", ()), _ends(model, tokenizer))


def _ends(model: Any, tokenizer: data.Tokenizer) -> frozenset[int]:
    """The ids after which an answer is over: the tokenizer's, and those that the model's files name."""
    ends = {tokenizer.eos_id}
    for config in (getattr(getattr(model, "inner", None), name, None) for name in ("config", "generation_config")):
        named = getattr(config, "eos_token_id", None)
        ends |= set(named) if isinstance(named, list) else {named}
    return frozenset(one for one in ends if isinstance(one, int))
