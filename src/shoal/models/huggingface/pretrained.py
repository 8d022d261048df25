"""Load weights and architectures from the Hugging Face hub or from folders, with one-line errors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config.data_shapes import misfit
from shoal.config.path_hints import missing_path_hint
from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.freed_memory import return_freed_memory
from shoal.manifest import check_manifest
from shoal.models.stages import required_tensors, without_weights
from shoal.untrusted import huggingface

FILES = "config.json, model.safetensors and the tokenizer's files"


def load(model: schema.HuggingFace, token: str | None, as_stored: bool = False) -> nn.Module:
    """The model in float32; mixed precision lowers only the computation. On the device `meta` no weights are read. Where the settings store
    the weights in fewer bits, or with `as_stored`, it has the type of its files: its tensors are parts of these until they are used."""
    _transformers()
    for folder in {model.pretrained, model.weights or model.pretrained}:
        check_manifest(Path(folder))
    with _explained("model.pretrained", model.pretrained):
        config = huggingface.read_config(model.pretrained, token)
    check_layers(model, config)
    if model.from_scratch or torch.get_default_device().type == "meta":
        with _explained("model.pretrained", model.pretrained):
            return huggingface.causal_model_of(config, model.pretrained if not model.from_scratch else None, token)
    setting, name = ("model.pretrained", model.pretrained) if model.weights is None else ("model.weights", model.weights)
    return _with_weights(setting, name, config, token, as_stored=as_stored or model.load != "fp32")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ShoalError("models of kind huggingface need transformers: pip install 'shoal[hf]'") from error
    return transformers


def _with_weights(setting: str, name: str, config: Any, token: str | None, as_stored: bool) -> nn.Module:
    with _explained(setting, name):
        inner, report = huggingface.read_causal_model(name, config, token, as_stored)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ShoalError(f"{setting}: the weights of {name} lack {len(missing)} tensors of the model, such as {missing[0]}")
    return inner


def as_classifier(inner: Any, weights: Mapping[str, Tensor], head_1D: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """A causal language model and its weights as a sequence classifier with one label: the same trunk, and a scalar head."""
    config = copy.deepcopy(inner.config)
    config.num_labels = 1
    config.pad_token_id = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    try:
        with without_weights():
            made: Any = huggingface.classifier_of(config)
        own = required_tensors(made)
        found = {name: head_1D if name == "score.weight" else weights[name] for name in own}
        if (wrong := [name for name in own if own[name].shape != found[name].shape]) or "score.weight" not in own:
            raise ValueError(f"it has no fitting {(wrong or ['score.weight'])[0]}")
    except (ValueError, AttributeError, KeyError) as error:
        raise ShoalError(f"transformers has no classifier for {type(inner).__name__}, so the score cannot be exported: {error}") from None
    return made, found


def check_layers(model: schema.HuggingFace, config: Any) -> None:
    """Raises ShoalError where the model has another number of layers than the settings say."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if model.num_layers is not None and model.num_layers != layers:
        raise misfit("model.num_layers", model.num_layers, f"{model.pretrained} (model.pretrained) has {layers} layers", str(layers))


def save(inner: Any, folder: Path, weights: Mapping[str, Tensor] | None = None, most_bytes: int = 5 * 10**9) -> None:
    """Write a model, or the adapters of a model, as safetensors. `weights`: its weights by name, where it does not hold them itself; they
    are read when their file is written. A file has at most this size."""
    return_freed_memory()  # of training: what is written here is copied first
    given = {} if weights is None else {"state_dict": dict(weights)}
    with quiet():
        inner.save_pretrained(str(folder), safe_serialization=True, max_shard_size=most_bytes, **given)


@contextmanager
def _explained(setting: str, name: str) -> Iterator[None]:
    """Turn the exceptions of transformers into one line that says what to do."""
    from safetensors import SafetensorError

    if missing := missing_path_hint(name):
        raise ShoalError(f"{setting}: {missing}; a folder with a model has {FILES}")
    try:
        with quiet(name):
            yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if Path(name).is_dir():
            raise ShoalError(f"{setting}: the folder {name} does not give a causal language model: {reason}; it needs {FILES}") from error
        raise ShoalError(
            f"{setting}: {name} is no folder here, and the Hugging Face hub does not give it: {reason}; "
            f"put {FILES} into a folder and set {setting} to its path"
        ) from error


@contextmanager
def quiet(name: str | None = None) -> Iterator[None]:
    """Silence the log of transformers; what matters becomes an error. A download of a model with this name still shows its progress."""
    logging = _transformers().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if name is None or Path(name).is_dir():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
