"""Sigmoid scores with a bias per expert for balancing (auxiliary-loss-free). Experts are chosen by score + bias; the gates are the scores
alone. The bias gets no gradient: after each step it decreases for overloaded experts and increases for the others by a fixed amount.

Shapes: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.models.routers.base import HeldExperts, LearnedRouter, Routes, top_experts

BOUND = 1.0
"""Scores lie between 0 and 1: biases further apart than this on either side of 0 would change nothing."""


class SigmoidBiasRouter(LearnedRouter):
    usual_scores = "sigmoid"
    bias_E: Tensor

    def __init__(self, settings: schema.Experts, width: int, held: HeldExperts = None) -> None:
        super().__init__(settings, width, held)
        self.step = settings.bias_step
        self.register_buffer("bias_E", torch.zeros(settings.count))

    def forward(self, x_TD: Tensor, input_ids_T: Tensor) -> Routes:
        logits_TE = self.logits(x_TD)
        scores_TE, shares_TE = self.scores(logits_TE)
        bias_E = self.bias_E if self.held is None else self.bias_E[self.held]
        experts_TK = top_experts(scores_TE.detach() + bias_E, self.per_token)
        return Routes(experts_TK, self.gates(scores_TE, experts_TK), None, shares_TE, logits_TE)

    def movement(self, load_E: Tensor) -> Tensor:
        """The bias movement of a step with these loads; 0 for experts that this worker does not hold."""
        movement_E = torch.zeros_like(self.bias_E)
        movement_E[slice(None) if self.held is None else self.held] = self.step * torch.sign(load_E.mean() - load_E).to(self.bias_E)
        return movement_E

    def shift(self, movement_E: Tensor) -> None:
        self.bias_E.add_(movement_E.to(self.bias_E)).clamp_(-BOUND, BOUND)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A conversion to half precision would round the biases, which move in small steps
        before = self.bias_E
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.bias_E.dtype in (torch.float16, torch.bfloat16):
            self.bias_E = before.to(self.bias_E.device)
        return self
