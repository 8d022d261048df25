"""Models of transformers as llama.cpp computes them: settings and tensors under the names of a GGUF file.

Llama and Mistral (both `llama`), Qwen 2, Qwen 3, the first Gemma, GPT-2, and GPT-NeoX without parallel layers.

Holds: a model is described only if llama.cpp computes the same from it; all others are refused with the reason. What differs is rounding:
llama.cpp multiplies half-precision weights by activations in half precision, and reads GELU from a table of half-precision numbers.

Shapes: P rotary pairs of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.huggingface.adapters import Adapters
from shoal.models.huggingface.tensor_names import GPT2_NAMES, LLAMA_NAMES, NEOX_NAMES, Names
from shoal.models.layers.rotary import to_adjacent_pairs

_FAMILIES: Mapping[str, tuple[str, Names]] = {
    "llama": ("llama", LLAMA_NAMES),
    "mistral": ("llama", LLAMA_NAMES),
    "qwen2": ("qwen2", LLAMA_NAMES),
    "qwen3": ("qwen3", LLAMA_NAMES),
    "gemma": ("gemma", LLAMA_NAMES),
    "gpt2": ("gpt2", GPT2_NAMES),
    "gpt_neox": ("gptneox", NEOX_NAMES),
}
"""llama.cpp's name of the architecture, and the names of the tensors, by transformers' type of the model."""
GGUF_NAMES: Mapping[str, tuple[str, ...]] = {
    "token_embedding": ("token_embd",),
    "position_embedding": ("position_embd",),
    "norm": ("output_norm",),
    "output": ("output",),
    "attention_norm": ("attn_norm",),
    "attention.query_key_value": ("attn_q", "attn_k", "attn_v"),
    "attention.query_norm": ("attn_q_norm",),
    "attention.key_norm": ("attn_k_norm",),
    "attention.output": ("attn_output",),
    "feed_forward_norm": ("ffn_norm",),
    "feed_forward.up": ("ffn_gate", "ffn_up"),
    "feed_forward.down": ("ffn_down",),
}
ONE_PRODUCT = {"attention.query_key_value": ("attn_qkv",), "feed_forward.up": ("ffn_up",)}
"""The names where a family has one matrix for all."""
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Activations that are GELU with tanh, as llama.cpp computes it."""
_ROTARY_TYPES = ("default", "linear", "llama3")


class LlamaCppModel(NamedTuple):
    """The fields and the tensors of a GGUF file, without its vocabulary."""

    architecture: str
    fields: dict[str, int | float | str | bool]
    """By their names below the architecture's."""
    names: dict[str, str]
    """The name of each tensor in the file, by its name in the model."""
    extra: dict[str, Tensor]
    """Tensors that the model does not have: factors of its rotary frequencies."""
    notes: list[str]
    inner: Any

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in float32, one after the other."""
        yield from self.extra.items()
        for name, parameter in self.inner.named_parameters(remove_duplicate=False):
            if name in self.names:
                yield self.names[name], self.changed(name, parameter.detach().cpu().float())

    def changed(self, name: str, value: Tensor) -> Tensor:
        """A tensor in llama.cpp's layout."""
        kind = self.inner.config.model_type
        if kind == "gemma" and "norm" in name:
            return value + 1
        turned = kind == "gpt2" and value.dim() == 2 and ".h." in name
        return value.t().contiguous() if turned else self.ordered(name, value)

    def ordered(self, name: str, rows: Tensor) -> Tensor:
        """The rows of a tensor, in llama.cpp's order."""
        config = self.inner.config
        if self.architecture == "llama" and any(part in name for part in (".q_proj.", ".k_proj.")):
            return to_adjacent_pairs(rows, _head_size(config))
        if self.architecture == "gptneox" and ".query_key_value." in name:  # there head by head, here all queries first
            heads = rows.view(config.num_attention_heads, 3, _head_size(config), *rows.shape[1:])
            return heads.transpose(0, 1).reshape(rows.shape)
        return rows

    def adapter_tensors(self, adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
        """LoRA matrices, whose product llama.cpp adds as it is: the scale is in the second. Raises ShoalError."""
        for module, pair in adapters.pairs.items():
            name = f"{module}.weight"
            if name not in self.names or pair.magnitude_O is not None:
                what = f"DoRA ({module})" if pair.magnitude_O is not None else f"adapters of {module}"
                raise ShoalError(f"llama.cpp does not read {what}: export the merged model, without --adapters")
            yield f"{self.names[name]}.lora_a", pair.a_RI.float()
            yield f"{self.names[name]}.lora_b", self.ordered(name, pair.b_OR.float()) * pair.scale


def for_llama_cpp(inner: Any) -> LlamaCppModel:
    """A model of transformers in llama.cpp's form. Raises ShoalError where llama.cpp computes something else."""
    config, notes = inner.config, list[str]()
    if config.model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ShoalError(f"{type(inner).__name__} is not written for llama.cpp: Shoal writes models of the types {known}")
    architecture, names = _FAMILIES[config.model_type]
    if differences := [text for text, differs in _differences(config) if differs]:
        raise ShoalError(f"llama.cpp computes something else than this {type(inner).__name__}: it has no {' and no '.join(differences)}")
    fields = _gpt2_fields(config) if config.model_type == "gpt2" else _rotary_fields(config)
    extra: dict[str, Tensor] = {}
    if config.model_type != "gpt2":
        fields["context_length"] = _context(config, notes)
        extra = _rotary_scaling(config, inner.get_decoder().rotary_emb, architecture, fields)
    return LlamaCppModel(architecture, fields, _named(inner, names, architecture), extra, notes, inner)


def _differences(config: Any) -> list[tuple[str, bool]]:
    """What llama.cpp lacks, and whether the model needs it."""
    kind = config.model_type
    activation = getattr(config, "activation_function", None) or config.hidden_act
    wanted = _TANH_GELU if kind in ("gpt2", "gpt_neox", "gemma") else ("silu",)
    exact = activation == "gelu" and kind in ("gpt2", "gpt_neox", "gemma")
    return [
        ("exact GELU (its own is computed with tanh)" if exact else f"activation {activation}", activation not in wanted),
        ("attention bias", kind in ("qwen3", "gemma") and bool(getattr(config, "attention_bias", False))),
        ("attention without bias", kind == "gpt_neox" and not config.attention_bias),
        ("output matrix beside the embedding", kind == "gemma" and not config.tie_word_embeddings),
        ("layers in parallel", kind == "gpt_neox" and config.use_parallel_residual),
        ("attention scaled by the layer", getattr(config, "scale_attn_by_inverse_layer_idx", False)),
        ("attention that is not scaled", not getattr(config, "scale_attn_weights", True)),
        ("cross-attention", getattr(config, "add_cross_attention", False)),
    ]


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _gpt2_fields(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "vocab_size": config.vocab_size,
    }


def _rotary_fields(config: Any) -> dict[str, Any]:
    neox = config.model_type == "gpt_neox"
    share = config.rope_parameters.get("partial_rotary_factor", 1.0) if neox else 1.0
    norm = {"attention.layer_norm_epsilon": config.layer_norm_eps} if neox else {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    heads = {} if neox else {"attention.key_length": _head_size(config), "attention.value_length": _head_size(config)}
    return {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "rope.dimension_count": int(_head_size(config) * share),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
        **norm,
        **heads,
        **({"use_parallel_residual": False} if neox else {}),
    }


def _context(config: Any, notes: list[str]) -> int:
    """The longest text. Up to the width of a sliding window, attention with and without it is the same."""
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else config.model_type == "mistral"
    window = getattr(config, "sliding_window", None) if slides else None
    if window is None or window >= config.max_position_embeddings:
        return int(config.max_position_embeddings)
    notes.append(f"llama.cpp has no sliding window for this model: its context ends at the window, {window} tokens")
    return int(window)


def _rotary_scaling(config: Any, rotary: Any, architecture: str, fields: dict[str, Any]) -> dict[str, Tensor]:
    """Write the scaling of the rotary frequencies into the fields, or as a tensor of factors."""
    kind, settings = rotary.rope_type, config.rope_parameters
    if kind not in _ROTARY_TYPES or rotary.attention_scaling != 1.0 or (kind == "llama3" and architecture != "llama"):
        raise ShoalError(f"llama.cpp computes rotary positions of the type {kind} otherwise for {architecture}")
    if kind == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(settings["factor"])}
    if kind != "llama3":
        return {}
    pairs_P = torch.arange(0, fields["rope.dimension_count"], 2, dtype=torch.float64)
    plain_P = fields["rope.freq_base"] ** (-pairs_P / fields["rope.dimension_count"])
    return {"rope_freqs.weight": (plain_P / rotary.inv_freq.detach().cpu().double()).float()}


def _named(inner: Any, names: Names, architecture: str) -> dict[str, str]:
    """The name in the file of each parameter. A tied output matrix is left out: llama.cpp then takes the embedding. Raises ShoalError."""
    known: dict[str, str] = {}
    for module, sources in names.items():
        if module != "layers":
            known |= {source.removeprefix("inner."): own for source, own in zip(sources, _targets(module, sources), strict=True)}
    layers, found, seen = names["layers"].removeprefix("inner."), dict[str, str](), set[int]()
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        module, _, kind = name.rpartition(".")
        layer, _, part = module.removeprefix(f"{layers}.").partition(".") if module.startswith(f"{layers}.") else ("", "", "")
        if (target := known.get(part or module)) is None:
            raise ShoalError(f"llama.cpp has no place for the tensor {name} of this {type(inner).__name__}")
        if id(parameter) not in seen or architecture == "gptneox":  # which needs both
            found[name] = f"blk.{layer}.{target}.{kind}" if part else f"{target}.{kind}"
        seen.add(id(parameter))
    return found


def _targets(module: str, sources: tuple[str, ...]) -> tuple[str, ...]:
    return ONE_PRODUCT[module] if len(sources) == 1 and module in ONE_PRODUCT else GGUF_NAMES[module]
