"""Hash routing: a fixed random table from token ids to experts. Nothing is learned, and all gates are equal.

Shapes: V vocabulary, T tokens, K experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.models.routers.base import Router, Routes


class HashRouter(Router):
    table_VK: Tensor

    def __init__(self, settings: schema.Experts, vocab_size: int) -> None:
        super().__init__(settings)
        # Drawn from the run's seed, so all processes have the same; saved, so that it stays the same
        table_VK = torch.rand(vocab_size, settings.count).topk(settings.per_token, dim=1).indices
        self.register_buffer("table_VK", table_VK)

    def forward(self, x_TD: Tensor, input_ids_T: Tensor) -> Routes:
        experts_TK = self.table_VK[input_ids_T]
        gates_TK = torch.full_like(experts_TK, 1 / self.per_token, dtype=torch.promote_types(x_TD.dtype, torch.float32))
        return Routes(experts_TK, gates_TK)
