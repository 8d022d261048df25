"""Multi-token prediction as in DeepSeek-V3: one more block predicts the token after the next one, with the embedding and the output matrix
of the model. It adds a loss in training; exports and servers leave it out.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.models.gpt import Attention, FeedForward
from shoal.models.layers.recompute import recomputed
from shoal.models.transformer import Block, LayerInputs, Variant, initialise, norm


class MultiTokenHead(nn.Module):
    """Joins the last residual stream of each token with the embedding of the next token, and computes a block with dense feed-forward."""

    def __init__(self, settings: schema.Moe, variant: Variant) -> None:
        super().__init__()
        self.weight = settings.mtp.loss_weight
        self.stream_norm, self.embedding_norm = norm(settings, variant), norm(settings, variant)
        self.join = nn.Linear(2 * settings.hidden_size, settings.hidden_size, bias=False)
        self.block = Block(settings, Attention(settings, settings.attention_dropout, variant), FeedForward(settings, variant), variant)
        self.norm = norm(settings, variant)
        initialise(self, settings.initializer_range, settings.initializer_range / math.sqrt(2 * settings.num_layers))

    def forward(self, embedded_BLD: Tensor, x_BLD: Tensor, inputs: LayerInputs, recomputes: bool) -> Tensor:
        """Input of the output matrix for the token after the next. The last token of a row has no next one: its vector means nothing."""
        next_BLD = torch.cat([embedded_BLD[:, 1:], embedded_BLD[:, -1:]], dim=1)
        joined_BLD = self.join(torch.cat([self.stream_norm(x_BLD), self.embedding_norm(next_BLD)], dim=-1)).to(x_BLD.dtype)
        through_BLD, _ = recomputed(self.block, self.block, joined_BLD, inputs) if recomputes else self.block(joined_BLD, inputs)
        ahead_BLD: Tensor = self.norm(through_BLD)
        return ahead_BLD
