"""A small GPT as PyTorch's own parts make it, for peers that bring no model."""

from __future__ import annotations

from torch import Tensor, nn


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        hidden_BLE = self.symbols(tokens_BL) + self.places.weight
        return self.layers(hidden_BLE, mask=self.mask, is_causal=True) @ self.symbols.weight.T
