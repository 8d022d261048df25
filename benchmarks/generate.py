"""Greedy generation with a KV cache against Hugging Face `generate` on the same weights: tokens/s, and the tokens themselves.

The weights are stories15M (../shared/data/lm) where they are there, else random ones of the same size.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from run import Row

from shoal.config.schema.model import Gpt as Settings
from shoal.config.schema.serving import Decoding
from shoal.models import generate
from shoal.models.gpt import Gpt

ROOT = Path(__file__).parents[1]
STORIES = ROOT.parent / "shared" / "data" / "lm"
TOKENS, ROUNDS = 200, 5


def our_model() -> Gpt:
    if STORIES.is_dir():
        from story_models import load_story_model

        return load_story_model(STORIES, "stories15M")[0].eval()
    sizes = {"hidden_size": 288, "num_layers": 6, "num_heads": 6, "intermediate_size": 768, "max_seq_len": 256}
    styles = {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms", "bias": False}
    return Gpt(Settings(vocab_size=32000, **sizes, **styles), 32000).eval()


def the_same_for_hugging_face(model: Gpt) -> torch.nn.Module:
    """A LlamaForCausalLM with the same weights; its rotary halves are our pairs, so rows of queries and keys move."""
    from transformers import LlamaConfig, LlamaForCausalLM

    block = model.blocks[0]
    heads, size = block.attention.query_heads, block.attention.head_size
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=heads * size,
        intermediate_size=block.feed_forward.down.in_features,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=heads,
        num_key_value_heads=block.attention.kv_heads,
        max_position_embeddings=model.max_seq_len,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    peer = LlamaForCausalLM(config).eval()

    def halves(weight: torch.Tensor, count: int) -> torch.Tensor:
        return weight.view(count, size // 2, 2, -1).transpose(1, 2).reshape(count * size, -1)

    state = {"model.embed_tokens.weight": model.token_embedding.weight, "model.norm.weight": model.norm.weight}
    for i, block in enumerate(model.blocks):
        kv = block.attention.kv_heads
        query, key, value = block.attention.query_key_value.weight.split([heads * size, kv * size, kv * size])
        gate, up = block.feed_forward.up.weight.chunk(2)
        state |= {
            f"model.layers.{i}.self_attn.q_proj.weight": halves(query, heads),
            f"model.layers.{i}.self_attn.k_proj.weight": halves(key, kv),
            f"model.layers.{i}.self_attn.v_proj.weight": value,
            f"model.layers.{i}.self_attn.o_proj.weight": block.attention.output.weight,
            f"model.layers.{i}.mlp.gate_proj.weight": gate,
            f"model.layers.{i}.mlp.up_proj.weight": up,
            f"model.layers.{i}.mlp.down_proj.weight": block.feed_forward.down.weight,
            f"model.layers.{i}.input_layernorm.weight": block.attention_norm.weight,
            f"model.layers.{i}.post_attention_layernorm.weight": block.feed_forward_norm.weight,
        }
    peer.load_state_dict({**peer.state_dict(), **state, "lm_head.weight": model.token_embedding.weight})
    return peer


def measure() -> list[Row]:
    model = our_model()
    peer = the_same_for_hugging_face(model)
    prompt = torch.tensor([[1, 9038, 2501, 263, 931]])
    greedy = Decoding(active="greedy")

    def ours() -> list[int]:
        return [int(token) for token in generate(model, prompt, max_new_tokens=TOKENS, decoding=greedy)]

    def theirs() -> list[int]:
        with torch.no_grad():
            ids = peer.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        return ids[0, prompt.shape[1] :].tolist()

    same = ours() == theirs()
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(ROUNDS):
        for name, side in (("ours", ours), ("theirs", theirs)):
            start = time.perf_counter()
            side()
            rates[name].append(TOKENS / (time.perf_counter() - start))
    left, right = statistics.median(rates["ours"]), statistics.median(rates["theirs"])
    note = "identical tokens" if same else "THE TOKENS DIFFER"
    return [Row("generate, 15M parameters", left, right, "tokens/s", left / right, "≥ 1.0", note)]
