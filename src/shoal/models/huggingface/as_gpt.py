"""Conversion of Hugging Face models to Shoal's own GPT or mixture, which has fewer kernels per layer and a KV cache that is written in
place.

Llama, Mistral, Qwen 2, Qwen 3 and Gemma without sliding-window attention, and GPT-2, have the layers of `Gpt` (with the differences that
`Variant` lists) if their matrices are concatenated: queries, keys and values; gate and content. Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE
have those of `Moe`, if layers without experts are the first ones. Gemma 2 and 3 keep their own layers: they have windows, capped logits,
and norms after the layers. Whether a model can be converted is tested with a small random copy. Tensors keep their names in the model's
own files, so files, digests and other machines are not affected.

Shapes: N rows of a matrix, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.gpt import Gpt
from shoal.models.huggingface.model import HuggingFace
from shoal.models.huggingface.small_copy import narrowed, small_copy
from shoal.models.huggingface.tensor_names import (
    GPT2_NAMES,
    LLAMA_NAMES,
    MIXTURE_NAMES,
    Names,
    parts_of,
    plain_name,
    sources,
    stack_of,
)
from shoal.models.layers.rotary import Rotary, to_adjacent_pairs
from shoal.models.moe import Moe
from shoal.models.routers import HeldExperts
from shoal.models.stages import load_tensors, required_tensors, without_weights
from shoal.models.transformer import PLAIN, Variant
from shoal.untrusted.huggingface import causal_model_of

Get = Callable[[str], Tensor]
"""Gives a tensor by its name."""

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", *MIXTURES)
_ROTARY_TYPES = ("default", "linear", "llama3")
"""Kinds of rotary positions whose frequencies do not depend on the length of the text."""
_TOLERANCE = 1e-4
MOST_POSITIONS = 1 << 21


class GptConversion:
    """How a Hugging Face model becomes a `Gpt` or a `Moe`."""

    settings: schema.Gpt | schema.Moe

    def __init__(self, inner: Any) -> None:
        """Raises ShoalError, AttributeError or similar for other architectures."""
        self.config: Any = inner.config
        config = self.config
        self.vocab_size: int = config.vocab_size
        self.gpt2 = config.model_type == "gpt2"
        self.settings = _of_gpt2(config) if self.gpt2 else _of_mixture(config) if config.model_type in MIXTURES else _of_llama(config)
        dropout = self.settings.attention_dropout if isinstance(self.settings, schema.Moe) else self.settings.dropout
        self.trains_alike = _dropouts(config) == {dropout} and not getattr(config, "router_jitter_noise", 0.0)
        """Whether training drops the same shares of activations, and routers add no noise."""
        if self.settings.max_seq_len > MOST_POSITIONS:
            raise ShoalError("its table of positions would fill the memory")
        self.frequencies: Tensor | None = None
        self.variant = PLAIN
        if not self.gpt2:
            decoder = inner.get_decoder()
            rotary = decoder.rotary_emb
            if rotary.rope_type not in _ROTARY_TYPES or any(kind != "full_attention" for kind in _kinds(config)):
                raise ShoalError("its attention has a window, or positions that depend on the length of the text")
            if rotary.inv_freq.is_meta:
                with torch.device("cpu"):
                    rotary = type(rotary)(config=config)
            self.frequencies = rotary.inv_freq
            self.variant = _variant(config, decoder.layers[0].self_attn.q_proj.bias is not None)

    @classmethod
    def from_parts(
        cls, settings: schema.Gpt | schema.Moe, vocab_size: int, gpt2: bool, frequencies: Tensor | None, variant: Variant
    ) -> GptConversion:
        """A conversion without the model's own configuration: see `gpt_description.py`."""
        made = cls.__new__(cls)
        made.config, made.vocab_size, made.gpt2, made.settings = None, vocab_size, gpt2, settings
        made.frequencies, made.variant, made.trains_alike = frequencies, variant, False
        return made

    @property
    def names(self) -> Names:
        return GPT2_NAMES if self.gpt2 else MIXTURE_NAMES if isinstance(self.settings, schema.Moe) else LLAMA_NAMES

    def make(self, kind: Any = None, held: HeldExperts = None) -> Gpt | Moe:
        """The model without weights. `kind`: a class that extends `Gpt` or `Moe`; `held`: the experts that it has."""
        with without_weights():
            made: Gpt | Moe
            if isinstance(self.settings, schema.Moe):
                made = (kind or Moe)(self.settings, self.vocab_size, held, self.variant)
            else:
                made = (kind or Gpt)(self.settings, self.vocab_size, self.variant)
        if self.frequencies is not None:
            made.rotary = Rotary(self.settings.max_seq_len, self.head_size, self.frequencies)
        made.conversion = self
        return made.eval()

    def linear_layers(self) -> list[str]:
        """The paths of the linear layers of all blocks, without routers and gates."""
        made = self.make()
        return [name for name, one in made.named_modules() if name.startswith("blocks.") and type(one) is nn.Linear]

    def owns(self, name: str) -> bool:
        """Whether a name is that of a tensor of `Gpt`."""
        if stack_of(self.names, name) is not None:
            return True
        module = name.rpartition(".")[0]
        return module.split(".", 2)[-1] in self.names if module.startswith("blocks.") else module in self.names

    def sources(self, name: str) -> list[str]:
        """The names, in the model's own files, of the parts of a tensor of `Gpt`."""
        return sources(self.names, name)

    def tensor(self, name: str, get: Get, held: HeldExperts = None) -> Tensor:
        """A tensor of `Gpt`. `get` returns tensors of the model's own files by name; codes and scales of weights in few bits by rows.
        `held`: the experts whose matrices are wanted."""
        parts = [get(source) for source in self.sources(name)]
        if held is not None and stack_of(self.names, name) is not None:
            return parts[0][list(held)]
        if self.gpt2:
            # GPT-2's matrices are transposed, except for the embeddings
            turned = parts[0].dim() == 2 and name.startswith("blocks.") and name.endswith(".weight")
            return parts[0].t().contiguous() if turned else parts[0]
        if "query_key_value" in name:
            parts[:2] = [to_adjacent_pairs(part, self.head_size) for part in parts[:2]]
        if name.endswith(("query_norm.weight", "key_norm.weight")):
            parts = [to_adjacent_pairs(parts[0], self.head_size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def originals(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The inverse of `tensor`: the tensors of the model's own files, by name, of which a tensor of `Gpt` is made."""
        settings = self.settings
        heads = settings.num_heads, settings.num_kv_heads or settings.num_heads
        return {source: part.contiguous() for source, part in parts_of(self.names, name, tensor, heads, self.head_size).items()}

    def convert(self, get: Get, held: HeldExperts = None) -> Gpt | Moe:
        """The model with its weights, or with those of some experts."""
        made = self.make(held=held)
        load_tensors(made, {name: self.tensor(name, get, held) for name in required_tensors(made)})
        return made

    @property
    def head_size(self) -> int:
        return self.variant.head_size or self.settings.hidden_size // self.settings.num_heads


def _variant(config: Any, biased: bool) -> Variant:
    gemma = config.model_type == "gemma"
    return Variant(
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        biased_heads=biased,
        gelu_gate=gemma,
        one_plus_norms=gemma,
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
    )


def _of_llama(config: Any) -> schema.Gpt:
    if config.hidden_act != ("gelu_pytorch_tanh" if config.model_type == "gemma" else "silu"):
        raise ShoalError("its activation is of another kind")
    return schema.Gpt(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        max_seq_len=config.max_position_embeddings,
        positions="rotary",
        feed_forward="swiglu",
        norm="rms",
        norm_eps=config.rms_norm_eps,
        bias=False,
        qk_norm="head" if config.model_type == "qwen3" else "none",
        tied_embeddings=config.tie_word_embeddings,
    )


def _of_mixture(config: Any) -> schema.Moe:
    plain = _of_llama(config)
    dense = list(getattr(config, "mlp_only_layers", None) or [])
    if dense != list(range(len(dense))) or getattr(config, "decoder_sparse_step", 1) != 1 or len(dense) >= config.num_hidden_layers:
        raise ShoalError("layers without experts are not the first ones")
    if getattr(config, "clip_qkv", None) is not None:
        raise ShoalError("it clips queries, keys and values")
    family, per_token = config.model_type, config.num_experts_per_tok
    normalises = True if family == "mixtral" else bool(config.norm_topk_prob)
    if per_token == 1 and normalises:
        raise ShoalError("its gates are always 1")
    experts = schema.Experts(
        count=config.num_local_experts if family == "mixtral" else config.num_experts,
        per_token=per_token,
        capacity_factor=None,
        intermediate_size=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        shared_size=config.shared_expert_intermediate_size if family == "qwen2_moe" else None,
        shared_gate=family == "qwen2_moe",
        dense_layers=len(dense),
        normalise_gates=normalises,
        aux_loss_weight=0.0,
    )
    shared = {name: getattr(plain, name) for name in schema.Transformer.fields() if name not in ("kind", "qk_norm")}
    qk_norm: Any = {"qwen3_moe": "head", "olmoe": "width"}.get(family, "none")
    return schema.Moe(**shared, qk_norm=qk_norm, experts=experts, attention_dropout=float(config.attention_dropout))


def _of_gpt2(config: Any) -> schema.Gpt:
    if config.activation_function != "gelu_new":
        raise ShoalError("its activation is of another kind")
    return schema.Gpt(
        hidden_size=config.n_embd,
        num_layers=config.n_layer,
        num_heads=config.n_head,
        intermediate_size=config.n_inner or 4 * config.n_embd,
        max_seq_len=config.n_positions,
        norm_eps=config.layer_norm_epsilon,
        tied_embeddings=config.tie_word_embeddings,
        dropout=config.resid_pdrop,
    )


def _kinds(config: Any) -> list[str]:
    """The attention of each layer, where the settings list it."""
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        return ["window"]
    return list(getattr(config, "layer_types", None) or [])


_DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout")


def _dropouts(config: Any) -> set[float]:
    """The shares of activations that the model drops in training, at whatever place."""
    return {float(getattr(config, name)) for name in _DROPOUTS if getattr(config, name, None) is not None} or {0.0}


_KNOWN: dict[str, GptConversion | None] = {}


def gpt_conversion(model: HuggingFace) -> GptConversion | None:
    """The conversion of this model, or None where it cannot be converted. The model may be on the meta device."""
    return None if model.has_adapters else conversion_beneath(model)


def conversion_beneath(model: HuggingFace) -> GptConversion | None:
    """As `gpt_conversion`, of the model without its LoRA adapters."""
    inner = model.inner.get_base_model() if model.has_adapters else model.inner
    if inner.config.model_type not in FAMILIES:
        return None
    key = f"{type(inner).__name__} {inner.config.to_json_string()}"
    if key not in _KNOWN:
        _KNOWN[key] = _computes_the_same(inner)
    return _KNOWN[key]


@torch.inference_mode()
def _computes_the_same(inner: Any) -> GptConversion | None:
    """Compare a small random copy with its conversion: prefill, one decode step, and a padded row in a batch."""
    try:
        found = GptConversion(inner)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(0)
            dense = found.settings.experts.dense_layers if isinstance(found.settings, schema.Moe) else 0
            small = HuggingFace(small_copy(narrowed(inner.config, 0, min(2 + dense, inner.config.num_hidden_layers))))
            ours = GptConversion(small.inner).convert(small.state_dict().__getitem__)
    except (ShoalError, AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return None
    with torch.device("cpu"):
        return found if all(_close(theirs, own) for theirs, own in _logits_of_both(small, ours)) else None


def _logits_of_both(small: HuggingFace, ours: Gpt | Moe) -> Iterator[tuple[Tensor, Tensor]]:
    ids_BL, mask_BS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]]), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    caches = small.new_cache(0), ours.new_cache(0)
    for piece_BL in (ids_BL, ids_BL[:, :1]):
        yield small(piece_BL, cache=caches[0]), ours(piece_BL, cache=caches[1])
    yield small(ids_BL, attention_mask=mask_BS)[:, 2:], ours(ids_BL, attention_mask=mask_BS)[:, 2:]


def _close(theirs: Tensor, ours: Tensor) -> bool:
    return bool((theirs - ours).abs().max() <= _TOLERANCE * theirs.abs().max())


def weights_for(network: Any, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights by the names that they have in a network, whether they were saved with Shoal's own layers or with those of transformers.
    Other tensors, such as LoRA adapters, keep their names."""
    if isinstance(network, HuggingFace) and "token_embedding.weight" in weights:
        conversion = conversion_beneath(network)
        return weights if conversion is None else _by_their_names(network, conversion, weights)
    conversion = getattr(network, "conversion", None)
    if conversion is not None and "token_embedding.weight" not in weights:
        return _by_own_names(network, conversion, weights)
    return weights


def _by_their_names(network: HuggingFace, conversion: GptConversion, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    theirs = {plain_name(name): (name, value) for name, value in network.state_dict().items()}
    own = [name for name in weights if conversion.owns(name)]
    made = {}
    for full in own:
        for source, part in conversion.originals(full, weights[full]).items():
            name, value = theirs.get(source, (source, part))
            made[name] = part.view(value.shape) if part.numel() == value.numel() else part  # weights in nf4 are flat there
    return {name: value for name, value in weights.items() if name not in own} | made


def _by_own_names(network: Any, conversion: GptConversion, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    own = {name: value for name, value in required_tensors(network).items() if conversion.owns(name)}
    theirs = {plain_name(name): name for name in weights}
    used = {source for name in own for source in conversion.sources(name)}
    if not used <= theirs.keys():
        return weights
    made = {name: conversion.tensor(name, _rows_like(slot, theirs, weights)) for name, slot in own.items()}
    taken = {theirs[source] for source in used}
    return {name: value for name, value in weights.items() if name not in taken} | made


def _rows_like(slot: Tensor, theirs: Mapping[str, str], weights: Mapping[str, Tensor]) -> Get:
    """Gives tensors as rows of the shape of a slot's rows: weights in nf4 are flat in the model's own layers."""

    def get(source: str) -> Tensor:
        value = weights[theirs[source]]
        return value if value.dim() == slot.dim() else value.view(-1, *slot.shape[1:])

    return get


def named_as_in(players: Mapping[str, Any], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of several networks, named `player.weight`, by the names that they have in these networks, whichever layers trained."""
    found = dict(saved)
    for player, network in players.items():
        prefix = f"{player}.trunk." if hasattr(network, "trunk") else f"{player}."
        own = {name.removeprefix(prefix): found.pop(name) for name in saved if name.startswith(prefix)}
        found |= {f"{prefix}{name}": value for name, value in weights_for(getattr(network, "trunk", network), own).items()}
    return found


def as_huggingface(model: Any) -> HuggingFace:
    """A network that was converted, as a model of transformers again."""
    conversion: GptConversion = model.conversion
    with without_weights():
        made = HuggingFace(causal_model_of(conversion.config))
    load_tensors(made, weights_for(made, {name: value.detach() for name, value in required_tensors(model).items()}))
    return made
