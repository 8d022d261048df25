"""Mixture of heads: each token uses a routed share of the attention heads.

Shapes: B batch, L tokens, D width, H heads, R routed heads, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.gpt import Attention
from shoal.models.transformer import PLAIN, FullPrecisionLinear, LayerInputs, SideOutputs, Variant


class MixtureOfHeads(Attention):
    """The first heads are active for every token; a router chooses some of the others. All heads are computed and their outputs gated, so
    this changes what is learned and saves no time.

    The gates of the chosen heads are their probabilities, normalised and times their number: equal probabilities give gates of 1.
    """

    def __init__(self, settings: schema.Moe, variant: Variant = PLAIN) -> None:
        super().__init__(settings, settings.attention_dropout, variant)
        heads, mixture = settings.num_heads, settings.mixture_of_heads
        self.shared = max(1, heads // 4) if mixture.shared_heads is None else mixture.shared_heads
        self.routed = heads - self.shared
        self.chosen = round(mixture.active_share * heads) - self.shared
        if self.shared >= heads or self.chosen < 1:
            raise ShoalError(
                f"model.mixture_of_heads: {mixture.active_share:.0%} of {heads} heads, of which {self.shared} are active for every token, "
                "leave none to choose: raise active_share, or lower shared_heads"
            )
        self.router = FullPrecisionLinear(settings.hidden_size, self.routed, bias=False)

    def weigh(self, attended_BHLE: Tensor, x_BLD: Tensor, inputs: LayerInputs) -> tuple[Tensor, SideOutputs]:
        with torch.autocast(x_BLD.device.type, enabled=False):
            probability_BLR = self.router(x_BLD.to(self.router.weight.dtype)).float().softmax(-1)
        top = probability_BLR.topk(self.chosen, dim=-1)
        chosen = top.values / top.values.sum(-1, keepdim=True) * self.chosen
        gates_BLR = torch.zeros_like(probability_BLR).scatter(-1, top.indices, chosen)
        gates_BHL = torch.cat([torch.ones_like(gates_BLR[..., :1]).expand(-1, -1, self.shared), gates_BLR], dim=-1).transpose(1, 2)
        weighed_BHLE = attended_BHLE * gates_BHL.unsqueeze(-1).to(attended_BHLE.dtype)
        return weighed_BHLE, self._choices(probability_BLR, top.indices, inputs.counted_BL)

    def _choices(self, probability_BLR: Tensor, chosen: Tensor, counted_BL: Tensor | None) -> SideOutputs:
        """How often each routed head was chosen by tokens that count, and its mean probability, for the balance loss."""
        if counted_BL is None:
            return {}
        chosen_BLCR = chosen.unsqueeze(-1) == torch.arange(self.routed, device=chosen.device)
        load_R = (chosen_BLCR & counted_BL[..., None, None]).sum((0, 1, 2)).float()
        mean_R = (probability_BLR * counted_BL.unsqueeze(-1)).sum((0, 1)) / counted_BL.sum().clamp(min=1)
        return {"head_load_R": load_R, "head_probability_R": mean_R}
