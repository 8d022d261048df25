"""Experts sampled without replacement by their probabilities: top-k of the logits with Gumbel noise. Gates are computed without noise, and
in evaluation so is the choice."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.routers.base import LearnedRouter, Routes, gates_for, top_experts


class StochasticRouter(LearnedRouter):
    def forward(self, x_TD: Tensor, input_ids_T: Tensor) -> Routes:
        logits_TE = self.logits(x_TD)
        probabilities_TE = logits_TE.softmax(1)
        scores_TE = logits_TE.detach()
        if self.training:
            # −log of an exponential draw is a Gumbel draw
            scores_TE = scores_TE - torch.empty_like(scores_TE).exponential_().log()
        experts_TK = top_experts(scores_TE, self.per_token)
        return Routes(experts_TK, gates_for(probabilities_TE, experts_TK), None, probabilities_TE, logits_TE)
