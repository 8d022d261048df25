"""Export of a mixture of experts as Mixtral of transformers, where both compute the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.layers.expert_layer import expert_size
from shoal.models.layers.rotary import THETA, to_half_pairs
from shoal.models.transformer import Trunk


def as_mixtral(model: Trunk, settings: schema.Moe, eos_id: int | None = None) -> Any:
    """The model as transformers' Mixtral. Raises ShoalError where Mixtral lacks a feature."""
    differences = [text for text, differs in _differences(settings) if differs]
    if differences:
        raise ShoalError(
            f"Mixtral computes something else: it has no {' and no '.join(differences)}; export without --transformers, as Shoal loads it"
        )
    try:
        import transformers
    except ImportError as error:
        raise ShoalError("--transformers needs transformers: pip install 'shoal[hf]'") from error
    config = transformers.MixtralConfig(
        vocab_size=model.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=expert_size(settings),
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads or settings.num_heads,
        max_position_embeddings=settings.max_seq_len,
        rms_norm_eps=settings.norm_eps,
        num_local_experts=settings.experts.count,
        num_experts_per_tok=settings.experts.per_token,
        router_aux_loss_coef=settings.experts.aux_loss_weight,
        attention_dropout=settings.attention_dropout,
        tie_word_embeddings=settings.tied_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=None,
        eos_token_id=eos_id,
    )
    made: Any = transformers.MixtralForCausalLM
    theirs: nn.Module = made(config)
    theirs.load_state_dict(_named(model, settings))
    return theirs.eval()


def _differences(settings: schema.Moe) -> list[tuple[str, bool]]:
    """Features that Mixtral lacks, and whether these settings use them."""
    experts = settings.experts
    return [
        (f"router {experts.router}", experts.router != "switch"),
        ("sigmoid scores", experts.scores == "sigmoid"),
        ("gates that are not normalised", experts.normalise_gates is False),
        ("shared expert", experts.shared_size is not None),
        ("dense first layers", experts.dense_layers > 0),
        ("normalised queries and keys", settings.qk_norm != "none"),
        ("gate of one expert a token that is not 1", settings.experts.per_token == 1),
        ("learned positions", settings.positions != "rotary"),
        (f"feed_forward {settings.feed_forward}", settings.feed_forward != "swiglu"),
        (f"norm {settings.norm}", settings.norm != "rms"),
        ("biases", settings.bias),
        ("mixture of heads", settings.mixture_of_heads.enabled),
        ("mixture of activations", settings.mixture_of_activations.enabled),
        ("cross-attention", settings.cross_attention.enabled or settings.retrieval.enabled),
        ("episodic memory", settings.episodic_memory.enabled),
    ]


def _named(model: Trunk, settings: schema.Moe) -> dict[str, Tensor]:
    """The weights under Mixtral's names and in its layout."""
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    heads, kv_heads = settings.num_heads, settings.num_kv_heads or settings.num_heads
    size = settings.hidden_size // heads
    named = {
        "model.embed_tokens.weight": state["token_embedding.weight"],
        "model.norm.weight": state["norm.weight"],
        "lm_head.weight": model.output_weight.detach().cpu(),
    }
    for layer in range(settings.num_layers):
        own, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        parts = torch.split(state[f"{own}.attention.query_key_value.weight"], [heads * size, kv_heads * size, kv_heads * size])
        named |= {
            f"{theirs}.self_attn.q_proj.weight": to_half_pairs(parts[0], size),
            f"{theirs}.self_attn.k_proj.weight": to_half_pairs(parts[1], size),
            f"{theirs}.self_attn.v_proj.weight": parts[2],
            f"{theirs}.self_attn.o_proj.weight": state[f"{own}.attention.output.weight"],
            f"{theirs}.mlp.gate.weight": state[f"{own}.feed_forward.router.weight"],
            f"{theirs}.mlp.experts.gate_up_proj": state[f"{own}.feed_forward.up"],
            f"{theirs}.mlp.experts.down_proj": state[f"{own}.feed_forward.down"],
            f"{theirs}.input_layernorm.weight": state[f"{own}.attention_norm.weight"],
            f"{theirs}.post_attention_layernorm.weight": state[f"{own}.feed_forward_norm.weight"],
        }
    return named
