"""Switch: softmax over the experts, and the most probable of them."""

from __future__ import annotations

from torch import Tensor

from shoal.models.routers.base import LearnedRouter, Routes, gates_for, top_experts


class SwitchRouter(LearnedRouter):
    def forward(self, x_TD: Tensor, input_ids_T: Tensor) -> Routes:
        logits_TE = self.logits(x_TD)
        probabilities_TE = logits_TE.softmax(1)
        experts_TK = top_experts(probabilities_TE, self.per_token)
        return Routes(experts_TK, gates_for(probabilities_TE, experts_TK), None, probabilities_TE, logits_TE)
