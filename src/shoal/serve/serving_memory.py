"""Memory of served models: what one will take before it is loaded, what its caches take, and how many answers it writes at once.

On one core of a Xeon, SmolLM2-135M with weights in 4 bits writes 14 tokens per second of processor time with one answer, 24, 47, 62, 77
and 66 with 2, 4, 8, 16 and 32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.config.schema.serving import Serving, bytes_of
from shoal.errors import ShoalError
from shoal.models.gpt import Attention
from shoal.models.huggingface.adapters import CONFIG, read_adapters
from shoal.models.huggingface.model import HuggingFace
from shoal.models.transformer import Trunk
from shoal.runs.monitoring.best_weights import FOLDER as BEST
from shoal.runs.trained_model import PUSHED
from shoal.serve.nodes.layer_host import memory_for_layers
from shoal.untrusted.gguf_header import check_gguf

COUNTED_TOKENS = 4096
"""Most tokens of one answer that count when answers at once are chosen: few conversations are longer."""
_MOST_ON_CPU, _MOST_ON_GPU = 16, 64
"""Most answers at once that are chosen. On a GPU each doubling is one more step that is compiled before the server answers."""
_OVER_NODES = 8
_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.01, "int4": 0.65}
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MARGIN = 1.05
"""What a model takes beside its matrices, tables of positions for example."""


class _StoredTensor(NamedTuple):
    """A tensor as the header of a file describes it."""

    name: str
    dtype: str | None
    """As safetensors names it; None: it is in a GGUF file."""
    shape: torch.Size


class AnswerLimit(NamedTuple):
    """How many answers are written at once, and why."""

    answers: int
    reason: str


def answer_limit(settings: Serving, cache_tokens: float, longest: int, on_gpu: bool) -> AnswerLimit:
    """`cache_tokens`: tokens for which there is memory beside the prefix cache; `longest`: tokens that one answer may have."""
    if isinstance(settings.max_running, int):
        return AnswerLimit(settings.max_running, "serving.max_running")
    counted, most = min(longest, COUNTED_TOKENS), _MOST_ON_GPU if on_gpu else _MOST_ON_CPU
    fitting = int(max(1, min(cache_tokens / counted, most)))
    if fitting < most:
        return AnswerLimit(fitting, f"memory for the caches of {max(0, int(cache_tokens)):,} tokens, {counted:,} for each answer")
    return AnswerLimit(most, f"the most that is chosen for a {'GPU' if on_gpu else 'CPU'}; there is memory for it")


def answers_over_nodes(settings: Serving) -> int:
    """Answers at once where the layers are on several machines, whose memory is not known when the server starts."""
    return settings.max_running if isinstance(settings.max_running, int) else _OVER_NODES


def cache_token_bytes(model: Any) -> int:
    """What the keys and values of one token take in all layers; 0: the model has none."""
    if isinstance(model, HuggingFace):
        numbers = _cache_numbers(model.inner.config.get_text_config())
    elif isinstance(model, Trunk):
        numbers = sum(2 * one.kv_heads * one.head_size for one in model.blocks.modules() if isinstance(one, Attention))
    else:
        return 0
    types = [one.dtype for one in model.parameters() if one.is_floating_point()]
    return int(numbers * (types[0] if types else torch.float32).itemsize)


def _cache_numbers(config: Any) -> int:
    """Numbers in the keys and values of one token in all layers of a model of transformers; 0: its settings do not say."""
    layers, heads = getattr(config, "num_hidden_layers", None) or 0, getattr(config, "num_attention_heads", None) or 1
    head = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return int(2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * head)


def memory_limit(settings: Serving, device: torch.device, loaded: int = 0) -> float:
    """Bytes that all models may take together. `loaded`: what they take already."""
    given = bytes_of(settings.memory)
    return memory_for_layers(device) + loaded if given is None else given


def estimated_bytes(target: str, weights: str) -> int:
    """Memory of the model's weights, from the headers of its files; 0: they are not known. `weights`: see `serving.weights`."""
    place = Path(target)
    if _is_gguf(place) and weights == "auto":
        return int(_MARGIN * place.stat().st_size)
    return int(_MARGIN * sum(_tensor_bytes(one, weights) for one in _stored_tensors(place)))


def adapter_bytes(folder: Path) -> int:
    """Memory of the matrices of an adapter, and of their copies for batches."""
    return sum(2 * file.stat().st_size for file in folder.glob("*.safetensors"))


def too_large(name: str, needed: float, limit: float, fitting: Sequence[str]) -> ShoalError:
    """`fitting`: see `fitting_weights`."""
    weights = f"serving.weights to {' or '.join(fitting)}, or " if fitting else ""
    return ShoalError(
        f"{name} takes about {in_words(needed)}, and serving.memory allows {in_words(limit)} for all models: it can never be loaded; set "
        f"{weights}serving.memory to more"
    )


def fitting_weights(target: str, kind: str, limit: float) -> list[str]:
    """The values of `serving.weights` with which a model of this kind takes at most `limit` bytes. Experts of mixtures are not packed."""
    if kind not in ("gpt", "huggingface"):
        return []
    choices = ("bf16",) if _has_experts(target) else ("bf16", "int8", "int4")
    return [weights for weights in choices if 0 < estimated_bytes(target, weights) <= limit]


def _weight_files(place: Path) -> Iterable[Path]:
    """The files with the weights of a folder of Hugging Face, of a run, or of one of its checkpoints."""
    if (place / PUSHED).is_file() or (place / "config.json").is_file():
        return sorted(place.glob("*.safetensors"))
    saved = "weights.safetensors"
    runs = [place / saved, *sorted(place.glob(f"{BEST}/*/{saved}")), *sorted(place.glob(f"checkpoints/*/{saved}"), reverse=True)]
    return [file for file in runs if file.is_file()][:1]


def _stored_tensors(place: Path) -> Iterator[_StoredTensor]:
    """The tensors of a model, from the headers of its files. Raises ShoalError."""
    if _is_gguf(place):
        yield from (_StoredTensor(name, None, torch.Size(one.shape)) for name, one in check_gguf(place).tensors.items())
        return
    if (place / CONFIG).is_file() and not (place / "config.json").is_file():
        place = Path(read_adapters(place).base)
    for file in _weight_files(place):
        yield from _tensors_in(file)


def _tensors_in(file: Path) -> Iterator[_StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                yield _StoredTensor(name, part.get_dtype(), torch.Size(part.get_shape()))
    except (OSError, SafetensorError) as error:
        raise ShoalError(f"{file} is damaged: {error}") from None


def _tensor_bytes(tensor: _StoredTensor, weights: str) -> float:
    if tensor.dtype is None:
        return _BYTES[weights] * tensor.shape.numel()
    stored = _STORED_BYTES.get(tensor.dtype, 4)
    return (_BYTES.get(weights, stored) if len(tensor.shape) > 1 else max(stored, 4)) * tensor.shape.numel()


def _has_experts(target: str) -> bool:
    return any(".experts." in one.name or "_exps" in one.name for one in _stored_tensors(Path(target)))


def _is_gguf(place: Path) -> bool:
    return place.suffix == ".gguf" and place.is_file()


def in_words(size: float) -> str:
    """4100000000 → 4.1 GB."""
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if size >= pair[0]), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"
