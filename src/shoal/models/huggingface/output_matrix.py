"""The output matrix of a model of transformers, where its logits are the product of the last hidden states with one.

Some models scale, cap or shift their logits. Whether an architecture does is tested with a small random copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.huggingface.frozen_weights import FrozenLinear
from shoal.models.huggingface.small_copy import small_copy

_TOLERANCE = 1e-5
_PLAIN: dict[str, bool] = {}


def gives_product(inner: Any) -> bool:
    """Whether logits are that product, no adapter changes them, and the matrix is whole in this process."""
    head = inner.get_output_embeddings()
    if type(head) not in (nn.Linear, FrozenLinear) or head.bias is not None:
        return False
    if type(head) is nn.Linear and type(head.weight) not in (Tensor, nn.Parameter):
        return False
    key = f"{type(inner).__name__} {inner.config.to_json_string()}"
    if key not in _PLAIN:
        _PLAIN[key] = _is_plain_product(inner.config)
    return _PLAIN[key]


@torch.no_grad()
def _is_plain_product(config: Any) -> bool:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        small, ids = small_copy(config), torch.tensor([[3, 1, 4, 1]])
        logits, hidden = small(input_ids=ids).logits, small.get_decoder()(input_ids=ids).last_hidden_state
        product = hidden @ small.get_output_embeddings().weight.T
    return product.shape == logits.shape and bool((product - logits).abs().max() <= _TOLERANCE * logits.abs().max())
