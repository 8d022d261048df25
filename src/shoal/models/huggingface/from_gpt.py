"""Conversion of Shoal's own GPT or mixture to a model of transformers that computes the same: Llama, Qwen 3, GPT-2 or GPT-NeoX; Mixtral,
Qwen2-MoE, Qwen3-MoE or OLMoE.

| | positions | feed-forward | normalisation | key and value heads |
|---|---|---|---|---|
| Llama | rotary | SwiGLU | RMS | any number |
| Qwen 3 | rotary | SwiGLU | RMS, and of the heads of queries and keys | any number |
| GPT-2 | learned | GELU (tanh) | layer | as many as query heads |
| GPT-NeoX | rotary | GELU (tanh) | layer | as many as query heads |

Biases are settings of Llama, and Qwen 3 has none. The others always have them; they are zero where the GPT has none.

Mixtures have the layers of Llama without biases, and the router switch:

| | queries and keys | gates | shared expert | dense first layers |
|---|---|---|---|---|
| Mixtral | as they are | normalised | none | none |
| Qwen2-MoE | as they are | either | one with a gate | any number |
| Qwen3-MoE | each head normalised | either | none | any number |
| OLMoE | all heads normalised together | either | none | none |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.gpt import Gpt
from shoal.models.huggingface.tensor_names import GPT2_NAMES, LLAMA_NAMES, MIXTURE_NAMES, NEOX_NAMES, Names, parts_of
from shoal.models.layers.expert_layer import expert_size
from shoal.models.layers.rotary import THETA
from shoal.models.moe import Moe
from shoal.untrusted.huggingface import causal_model_of

_EXPECTED: dict[str, dict[str, Any]] = {
    "Llama": {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms", "qk_norm": "none"},
    "Qwen 3": {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms", "qk_norm": "head", "bias": False},
    "GPT-2": {"positions": "learned", "feed_forward": "gelu", "norm": "layer", "qk_norm": "none"},
    "GPT-NeoX": {"positions": "rotary", "feed_forward": "gelu", "norm": "layer", "qk_norm": "none"},
}
_MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"qk_norm": "none", "shared_size": None, "dense_layers": 0, "normalise_gates": True},
    "Qwen2-MoE": {"qk_norm": "none", "shared_gate": True},
    "Qwen3-MoE": {"qk_norm": "head", "shared_size": None},
    "OLMoE": {"qk_norm": "width", "shared_size": None, "dense_layers": 0},
}
_EXPECTED_OF_MIXTURES = {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms", "bias": False, "router": "switch"}


def as_transformers(model: Gpt | Moe, settings: schema.Gpt | schema.Moe, eos_id: int | None) -> Any:
    """The model as one of transformers. Raises ShoalError where none computes the same."""
    if isinstance(settings, schema.Moe):
        differences = {family: _differences_of_mixture(settings, family) for family in _MIXTURES}
    else:
        differences = {family: _differences(settings, family) for family in _EXPECTED}
    family = next((family for family, found in differences.items() if not found), None)
    if family is None:
        reasons = "; ".join(f"{family} has no {' and no '.join(found)}" for family, found in differences.items())
        raise ShoalError(f"no model of Transformers computes the same: {reasons}; export it without --transformers, for `shoal generate`")
    try:
        import transformers
    except ImportError as error:
        raise ShoalError("--transformers needs transformers: pip install 'shoal[hf]'") from error
    kind, names, shape_of = _FAMILIES[family]
    ends = {"vocab_size": model.vocab_size, "tie_word_embeddings": settings.tied_embeddings, "bos_token_id": None, "eos_token_id": eos_id}
    theirs: Any = causal_model_of(getattr(transformers, kind)(**shape_of(settings), **ends))
    state = _named(model, settings, names)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(state[name]) if name in state else parameter.zero_()  # a bias that the GPT does not have
    return theirs.eval()


def _differences_of_mixture(settings: schema.Moe, family: str) -> list[str]:
    """Settings of the model that the family does not compute."""
    chosen = {name: getattr(settings, name, None) for name in ("positions", "feed_forward", "norm", "bias", "qk_norm")}
    experts = settings.experts
    chosen |= {"router": experts.router, "shared_size": experts.shared_size, "dense_layers": experts.dense_layers}
    chosen |= {"shared_gate": experts.shared_size is not None and experts.shared_gate, "normalise_gates": _normalises(experts)}
    expected = _EXPECTED_OF_MIXTURES | _MIXTURES[family]
    found = [f"{name} {chosen[name]}".lower() for name, value in expected.items() if chosen[name] != value]
    parts = ("mixture_of_heads", "mixture_of_activations", "cross_attention", "retrieval", "episodic_memory")
    found += [name for name in parts if getattr(settings, name).enabled]
    return found + (["scores sigmoid"] if experts.scores == "sigmoid" else [])


def _mixture_shape(settings: schema.Moe) -> dict[str, Any]:
    """What all mixtures have."""
    experts = settings.experts
    shape = {name: value for name, value in _llama_shape(settings).items() if name != "mlp_bias"}
    shape |= {"attention_dropout": settings.attention_dropout, "num_experts_per_tok": experts.per_token}
    shape |= {"router_aux_loss_coef": experts.aux_loss_weight, "head_dim": settings.hidden_size // settings.num_heads}
    return shape | {"num_experts": experts.count, "norm_topk_prob": _normalises(experts), "intermediate_size": expert_size(settings)}


def _mixtral_shape(settings: schema.Moe) -> dict[str, Any]:
    shape = _mixture_shape(settings)
    shape["num_local_experts"] = shape.pop("num_experts")
    del shape["norm_topk_prob"]
    return shape


def _qwen3_moe_shape(settings: schema.Moe) -> dict[str, Any]:
    sizes = {"intermediate_size": settings.intermediate_size or 4 * settings.hidden_size, "moe_intermediate_size": expert_size(settings)}
    return _mixture_shape(settings) | sizes | {"mlp_only_layers": list(range(settings.experts.dense_layers))}


def _qwen2_moe_shape(settings: schema.Moe) -> dict[str, Any]:
    return _qwen3_moe_shape(settings) | {"shared_expert_intermediate_size": settings.experts.shared_size, "qkv_bias": False}


def _normalises(experts: schema.Experts) -> bool:
    return experts.per_token > 1 if experts.normalise_gates is None else experts.normalise_gates


def _differences(settings: schema.Gpt, family: str) -> list[str]:
    """Settings of the model that the family does not compute."""
    found = [f"{name} {getattr(settings, name)}" for name, value in _EXPECTED[family].items() if getattr(settings, name) != value]
    if family.startswith("GPT") and settings.num_kv_heads not in (None, settings.num_heads):
        found.append(f"num_kv_heads {settings.num_kv_heads}")
    return found


def _llama_shape(settings: schema.Gpt | schema.Moe) -> dict[str, Any]:
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


def _named(model: Gpt | Moe, settings: schema.Gpt | schema.Moe, names: Names) -> dict[str, Tensor]:
    """The weights under the family's names and in its layout. Tied matrices are named once."""
    size, kv_heads = settings.hidden_size // settings.num_heads, settings.num_kv_heads or settings.num_heads
    found = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        if name.startswith(("value_head.", "mtp.")):  # of training alone
            continue
        parts = parts_of(names, name, parameter.detach().cpu().float(), (settings.num_heads, kv_heads), size)
        found |= {target.removeprefix("inner."): part for target, part in parts.items()}
    return found


_FAMILIES: dict[str, tuple[str, Names, Callable[[Any], dict[str, Any]]]] = {
    "Llama": ("LlamaConfig", LLAMA_NAMES, _llama_shape),
    "Qwen 3": ("Qwen3Config", LLAMA_NAMES, _qwen3_shape),
    "GPT-2": ("GPT2Config", GPT2_NAMES, _gpt2_shape),
    "GPT-NeoX": ("GPTNeoXConfig", NEOX_NAMES, _neox_shape),
    "Mixtral": ("MixtralConfig", MIXTURE_NAMES, _mixtral_shape),
    "Qwen2-MoE": ("Qwen2MoeConfig", MIXTURE_NAMES, _qwen2_moe_shape),
    "Qwen3-MoE": ("Qwen3MoeConfig", MIXTURE_NAMES, _qwen3_moe_shape),
    "OLMoE": ("OlmoeConfig", MIXTURE_NAMES, _mixture_shape),
}
"""By family: the class of its configuration in transformers, the names of its tensors, and its sizes."""
