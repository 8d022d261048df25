"""The interface of routers, and what learned routers share. Everything is computed in float32 or wider.

A worker may hold only some of the experts: then its routers choose among these, numbered 0, 1, … locally.

Shapes: T tokens, D width, E experts (those that are held, but in the weights), K experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.models.transformer import INITIAL_STD

HeldExperts = tuple[int, ...] | None
"""The numbers of the experts that a worker holds; None: all of them."""
_MOST_BY_TURNS = 4
"""Up to this many experts per token are found by repeated argmax; more by topk."""


class Routes(NamedTuple):
    """The experts of each token and their gates."""

    experts_TK: Tensor
    gates_TK: Tensor
    taken_TK: Tensor | None = None
    """False where a chosen route is not taken; None: all are taken."""
    probabilities_TE: Tensor | None = None
    """Input of the balance loss; None: the router is not learned."""
    logits_TE: Tensor | None = None


class Router(nn.Module):
    """Chooses experts for tokens."""

    def __init__(self, settings: schema.Experts) -> None:
        super().__init__()
        self.count, self.per_token = settings.count, settings.per_token

    def forward(self, x_TD: Tensor, input_ids_T: Tensor) -> Routes:
        raise NotImplementedError

    def initialise(self, std: float) -> None:
        """Draw the weights, where the router has some."""


class LearnedRouter(Router):
    """Linear router: a row of weights for each expert, held or not."""

    full_precision = True
    """Engines that round the parameters of other modules for mixed precision leave these as they are."""
    usual_scores = "softmax"

    def __init__(self, settings: schema.Experts, width: int, held: HeldExperts = None) -> None:
        super().__init__(settings)
        self.held = None if held is None else list(held)
        self.sigmoid = (settings.scores or self.usual_scores) == "sigmoid"
        self.normalises = settings.per_token > 1 if settings.normalise_gates is None else settings.normalise_gates
        self.weight = nn.Parameter(torch.empty(settings.count, width))
        self.initialise(INITIAL_STD)

    def initialise(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)

    def logits(self, x_TD: Tensor) -> Tensor:
        with torch.autocast(x_TD.device.type, enabled=False):
            wide = torch.promote_types(x_TD.dtype, torch.float32)
            weight_ED = self.weight if self.held is None else self.weight[self.held]
            return F.linear(x_TD.to(wide), weight_ED.to(wide))

    def scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The scores that become gates, and the probabilities for the balance loss, which add up to 1."""
        if not self.sigmoid:
            probabilities_TE = logits_TE.softmax(1)
            return probabilities_TE, probabilities_TE
        scores_TE = logits_TE.sigmoid()
        return scores_TE, scores_TE / scores_TE.sum(1, keepdim=True)

    def gates(self, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The scores of the chosen experts, normalised where the settings say so."""
        chosen_TK = scores_TE.gather(1, experts_TK)
        return chosen_TK / chosen_TK.sum(1, keepdim=True).clamp(min=1e-20) if self.normalises else chosen_TK


def top_experts(scores_TE: Tensor, count: int) -> Tensor:
    """The experts with the highest scores of each token [T, K], best first. Compiled, argmax fuses with the computation of the scores and
    takes 2 µs for two of 16 experts and 16,384 tokens on an H200; `topk` and its sort take 40."""
    if not torch.compiler.is_compiling() or count > _MOST_BY_TURNS:
        return scores_TE.topk(count, dim=1).indices
    found: list[Tensor] = []
    scores_TE, places_E = scores_TE.detach(), torch.arange(scores_TE.shape[1], device=scores_TE.device)
    for _ in range(count):
        found.append(scores_TE.argmax(1, keepdim=True))
        scores_TE = scores_TE.masked_fill(places_E == found[-1], -torch.inf)
    return torch.cat(found, 1)
