"""Conversion of Shoal's own GPT to a model of transformers that computes the same: Llama, Qwen 3, GPT-2 or GPT-NeoX.

| | positions | feed-forward | normalisation | key and value heads |
|---|---|---|---|---|
| Llama | rotary | SwiGLU | RMS | any number |
| Qwen 3 | rotary | SwiGLU | RMS, and of the heads of queries and keys | any number |
| GPT-2 | learned | GELU (tanh) | layer | as many as query heads |
| GPT-NeoX | rotary | GELU (tanh) | layer | as many as query heads |

Biases are settings of Llama, and Qwen 3 has none. The others always have them; they are zero where the GPT has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.gpt import Gpt
from shoal.models.huggingface.tensor_names import GPT2_NAMES, LLAMA_NAMES, NEOX_NAMES, Names, parts_of
from shoal.models.layers.rotary import THETA
from shoal.untrusted.huggingface import causal_model_of

_EXPECTED: dict[str, dict[str, Any]] = {
    "Llama": {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms", "qk_norm": "none"},
    "Qwen 3": {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms", "qk_norm": "head", "bias": False},
    "GPT-2": {"positions": "learned", "feed_forward": "gelu", "norm": "layer", "qk_norm": "none"},
    "GPT-NeoX": {"positions": "rotary", "feed_forward": "gelu", "norm": "layer", "qk_norm": "none"},
}
_NAMES = {"Llama": LLAMA_NAMES, "Qwen 3": LLAMA_NAMES, "GPT-2": GPT2_NAMES, "GPT-NeoX": NEOX_NAMES}


def as_transformers(model: Gpt, settings: schema.Gpt, eos_id: int | None) -> Any:
    """The model as one of transformers. Raises ShoalError where none computes the same."""
    differences = {family: _differences(settings, family) for family in _EXPECTED}
    family = next((family for family, found in differences.items() if not found), None)
    if family is None:
        reasons = "; ".join(f"{family} has no {' and no '.join(found)}" for family, found in differences.items())
        raise ShoalError(f"no model of Transformers computes the same: {reasons}; export it without --transformers, for `shoal generate`")
    shape = {"Llama": _llama_shape, "Qwen 3": _qwen3_shape, "GPT-2": _gpt2_shape, "GPT-NeoX": _neox_shape}[family](settings)
    shape |= {"vocab_size": model.vocab_size, "tie_word_embeddings": settings.tied_embeddings, "bos_token_id": None, "eos_token_id": eos_id}
    try:
        import transformers
    except ImportError as error:
        raise ShoalError("--transformers needs transformers: pip install 'shoal[hf]'") from error
    made: Any = getattr(transformers, {"Llama": "LlamaConfig", "Qwen 3": "Qwen3Config", "GPT-2": "GPT2Config"}.get(family, "GPTNeoXConfig"))
    theirs: Any = causal_model_of(made(**shape))
    state = _named(model, settings, _NAMES[family])
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(state[name]) if name in state else parameter.zero_()  # a bias that the GPT does not have
    return theirs.eval()


def _differences(settings: schema.Gpt, family: str) -> list[str]:
    """Settings of the model that the family does not compute."""
    found = [f"{name} {getattr(settings, name)}" for name, value in _EXPECTED[family].items() if getattr(settings, name) != value]
    if family.startswith("GPT") and settings.num_kv_heads not in (None, settings.num_heads):
        found.append(f"num_kv_heads {settings.num_kv_heads}")
    return found


def _llama_shape(settings: schema.Gpt) -> dict[str, Any]:
    return {
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size or 4 * settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads or settings.num_heads,
        "max_position_embeddings": settings.max_seq_len,
        "rms_norm_eps": settings.norm_eps,
        "attention_bias": settings.bias,
        "mlp_bias": settings.bias,
        "attention_dropout": settings.dropout,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }


def _qwen3_shape(settings: schema.Gpt) -> dict[str, Any]:
    shape = _llama_shape(settings) | {"head_dim": settings.hidden_size // settings.num_heads}
    return {name: value for name, value in shape.items() if name != "mlp_bias"}


def _gpt2_shape(settings: schema.Gpt) -> dict[str, Any]:
    return {
        "n_embd": settings.hidden_size,
        "n_inner": settings.intermediate_size,
        "n_layer": settings.num_layers,
        "n_head": settings.num_heads,
        "n_positions": settings.max_seq_len,
        "layer_norm_epsilon": settings.norm_eps,
        "activation_function": "gelu_new",
        "resid_pdrop": settings.dropout,
        "embd_pdrop": settings.dropout,
        "attn_pdrop": settings.dropout,
    }


def _neox_shape(settings: schema.Gpt) -> dict[str, Any]:
    return {
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size or 4 * settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "max_position_embeddings": settings.max_seq_len,
        "layer_norm_eps": settings.norm_eps,
        "hidden_act": "gelu_pytorch_tanh",
        "use_parallel_residual": False,
        "hidden_dropout": settings.dropout,
        "attention_dropout": settings.dropout,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 1.0},
    }


def _named(model: Gpt, settings: schema.Gpt, names: Names) -> dict[str, Tensor]:
    """The weights under the family's names and in its layout. Tied matrices are named once."""
    size, kv_heads = settings.hidden_size // settings.num_heads, settings.num_kv_heads or settings.num_heads
    found = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        if name.startswith("value_head."):  # of a policy's training
            continue
        parts = parts_of(names, name, parameter.detach().cpu().float(), (settings.num_heads, kv_heads), size)
        found |= {target.removeprefix("inner."): part for target, part in parts.items()}
    return found
