"""How a model of Hugging Face becomes Shoal's own GPT or mixture, as data: sent to machines, and kept, so that neither needs transformers
for it.

Holds: a description that another machine sent makes nothing but a GPT or a plain mixture without weights, whose tables are bounded.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeGuard

import torch

from shoal.config.environment import state_folder
from shoal.config.fields import as_data
from shoal.config.load import resolve_data
from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.files import make_folder, read_file, write_file
from shoal.models.huggingface.as_gpt import MOST_POSITIONS, GptConversion
from shoal.models.transformer import Variant

_MOST_BYTES = 64 << 20
_MOST_HEAD = 4096
"""Widest head."""
_MOST_NUMBERS = 1 << 29
"""Most numbers of the table of rotary positions."""
_MOST_COUNTERS = 1 << 24
"""Most experts of all layers, whose choices are counted."""
_FORMAT = 2
_VARIANT_TYPES = {**dict.fromkeys(("biased_heads", "gelu_gate", "one_plus_norms"), bool), "embedding_scale": float}


def describe(own: GptConversion) -> dict[str, Any]:
    """What `described` needs."""
    frequencies = None if own.frequencies is None else own.frequencies.double().tolist()
    about = {"vocab_size": own.vocab_size, "gpt2": own.gpt2, "frequencies": frequencies, "variant": own.variant._asdict()}
    return about | {"settings": as_data(own.settings)}


def described(about: Any) -> GptConversion:
    """The conversion that a description gives. Raises ShoalError."""
    try:
        loaded = resolve_data({"model": about["settings"]}, name="the server's model", dialect="shoal", environ={})
        settings = loaded.run.model if loaded.ok else None
        variant, frequencies = _variant(about["variant"]), about["frequencies"]
        if not isinstance(settings, schema.Gpt) and not _is_plain_mixture(settings):
            raise ValueError("kind")
        if not 0 < settings.max_seq_len <= MOST_POSITIONS:
            raise ValueError("settings")
        head = variant.head_size or settings.hidden_size // settings.num_heads
        if not 0 < head <= _MOST_HEAD or head * settings.max_seq_len > _MOST_NUMBERS or not _is_table(frequencies, head):
            raise ValueError("positions")
        if type(about["vocab_size"]) is not int or not 0 < about["vocab_size"] < 2**31:
            raise ValueError("vocabulary")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ShoalError(f"the description of a GPT is malformed: {error}") from None
    table = None if frequencies is None else torch.tensor(frequencies, dtype=torch.float64)
    return GptConversion.from_parts(settings, about["vocab_size"], about["gpt2"] is True, table, variant)


def _is_plain_mixture(settings: Any) -> TypeGuard[schema.Moe]:
    """Whether these are settings of a mixture as models of Hugging Face have it: such a model has no tables but its counters of choices."""
    if not isinstance(settings, schema.Moe) or settings.experts.router != "switch":
        return False
    extras = ("mtp", "mixture_of_heads", "mixture_of_activations", "cross_attention", "retrieval", "episodic_memory")
    return not any(getattr(settings, name).enabled for name in extras) and settings.experts.count * settings.num_layers <= _MOST_COUNTERS


def _variant(fields: Mapping[str, Any]) -> Variant:
    for name, kind in _VARIANT_TYPES.items():
        if type(fields[name]) is not kind:
            raise ValueError(name)
    if fields["head_size"] is not None and type(fields["head_size"]) is not int:
        raise ValueError("head_size")
    return Variant(**fields)


def _is_table(frequencies: Any, head: int) -> bool:
    if frequencies is None:
        return True
    numbers = isinstance(frequencies, list) and all(type(one) is float and math.isfinite(one) for one in frequencies)
    return numbers and 2 * len(frequencies) == head


def kept_conversion(folder: Path) -> GptConversion | None:
    """The conversion of the model in a folder, where an earlier process has found it."""
    raw = read_file(_place(folder), _MOST_BYTES)
    try:
        return described(json.loads(raw)) if raw else None
    except (ShoalError, ValueError, RecursionError):
        return None


def keep_conversion(folder: Path, own: GptConversion) -> None:
    """Keep a conversion for later processes."""
    place = _place(folder)
    make_folder(place.parent)
    write_file(place, json.dumps(describe(own)))


def _place(folder: Path) -> Path:
    """One file for each configuration and version of transformers."""
    try:
        library = version("transformers")
    except PackageNotFoundError:
        library = ""
    content = read_file(folder / "config.json", _MOST_BYTES) or b""
    digest = hashlib.sha256(f"{_FORMAT} {library} ".encode() + content).hexdigest()
    return state_folder() / "conversions" / f"{digest[:24]}.json"
