"""A decoder-only transformer.

Shapes: B batch, L tokens, S tokens seen (L and those in the cache), D width, N all heads of a projection, H query heads,
K key and value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.config import Run
from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.cache import KeyValueCache, LayerCache
from shoal.models.rotary import Rotary, rotate
from shoal.models.shapes import Shapes, vocab_size_for

INITIAL_STD = 0.02


class Sight(NamedTuple):
    """Which tokens see which, the same in every layer."""

    turns: Tensor | None
    """Of rotary positions."""
    mask: Tensor | None
    """True where a token sees another, [L, S] or [B, 1, L, S]; null: what `causal` says."""
    causal: bool


class Attention(nn.Module):
    """Causal self-attention with fewer key and value heads where told."""

    def __init__(self, settings: schema.Gpt) -> None:
        super().__init__()
        self.dropout = settings.dropout
        self.query_heads = settings.num_heads
        self.kv_heads = settings.num_kv_heads or settings.num_heads
        self.head_size = settings.hidden_size // settings.num_heads
        all_heads = self.query_heads + 2 * self.kv_heads
        self.query_key_value = nn.Linear(settings.hidden_size, all_heads * self.head_size, bias=settings.bias)
        self.output = nn.Linear(settings.hidden_size, settings.hidden_size, bias=settings.bias)

    def forward(self, x_BLD: Tensor, sight: Sight, cache: LayerCache | None = None) -> Tensor:
        query_BHLE, key_BKSE, value_BKSE = self._heads(x_BLD, sight.turns)
        if cache is not None:
            key_BKSE, value_BKSE = cache.append(key_BKSE, value_BKSE)
        attended_BHLE = F.scaled_dot_product_attention(
            query_BHLE,
            key_BKSE,
            value_BKSE,
            attn_mask=sight.mask,
            is_causal=sight.causal,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.kv_heads != self.query_heads,
        )
        output_BLD: Tensor = self.output(attended_BHLE.transpose(1, 2).flatten(2))
        return F.dropout(output_BLD, self.dropout, self.training)

    def _heads(self, x_BLD: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, heads before tokens; views, not copies."""
        all_BLNE = self.query_key_value(x_BLD).view(*x_BLD.shape[:2], -1, self.head_size)
        if turns is None:
            query, key, value = torch.split(all_BLNE, [self.query_heads, self.kv_heads, self.kv_heads], dim=2)
        else:
            turning, value = torch.split(all_BLNE, [self.query_heads + self.kv_heads, self.kv_heads], dim=2)
            query, key = torch.split(rotate(turning, turns), [self.query_heads, self.kv_heads], dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


class FeedForward(nn.Module):
    """Two matrices with GELU between them, or SwiGLU, whose gate and content are one product."""

    def __init__(self, settings: schema.Gpt) -> None:
        super().__init__()
        self.dropout = settings.dropout
        self.gated = settings.feed_forward == "swiglu"
        inner = settings.intermediate_size or 4 * settings.hidden_size
        self.up = nn.Linear(settings.hidden_size, 2 * inner if self.gated else inner, bias=settings.bias)
        self.down = nn.Linear(inner, settings.hidden_size, bias=settings.bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        inner = self.up(x_BLD)
        if self.gated:
            gate, content = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * content
        else:
            inner = F.gelu(inner, approximate="tanh")
        return F.dropout(self.down(inner), self.dropout, self.training)


class Block(nn.Module):
    """Attention and feed-forward, each after a normalisation and added to the stream."""

    def __init__(self, settings: schema.Gpt) -> None:
        super().__init__()
        self.attention_norm = _norm(settings)
        self.attention = Attention(settings)
        self.feed_forward_norm = _norm(settings)
        self.feed_forward = FeedForward(settings)

    def forward(self, x_BLD: Tensor, sight: Sight, cache: LayerCache | None = None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), sight, cache)
        added: Tensor = x_BLD + self.feed_forward(self.feed_forward_norm(x_BLD))
        return added


class Gpt(nn.Module):
    """The language model: embeddings, blocks, a last normalisation, the output matrix."""

    def __init__(self, settings: schema.Gpt, vocab_size: int) -> None:
        super().__init__()
        width = settings.hidden_size
        self.vocab_size, self.max_seq_len, self.dropout = vocab_size, settings.max_seq_len, settings.dropout
        self.checkpointing = False
        self.token_embedding = nn.Embedding(vocab_size, width)
        learned = settings.positions == "learned"
        self.position_embedding = nn.Embedding(settings.max_seq_len, width) if learned else None
        self.rotary = None if learned else Rotary(settings.max_seq_len, _rotary_head_size(settings))
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.num_layers))
        self.norm = _norm(settings)
        self.output = None if settings.tied_embeddings else nn.Linear(width, vocab_size, bias=False)
        self._initialise()

    def forward(self, input_ids_BL: Tensor, *, cache: KeyValueCache | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, L, V]. `attention_mask` [B, S] is 0 at padding, on either side, the tokens in the cache counted."""
        return F.linear(self.hidden(input_ids_BL, cache=cache, attention_mask=attention_mask), self.output_weight)

    def hidden(self, input_ids_BL: Tensor, *, cache: KeyValueCache | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """What the output matrix reads: logits = hidden @ output_weight.T."""
        past, length = cache.length if cache else 0, input_ids_BL.shape[1]
        if past + length > self.max_seq_len:
            raise ShoalError(f"a sequence of {past + length} tokens does not fit the model (model.max_seq_len: {self.max_seq_len})")
        x_BLD = self._embed(input_ids_BL, past, attention_mask)
        turns = self.rotary(past, length) if self.rotary is not None else None
        sight = _sight(turns, past, length, attention_mask, x_BLD.device)
        for i, block in enumerate(self.blocks):
            if self.checkpointing and cache is None and torch.is_grad_enabled():
                x_BLD = checkpoint(block, x_BLD, sight, use_reentrant=False)
            else:
                x_BLD = block(x_BLD, sight, cache.layers[i] if cache else None)
        hidden_BLD: Tensor = self.norm(x_BLD)
        return hidden_BLD

    def _embed(self, input_ids_BL: Tensor, past: int, attention_mask: Tensor | None) -> Tensor:
        x_BLD: Tensor = self.token_embedding(input_ids_BL)
        if self.position_embedding is not None and attention_mask is None:
            x_BLD = x_BLD + self.position_embedding.weight[past : past + input_ids_BL.shape[1]]
        elif self.position_embedding is not None and attention_mask is not None:
            # Counted from the first real token, so that padding on the left changes nothing
            positions_BS = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
            x_BLD = x_BLD + self.position_embedding(positions_BS[:, past:])
        if torch.is_autocast_enabled(x_BLD.device.type):
            # The stream between the blocks is read and written more than anything else: half the bytes
            x_BLD = x_BLD.to(torch.get_autocast_dtype(x_BLD.device.type))
        return F.dropout(x_BLD, self.dropout, self.training)

    @property
    def output_weight(self) -> Tensor:
        return self.token_embedding.weight if self.output is None else self.output.weight

    def gradient_checkpointing(self, enabled: bool) -> None:
        """Whether the backward pass computes each block's activations again instead of keeping them."""
        self.checkpointing = enabled

    def new_cache(self, capacity: int) -> KeyValueCache:
        """Room for the keys and values of so many tokens."""
        return KeyValueCache(len(self.blocks), capacity)

    def next_logits(self, input_ids_BL: Tensor, cache: KeyValueCache) -> Tensor:
        """Logits [B, V] of the token after these, which the cache then holds too."""
        return F.linear(self.hidden(input_ids_BL, cache=cache)[:, -1], self.output_weight)

    def _initialise(self) -> None:
        """As GPT-2: what is added to the stream starts smaller, the more layers add to it."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Block):
                for added in (module.attention.output, module.feed_forward.down):
                    nn.init.normal_(added.weight, std=INITIAL_STD / math.sqrt(2 * len(self.blocks)))


def players(model: schema.Gpt, run: Run, shapes: Shapes) -> dict[str, nn.Module]:
    return {"model": Gpt(model, vocab_size_for(model.vocab_size, shapes))}


class RmsNorm(nn.RMSNorm):
    """In half precision torch's fused kernel wants the weight in the type of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def _norm(settings: schema.Gpt) -> nn.Module:
    """RMSNorm has no bias to begin with."""
    if settings.norm == "rms":
        return RmsNorm(settings.hidden_size, eps=settings.norm_eps)
    return nn.LayerNorm(settings.hidden_size, eps=settings.norm_eps, bias=settings.bias)


def _rotary_head_size(settings: schema.Gpt) -> int:
    size = settings.hidden_size // settings.num_heads
    if size % 2:
        raise ShoalError(
            f"rotary positions turn pairs, but a head has {size} numbers (model.hidden_size {settings.hidden_size} / "
            f"model.num_heads {settings.num_heads}); choose sizes with an even quotient, or model.positions: learned"
        )
    return size


def _sight(turns: Tensor | None, past: int, length: int, attention_mask: Tensor | None, device: torch.device) -> Sight:
    """No mask where the kernel's own causal one will do, nor where one token sees all before it."""
    if attention_mask is None and (past == 0 or length == 1):
        return Sight(turns, None, causal=past == 0)
    seen_LS = torch.ones(length, past + length, dtype=torch.bool, device=device).tril(past)
    if attention_mask is None:
        return Sight(turns, seen_LS, causal=False)
    # Padding sees itself: a row that sees nothing would give NaN
    itself_LS = seen_LS.triu(past)
    return Sight(turns, (seen_LS & attention_mask.bool()[:, None, None, :]) | itself_LS, causal=False)
