"""Small random copies of models of transformers, on which it is tested what an architecture computes."""

from __future__ import annotations

import copy
from typing import Any

import torch

from shoal.untrusted.huggingface import causal_model_of

_WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "ffn_dim": 24,
    "n_inner": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_attention_heads": 4,
    "head_dim": 8,
    "word_embed_proj_dim": 32,
    "vocab_size": 40,
}
"""Sizes of the copy. Depth and per-layer settings stay as they are."""


def small_copy(config: Any) -> Any:
    """A small random model of the same architecture and depth."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    grouped = getattr(text, "num_key_value_heads", None) not in (None, text.num_attention_heads)
    for name, size in _WIDTHS.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, size)
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = 2 if grouped else 4
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    small = causal_model_of(config).eval()
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return small


def narrowed(config: Any, first: int, last: int) -> Any:
    """The config of these layers; per-layer lists are sliced."""
    made = copy.deepcopy(config)
    text = made.get_text_config()
    count = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[first:last])
    text.num_hidden_layers = last - first
    return made
