"""A decoder-only transformer.

Shapes: B batch, L tokens, S tokens seen (L and those in the cache), D width, N all heads of a projection, H query heads,
K key and value heads, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config import Run
from shoal.config.data_shapes import DataShapes, vocab_size_for
from shoal.config.schema import model as schema
from shoal.models.generation.kv_cache import LayerCache
from shoal.models.kernels import HAS_TRITON
from shoal.models.layers.documents import attend_inside
from shoal.models.layers.rotary import rotate, turns_in_one_pass
from shoal.models.layers.swiglu import swiglu
from shoal.models.transformer import PLAIN, BlockPart, LayerInputs, RmsNorm, SideOutputs, Trunk, Variant


class Attention(BlockPart):
    """Causal self-attention, with grouped queries where `num_kv_heads` is set."""

    def __init__(self, settings: schema.Transformer, weights_dropout: float, variant: Variant = PLAIN) -> None:
        """`weights_dropout`: the share of attention weights that are dropped while training."""
        super().__init__()
        self.dropout, self.weights_dropout = settings.dropout, weights_dropout
        self.query_heads = settings.num_heads
        self.kv_heads = settings.num_kv_heads or settings.num_heads
        self.head_size = variant.head_size or settings.hidden_size // settings.num_heads
        all_heads = self.query_heads + 2 * self.kv_heads
        biased = settings.bias or variant.biased_heads
        self.query_key_value = nn.Linear(settings.hidden_size, all_heads * self.head_size, bias=biased)
        self.output = nn.Linear(self.query_heads * self.head_size, settings.hidden_size, bias=settings.bias)
        self.norms_width = settings.qk_norm == "width"
        normed = (self.query_heads, self.kv_heads) if self.norms_width else (1, 1)
        norms = [RmsNorm(heads * self.head_size, eps=settings.norm_eps) if settings.qk_norm != "none" else None for heads in normed]
        self.query_norm, self.key_norm = norms

    def forward(self, x_BLD: Tensor, inputs: LayerInputs, cache: LayerCache | None = None) -> tuple[Tensor, SideOutputs]:
        query_BHLE, key_BKSE, value_BKSE = self._heads(x_BLD, inputs.turns)
        dropout = self.weights_dropout if self.training else 0.0
        if cache is not None and not cache.attends:
            key_BKSE, value_BKSE = cache.append(key_BKSE, value_BKSE)
        if cache is not None and cache.attends:
            attended_BHLE = cache.attend(query_BHLE, key_BKSE, value_BKSE)
        elif inputs.documents is not None:
            attended_BHLE = attend_inside(query_BHLE, key_BKSE, value_BKSE, inputs.documents, dropout)
        elif inputs.mask is None and not inputs.causal:
            attended_BHLE = attend_one_by_one(query_BHLE, key_BKSE, value_BKSE, dropout)
        else:
            attended_BHLE = F.scaled_dot_product_attention(
                query_BHLE,
                key_BKSE,
                value_BKSE,
                attn_mask=inputs.mask,
                is_causal=inputs.causal,
                dropout_p=dropout,
                enable_gqa=self.kv_heads != self.query_heads,
            )
        attended_BHLE, outputs = self.weigh(attended_BHLE, x_BLD, inputs)
        output_BLD: Tensor = self.output(attended_BHLE.transpose(1, 2).flatten(2))
        return F.dropout(output_BLD, self.dropout, self.training), outputs

    def weigh(self, attended_BHLE: Tensor, x_BLD: Tensor, inputs: LayerInputs) -> tuple[Tensor, SideOutputs]:
        """Scale the outputs of the heads; a hook for mixtures of heads."""
        return attended_BHLE, {}

    def last_weights(self) -> list[Tensor]:
        return [self.output.weight]

    def _heads(self, x_BLD: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, heads before tokens. Without rotary positions they are views, not copies."""
        all_BLNE = self.query_key_value(x_BLD).view(*x_BLD.shape[:2], -1, self.head_size)
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = torch.split(all_BLNE, [self.query_heads, self.kv_heads, self.kv_heads], dim=2)
            query, key = _normed(query, self.query_norm, self.norms_width), _normed(key, self.key_norm, self.norms_width)
            if turns is not None:
                query, key = rotate(query, turns), rotate(key, turns)
        elif turns is not None and turns_in_one_pass(all_BLNE, turns):
            from shoal.models.kernels.rotary import turned_heads

            query, key, value = turned_heads(all_BLNE, turns, self.query_heads, self.kv_heads)
        elif turns is None:
            query, key, value = torch.split(all_BLNE, [self.query_heads, self.kv_heads, self.kv_heads], dim=2)
        else:
            turning, value = torch.split(all_BLNE, [self.query_heads + self.kv_heads, self.kv_heads], dim=2)
            query, key = torch.split(rotate(turning, turns), [self.query_heads, self.kv_heads], dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _normed(x_BLNE: Tensor, norm: RmsNorm, over_width: bool) -> Tensor:
    """Queries or keys, each head normalised by itself, or all heads together."""
    normed: Tensor = norm(x_BLNE.flatten(2)).view_as(x_BLNE) if over_width else norm(x_BLNE)
    return normed


def attend_one_by_one(query_BHLE: Tensor, key_BKSE: Tensor, value_BKSE: Tensor, dropout: float) -> Tensor:
    """The attention of each token to those up to itself. The queries are those of the last tokens."""
    grouped, found = query_BHLE.shape[1] != key_BKSE.shape[1], []
    first = key_BKSE.shape[2] - query_BHLE.shape[2] + 1
    for seen, query_BH1E in enumerate(torch.split(query_BHLE, 1, dim=2), first):
        keys_and_values = key_BKSE[:, :, :seen], value_BKSE[:, :, :seen]
        found.append(F.scaled_dot_product_attention(query_BH1E, *keys_and_values, dropout_p=dropout, enable_gqa=grouped))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


class FeedForward(BlockPart):
    """Two matrices with GELU between them, or SwiGLU with gate and content in one product."""

    def __init__(self, settings: schema.Transformer, variant: Variant = PLAIN) -> None:
        super().__init__()
        self.dropout = settings.dropout
        self.gated = settings.feed_forward == "swiglu"
        self.gelu_gate = self.gated and variant.gelu_gate
        inner = settings.intermediate_size or 4 * settings.hidden_size
        self.up = nn.Linear(settings.hidden_size, 2 * inner if self.gated else inner, bias=settings.bias)
        self.down = nn.Linear(inner, settings.hidden_size, bias=settings.bias)

    def forward(self, x_BLD: Tensor, inputs: LayerInputs, cache: LayerCache | None = None) -> tuple[Tensor, SideOutputs]:
        inner = self.up(x_BLD)
        if self.gelu_gate:
            gate, content = inner.chunk(2, dim=-1)
            inner = F.gelu(gate, approximate="tanh") * content
        elif self.gated and _learns_in_half(inner):
            from shoal.models.kernels.swiglu import plain_swiglu

            inner = plain_swiglu(inner)
        elif self.gated:
            inner = swiglu(inner)
        else:
            inner = F.gelu(inner, approximate="tanh")
        return F.dropout(self.down(inner), self.dropout, self.training), {}

    def last_weights(self) -> list[Tensor]:
        return [self.down.weight]


def _learns_in_half(x: Tensor) -> bool:
    """Whether the backward pass of SwiGLU is a kernel of its own."""
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.requires_grad


class Gpt(Trunk):
    """GPT: the same attention and feed-forward in every layer."""

    conversion: Any = None
    """How its tensors follow from those of a Hugging Face model, where it computes one: see `huggingface/as_gpt.py`."""

    def __init__(self, settings: schema.Gpt, vocab_size: int, variant: Variant = PLAIN) -> None:
        def parts(layer: int) -> tuple[BlockPart, BlockPart]:
            return Attention(settings, settings.dropout, variant), FeedForward(settings, variant)

        super().__init__(settings, vocab_size, parts, variant=variant)
        self.trains_as_it_evaluates = settings.dropout == 0

    @property
    def skips_padding(self) -> bool:
        """Whether it computes the same for padded rows and for their texts as documents of one packed row, of any length."""
        return self.reader is None and self.memory is None


def players(model: schema.Gpt, run: Run, shapes: DataShapes) -> dict[str, nn.Module]:
    return {"model": Gpt(model, vocab_size_for(model.vocab_size, shapes))}
