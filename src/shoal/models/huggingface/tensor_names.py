"""Names and layout of the tensors of Llama, mixtures of experts, GPT-2 and GPT-NeoX in transformers, by the names of the modules of Shoal's
own models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.models.layers.rotary import to_half_pairs

Names = Mapping[str, Any]

LLAMA_NAMES: dict[str, Any] = {
    "layers": "inner.model.layers",
    "token_embedding": ("inner.model.embed_tokens",),
    "norm": ("inner.model.norm",),
    "output": ("inner.lm_head",),
    "attention_norm": ("input_layernorm",),
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.query_norm": ("self_attn.q_norm",),
    "attention.key_norm": ("self_attn.k_norm",),
    "attention.output": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.down": ("mlp.down_proj",),
}
MIXTURE_NAMES: Names = LLAMA_NAMES | {
    "feed_forward.router": ("mlp.gate",),
    "feed_forward.shared.up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "feed_forward.shared.down": ("mlp.shared_expert.down_proj",),
    "feed_forward.shared_gate": ("mlp.shared_expert_gate",),
    "stacks": {"feed_forward.up": "mlp.experts.gate_up_proj", "feed_forward.down": "mlp.experts.down_proj"},
}
"""Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE. `stacks`: tensors with a matrix of each expert, which have no module of their own."""
GPT2_NAMES: Names = {
    "layers": "inner.transformer.h",
    "token_embedding": ("inner.transformer.wte",),
    "position_embedding": ("inner.transformer.wpe",),
    "norm": ("inner.transformer.ln_f",),
    "output": ("inner.lm_head",),
    "attention_norm": ("ln_1",),
    "attention.query_key_value": ("attn.c_attn",),
    "attention.output": ("attn.c_proj",),
    "feed_forward_norm": ("ln_2",),
    "feed_forward.up": ("mlp.c_fc",),
    "feed_forward.down": ("mlp.c_proj",),
}
NEOX_NAMES: Names = {
    "layers": "inner.gpt_neox.layers",
    "token_embedding": ("inner.gpt_neox.embed_in",),
    "norm": ("inner.gpt_neox.final_layer_norm",),
    "output": ("inner.lm_head",),
    "attention_norm": ("input_layernorm",),
    "attention.query_key_value": ("attention.query_key_value",),
    "attention.output": ("attention.dense",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "feed_forward.up": ("mlp.dense_h_to_4h",),
    "feed_forward.down": ("mlp.dense_4h_to_h",),
}


_EXPERT = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d{1,6})\.(\w+)\.weight")
_OF_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_OF_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def stacked_experts(names: Iterable[str]) -> dict[str, list[tuple[str, ...]]]:
    """Files of mixtures have the matrices of each expert apart. By the name of a stack: for each expert the matrices that are joined."""
    layers: dict[str, dict[int, dict[str, str]]] = {}
    for name in names:
        if (match := _EXPERT.fullmatch(name)) is not None:
            layers.setdefault(match[1], {}).setdefault(int(match[2]), {})[_OF_MIXTRAL.get(match[3], match[3])] = name
    found = {}
    for layer, experts in layers.items():
        for stack, parts in _OF_STACKS.items():
            own = [tuple(experts[number][part] for part in parts if part in experts[number]) for number in sorted(experts)]
            if max(experts) + 1 == len(experts) and all(len(one) == len(parts) for one in own):
                found[f"{layer}.mlp.experts.{stack}"] = own
    return found


def plain_name(name: str) -> str:
    """The name of a tensor or module in the model's own files, without the modules that peft puts around it."""
    return name.replace("inner.base_model.model.", "inner.", 1).replace(".base_layer.", ".")


def stack_of(names: Names, name: str) -> str | None:
    """The name, within a layer, of a tensor with a matrix of each expert; None: it is another tensor."""
    found: str | None = names.get("stacks", {}).get(name.split(".", 2)[-1]) if name.startswith("blocks.") else None
    return found


def sources(names: Names, name: str) -> list[str]:
    """The names, in the model's own files, of the parts that a tensor of `Gpt` is concatenated from."""
    if (stack := stack_of(names, name)) is not None:
        return [f"{names['layers']}.{name.split('.')[1]}.{stack}"]
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return [f"{source}.{kind}" for source in names[module]]
    _, layer, part = module.split(".", 2)
    return [f"{names['layers']}.{layer}.{source}.{kind}" for source in names[part]]


def parts_of(names: Names, name: str, value: Tensor, heads: tuple[int, int], head_size: int) -> dict[str, Tensor]:
    """The tensors of the model's own files, by name, that a tensor of `Gpt` is concatenated from. `heads`: of queries, and of keys. Weights
    in few bits are cut row by row, as others are."""
    targets = sources(names, name)
    if names is GPT2_NAMES:  # its matrices are transposed, except for the embeddings
        parts = [value.t() if value.dim() == 2 and name.startswith("blocks.") and name.endswith(".weight") else value]
    elif "query_key_value" in name:
        query, key, content = torch.split(value, [count * head_size for count in (heads[0], heads[1], heads[1])])
        parts = [to_half_pairs(query, head_size), to_half_pairs(key, head_size), content]
        if names is NEOX_NAMES:  # head by head
            parts = [torch.stack([part.view(-1, head_size, *part.shape[1:]) for part in parts], 1).flatten(0, 2)]
    elif name.endswith(("query_norm.weight", "key_norm.weight")):
        parts = [to_half_pairs(value, head_size)]
    else:
        parts = list(value.chunk(len(targets)))
    return dict(zip(targets, parts, strict=True))
