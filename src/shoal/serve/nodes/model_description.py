"""The description of a model without weights that the server sends to machines which have no files of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shoal.config.data_shapes import DataShapes
from shoal.config.fields import as_data
from shoal.config.load import resolve_data
from shoal.config.received import Permissions, limit_run
from shoal.errors import ShoalError
from shoal.models.huggingface.as_gpt import Get, GptConversion, gpt_conversion
from shoal.models.huggingface.gpt_description import describe, described
from shoal.models.huggingface.model import HuggingFace
from shoal.models.packed.layers import checked_kinds
from shoal.models.packed.model import PackedModel
from shoal.models.stages import without_weights
from shoal.untrusted import huggingface


def model_maker(model: Mapping[str, Any], get: Get, device: torch.device) -> tuple[Callable[[], Any], Get]:
    """A function that makes the described model without weights, and one that gets its tensors by name for a device, where `get` gets the
    server's."""
    if not model.get("weights"):
        return _plain_maker(model, get)
    found = PackedModel(_plain_maker(model, get)[0], get, checked_kinds(model["weights"]), packs=False)
    return found.make, found.getter(device)


def _plain_maker(model: Mapping[str, Any], get: Get) -> tuple[Callable[[], Any], Get]:
    if model.get("gpt") is not None:
        own = described(model["gpt"])
        return own.make, lambda name: own.tensor(name, get)
    if model.get("config") is not None:
        made = _hugging_face(model["config"])
        return lambda: made, get
    settings = dict(model["settings"])
    if settings.get("retrieval"):
        settings["retrieval"] = {**settings["retrieval"], "passages": None, "index": None}  # the server finds the passages
    loaded = resolve_data({"model": settings}, name="the server's model", dialect="shoal", environ={})
    if not loaded.ok:
        raise ShoalError(f"the server's model is not known here: {loaded.problems[0].message}")
    run, shapes = limit_run(loaded.run, None, Permissions()), DataShapes(vocab_size=int(model["vocab_size"]))

    def make() -> Any:
        with without_weights():
            return run.model.builder()(run.model, run, shapes)["model"]

    return make, get


def _hugging_face(config: str) -> HuggingFace:
    if find_spec("transformers") is None:
        raise ShoalError("models of kind huggingface need transformers: pip install 'shoal[hf]'")
    try:
        read = huggingface.received_config(config)
        with without_weights():
            return HuggingFace(huggingface.causal_model_of(read))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ShoalError(f"the server's model cannot be made here: {_first_line(error)}") from None


def describe_own_model(settings: Any, model: Any) -> dict[str, Any]:
    """What `model_maker` needs for a model of Shoal's own."""
    return {"settings": as_data(settings), "vocab_size": getattr(model, "vocab_size", 0)}


def describe_huggingface_model(model: HuggingFace) -> dict[str, Any]:
    """The same for a model of Hugging Face: how Shoal's own layers compute it, or its configuration where they do not."""
    own = gpt_conversion(model)
    return describe_gpt(own) if own is not None else {"config": json.dumps(model.inner.config.to_dict(), default=str)}


def describe_gpt(own: GptConversion) -> dict[str, Any]:
    return {"gpt": describe(own)}


def meta_model(folder: Path) -> HuggingFace:
    """The model of a Hugging Face folder without weights. Raises ShoalError."""
    try:
        config = huggingface.read_config(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ShoalError(f"model.pretrained: the folder {folder} does not give a model: {_first_line(error)}") from None
    return _hugging_face(json.dumps(config.to_dict(), default=str))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
