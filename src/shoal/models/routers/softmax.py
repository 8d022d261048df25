"""Routers that choose by the probabilities of the experts, or by their sigmoid scores."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.routers.base import LearnedRouter, Routes, top_experts


class SwitchRouter(LearnedRouter):
    """The most probable experts."""

    def forward(self, x_TD: Tensor, input_ids_T: Tensor) -> Routes:
        logits_TE = self.logits(x_TD)
        scores_TE, probabilities_TE = self.scores(logits_TE)
        experts_TK = top_experts(scores_TE, self.per_token)
        return Routes(experts_TK, self.gates(scores_TE, experts_TK), None, probabilities_TE, logits_TE)


class StochasticRouter(LearnedRouter):
    """Experts sampled without replacement by their probabilities: top-k of the logits with Gumbel noise. Gates are computed without noise,
    and in evaluation so is the choice."""

    def forward(self, x_TD: Tensor, input_ids_T: Tensor) -> Routes:
        logits_TE = self.logits(x_TD)
        probabilities_TE = logits_TE.softmax(1)
        scores_TE = logits_TE.detach()
        if self.training:
            # −log of an exponential draw is a Gumbel draw
            scores_TE = scores_TE - torch.empty_like(scores_TE).exponential_().log()
        experts_TK = top_experts(scores_TE, self.per_token)
        return Routes(experts_TK, self.gates(probabilities_TE, experts_TK), None, probabilities_TE, logits_TE)


class GshardRouter(LearnedRouter):
    """The two most probable experts. In training the second is used with twice the probability of its gate, so a weak one seldom costs
    anything. The gate of the first does not depend on whether the second is used."""

    def forward(self, x_TD: Tensor, input_ids_T: Tensor) -> Routes:
        logits_TE = self.logits(x_TD)
        probabilities_TE = logits_TE.softmax(1)
        experts_TK = top_experts(probabilities_TE, 2)
        gates_TK = self.gates(probabilities_TE, experts_TK)
        taken_TK = None
        if self.training:
            second_T = torch.rand_like(gates_TK[:, 1]) < 2 * gates_TK[:, 1].detach()
            taken_TK = torch.stack([torch.ones_like(second_T), second_T], dim=1)
        return Routes(experts_TK, gates_TK, taken_TK, probabilities_TE, logits_TE)
