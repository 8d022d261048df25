"""Models, tokenizers and configurations of Hugging Face. No other module calls the Auto classes of transformers.

Holds: no code of a folder, of the hub or of a received configuration runs, and nothing asks on the terminal whether it may; weights are
read from safetensors only, because the older .bin and .pt files are pickles. A configuration cannot name a model whose bare structure
exhausts this machine: its modules and its buffers, which are allocated without any weights, are counted first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from shoal.errors import ShoalError
from shoal.untrusted.tokenizer_files import check_tokenizer_folder

MOST_MODULES = 500_000
MOST_BUFFER_BYTES = 4 << 30
_MOST_PARTS = 100_000
_MOST_POSITIONS = 1 << 24
_COUNTED = {"layer": _MOST_PARTS, "expert": _MOST_PARTS, "block": _MOST_PARTS, "depth": _MOST_PARTS}
_COUNTED |= {"position": _MOST_POSITIONS, "context": _MOST_POSITIONS}
"""The largest number in a configuration under a name that contains one of these words: what is built that many times."""
_KERNELS = ("attn_implementation", "experts_implementation")
"""Settings that may name a repository with compiled code."""
_ONE_AT_A_TIME = threading.RLock()
"""While it builds a model, transformers replaces methods that all models share (tie_weights), and restores what it found. Two threads at
once could leave them replaced for good: output matrices of later models would be zero."""
_EXPECTED = (OSError, ValueError, KeyError, RuntimeError, ImportError)
"""What transformers raises for files that do not fit; callers say what the user can do about it."""


def read_config(name: str, token: str | None = None) -> Any:
    """The configuration of a folder or of a repository on the hub. Raises ShoalError, OSError, ValueError or KeyError."""
    import transformers

    with _malformed_is_a_value_error(name):
        check_config(transformers.PreTrainedConfig.get_config_dict(name, token=token)[0], name)
        return transformers.AutoConfig.from_pretrained(name, token=token, trust_remote_code=False)


def received_config(text: str) -> Any:
    """The configuration that another machine sent. Raises ShoalError, ValueError or KeyError."""
    import transformers

    with _malformed_is_a_value_error("the server's model"):
        fields = json.loads(text)
        check_config(fields, "the server's model")
        return transformers.AutoConfig.for_model(**fields)


def check_config(fields: Mapping[str, Any], name: str) -> None:
    """Raises ShoalError where a configuration asks for more parts than any model has, or for code of a repository."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            check_config(value, name)
        most = min((most for word, most in _COUNTED.items() if word in key), default=None)
        if most is not None and isinstance(value, int | float) and value > most:
            raise ShoalError(f"the configuration of {name[:200]} is refused: {key} is {value:.3g}, and no model has more than {most:,}")
        if key.lstrip("_").startswith(_KERNELS) and "/" in json.dumps(value, default=str):
            raise ShoalError(f"the configuration of {name[:200]} is refused: {key} names code on the hub: remove it from config.json")


def causal_model_of(config: Any, name: str | None = None, token: str | None = None) -> nn.Module:
    """A causal language model with random weights. `name`: what its settings of generation are read from, if it has any. Raises ShoalError,
    ValueError or RuntimeError."""
    made = _made(_auto("AutoModelForCausalLM"), config)
    if name is not None:
        with suppress(OSError):  # many models have none
            found = _auto("GenerationConfig").from_pretrained(name, token=token, trust_remote_code=False)
            vars(found).pop("trust_remote_code", None)  # it may keep arguments that it does not know
            made.generation_config = found
    return made


def classifier_of(config: Any) -> nn.Module:
    """A sequence classifier with random weights. Raises ShoalError, ValueError or RuntimeError."""
    return _made(_auto("AutoModelForSequenceClassification"), config)


def _made(auto_class: Any, config: Any) -> nn.Module:
    name = str(getattr(config, "name_or_path", "") or f"a model of kind {config.model_type}")
    with _ONE_AT_A_TIME, _malformed_is_a_value_error(name):
        with torch.device("meta"), _few_modules(name):
            _check_buffers(auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False), name)
        return auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)


def read_causal_model(name: str, config: Any, token: str | None = None, as_stored: bool = False) -> tuple[nn.Module, Mapping[str, Any]]:
    """A causal language model with its weights in float32, or in the type of the files, and transformers' report of what these lacked."""
    if as_stored:
        config.dtype = None  # a configuration may name another type than the files have
    return _read(_auto("AutoModelForCausalLM"), name, config, token, dtype="auto" if as_stored else torch.float32)


def read_classifier(name: str, token: str | None = None) -> nn.Module:
    """A sequence classifier with its weights. Raises ShoalError, OSError, ValueError, KeyError or RuntimeError."""
    return _read(_auto("AutoModelForSequenceClassification"), name, read_config(name, token), token)[0]


def read_gguf(file: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of a GGUF file whose header was checked."""
    folder, models, tokenizers = str(file.parent), _auto("AutoModelForCausalLM"), _auto("AutoTokenizer")
    with _ONE_AT_A_TIME, _malformed_is_a_value_error(str(file)), _few_modules(str(file)):
        model = models.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False)
        return model, tokenizers.from_pretrained(folder, gguf_file=file.name, trust_remote_code=False)


def read_gguf_description(file: Path) -> tuple[Any, Any]:
    """The configuration and the tokenizer of a GGUF file whose header was checked."""
    import transformers

    folder = str(file.parent)
    with _malformed_is_a_value_error(str(file)):
        config = transformers.AutoConfig.from_pretrained(folder, gguf_file=file.name, trust_remote_code=False)
        return config, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name, trust_remote_code=False)


def _read(auto_class: Any, name: str, config: Any, token: str | None, **options: Any) -> tuple[nn.Module, Mapping[str, Any]]:
    with _ONE_AT_A_TIME, _malformed_is_a_value_error(name), _few_modules(name):
        return auto_class.from_pretrained(
            name, config=config, token=token, use_safetensors=True, output_loading_info=True, trust_remote_code=False, **options
        )


def read_tokenizer(name: str, token: str | None = None, **options: Any) -> Any:
    """A tokenizer of transformers. Raises ShoalError, OSError, ValueError, KeyError or ImportError."""
    if Path(name).is_dir():
        check_tokenizer_folder(Path(name))
    with _malformed_is_a_value_error(name):
        return _auto("AutoTokenizer").from_pretrained(name, token=token, trust_remote_code=False, **options)


def _auto(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


@contextmanager
def _malformed_is_a_value_error(name: str) -> Iterator[None]:
    """Raises ShoalError for a model that needs code of its own, and ValueError for every error that only malformed files cause."""
    try:
        yield
    except (ShoalError, *_EXPECTED) as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ShoalError(
            f"{name[:200]} needs Python code of its own (`auto_map` in its configuration), and Shoal runs no code that comes with a model: "
            "choose a model that transformers has built in, or install the code as a plugin after you have read it (docs/extending.md)"
        ) from None
    except Exception as error:
        raise ValueError(f"its files are malformed: {type(error).__name__}: {error}") from error


@contextmanager
def _few_modules(name: str) -> Iterator[None]:
    """Raises ShoalError where more modules are made than any model has."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise ShoalError(f"the configuration of {name[:200]} is refused: its model would have more than {MOST_MODULES:,} modules")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def _check_buffers(model: nn.Module, name: str) -> None:
    size = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if size > MOST_BUFFER_BYTES:
        raise ShoalError(
            f"the configuration of {name[:200]} is refused: the tables beside its weights would take {size >> 30:,} GiB, "
            f"and at most {MOST_BUFFER_BYTES >> 30} GiB are allowed"
        )
