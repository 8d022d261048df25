"""Cross-attention to texts beside the input, which are encoded once.

All texts of a sequence are one row of vectors, each with the first position that may attend to it: a text's own context from the first
token on, a retrieved passage after the chunk that found it.

Shapes: B batch, L tokens, D width, H heads, E head size, P texts beside a sequence, M tokens of each, C vectors to read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.models.generation.kv_cache import LayerCache
from shoal.models.gpt import Attention, FeedForward
from shoal.models.layers.rotary import Rotary
from shoal.models.transformer import NEVER, Block, BlockPart, EncodedContext, LayerInputs, SideOutputs, norm


class ContextEncoder(nn.Module):
    """Bidirectional encoder; texts do not attend to each other."""

    def __init__(self, settings: schema.Moe) -> None:
        super().__init__()
        plain = settings.replace(positions="rotary", num_kv_heads=None)
        self.longest = max(settings.max_seq_len, settings.retrieval.passage_tokens)
        self.rotary = Rotary(self.longest, settings.hidden_size // settings.num_heads)
        layers = range(settings.cross_attention.encoder_layers)
        self.blocks = nn.ModuleList(Block(plain, Attention(plain, settings.attention_dropout), FeedForward(plain)) for _ in layers)
        self.norm = norm(plain)

    def forward(self, x_NMD: Tensor, mask_NM: Tensor) -> Tensor:
        """Hidden states of texts. Padding is attended to by itself only."""
        itself_MM = torch.eye(mask_NM.shape[1], dtype=torch.bool, device=mask_NM.device)
        inputs = LayerInputs(self.rotary(0, mask_NM.shape[1]), mask_NM[:, None, None, :] | itself_MM, False, mask_NM)
        for block in self.blocks:
            x_NMD, _ = block(x_NMD, inputs)
        return self.norm(x_NMD)

    def read_nothing(self, input_ids_BL: Tensor, embedding: nn.Embedding) -> EncodedContext:
        """An empty context: with sharded parameters every batch must run the same modules."""
        return self.read({"context_ids": torch.full_like(input_ids_BL[:, :1], -1).unsqueeze(1)}, embedding)

    def read(self, columns: dict[str, Tensor], embedding: nn.Embedding) -> EncodedContext:
        """Encode all texts beside a batch as one context."""
        states, first = [], []
        for ids_BPM, first_BP in context_texts(columns):
            ids_NM = ids_BPM[..., : self.longest].flatten(0, 1)
            mask_NM = ids_NM >= 0
            x_NMD = embedding(ids_NM.clamp(min=0))
            if torch.is_autocast_enabled(x_NMD.device.type):
                x_NMD = x_NMD.to(torch.get_autocast_dtype(x_NMD.device.type))
            states.append(self(x_NMD, mask_NM).view(len(ids_BPM), -1, x_NMD.shape[-1]))
            from_BPM = first_BP.unsqueeze(-1).expand(-1, -1, mask_NM.shape[1])
            first.append(from_BPM.flatten(1).masked_fill(~mask_NM.view(len(ids_BPM), -1), NEVER))
        return EncodedContext(torch.cat(states, dim=1), torch.cat(first, dim=1))


def context_texts(columns: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The texts in a batch's columns: ids [B, P, M], −1 where there is no token, and the first position that may read each text [B, P]."""
    if "context_ids" in columns:
        yield columns["context_ids"], torch.zeros_like(columns["context_ids"][..., 0])
    if "passage_ids" in columns:
        yield columns["passage_ids"], columns["passage_from"]


class CrossAttention(nn.Module):
    """Attention to the context and to one extra zero vector, so that a token which may read nothing gets exactly zeros."""

    def __init__(self, settings: schema.Moe) -> None:
        super().__init__()
        width = settings.hidden_size
        self.head_size = width // settings.num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x_BLD: Tensor, context: EncodedContext, past: int, cache: LayerCache | None) -> Tensor:
        query_BHLE = self._heads(self.query(x_BLD))
        key_BHCE, value_BHCE = self._keys_and_values(context, cache)
        position_L = torch.arange(past, past + x_BLD.shape[1], device=x_BLD.device)
        visible_BLC = F.pad(position_L[:, None] >= context.first_BC[:, None, :], (1, 0), value=True)
        attended_BHLE = F.scaled_dot_product_attention(query_BHLE, key_BHCE, value_BHCE, attn_mask=visible_BLC.unsqueeze(1))
        return self.output(attended_BHLE.transpose(1, 2).flatten(2))

    def _heads(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.view(*x_BLD.shape[:2], -1, self.head_size).transpose(1, 2)

    def _keys_and_values(self, context: EncodedContext, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        if cache is not None and cache.context is not None and cache.context[0] is context:
            return cache.context[1]
        if cache is not None and cache.context is not None and context.since and cache.context[0].first_BC is context.since.earlier_BC:
            rows_R = context.since.rows_R
            new = self._projected(context.states_BCD[rows_R])
            key, value = (_with_rows(*both, rows_R) for both in zip(cache.context[1], new, strict=True))
        else:
            key, value = self._projected(context.states_BCD)
        if cache is not None:
            cache.context = (context, (key, value))
        return key, value

    def _projected(self, states_BCD: Tensor) -> tuple[Tensor, Tensor]:
        key_BHCE, value_BHCE = (self._heads(one) for one in F.pad(self.key_value(states_BCD), (0, 0, 1, 0)).chunk(2, dim=-1))
        return key_BHCE, value_BHCE


def _with_rows(before_BHCE: Tensor, new_RHCE: Tensor, rows_R: Tensor) -> Tensor:
    """Keys or values with some rows replaced. Holds: contexts only grow while a text is generated, so nothing is cut off."""
    whole_BHCE = F.pad(before_BHCE, (0, 0, 0, new_RHCE.shape[2] - before_BHCE.shape[2]))
    return whole_BHCE.index_copy(0, rows_R, new_RHCE)


class WithCrossAttention(BlockPart):
    """Self-attention plus tanh(g) · cross-attention. The gate g starts at 0, where the output is exactly that of self-attention."""

    def __init__(self, attention: BlockPart, settings: schema.Moe) -> None:
        super().__init__()
        self.own = attention
        self.cross = CrossAttention(settings)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x_BLD: Tensor, inputs: LayerInputs, cache: LayerCache | None = None) -> tuple[Tensor, SideOutputs]:
        attended_BLD, outputs = self.own(x_BLD, inputs, cache)
        if inputs.context is None:
            return attended_BLD, outputs
        read_BLD = self.cross(x_BLD, inputs.context, inputs.past, cache)
        outputs = outputs if inputs.counted_BL is None else {**outputs, "cross_gate": self.gate.detach().tanh().mean()}
        return attended_BLD + self.gate.tanh().to(read_BLD.dtype) * read_BLD, outputs

    def last_weights(self) -> list[Tensor]:
        return [self.cross.output.weight]


def has_context(settings: schema.Moe) -> bool:
    """Whether a model attends to a context: given texts, retrieved passages, or episodes of its memory."""
    return bool(settings.cross_attention.enabled or settings.retrieval.enabled or settings.episodic_memory.enabled)


def attends_to_context(settings: schema.Moe, layer: int) -> bool:
    """Whether this layer has cross-attention. The last layer of a model with a context always has."""
    return has_context(settings) and (settings.num_layers - 1 - layer) % settings.cross_attention.every_layers == 0
