"""How the next token is chosen from the logits.

Shapes: B batch, V vocabulary, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.config.schema.serving import Decoding, Sampling, TopK, TopKTopP, TopP
from shoal.errors import ShoalError


def choose(logits_BV: Tensor, decoding: Decoding, generator: torch.Generator | None = None) -> Tensor:
    """The next token ids [B] in the way that is active. A temperature of 0 is greedy in every way."""
    best_B1 = logits_BV.amax(-1, keepdim=True)
    if not best_B1.isfinite().all():
        raise ShoalError("the model's logits are not finite: its weights are damaged, or its training diverged; use an earlier checkpoint")
    way = getattr(decoding, decoding.active)
    if decoding.active == "greedy" or way.temperature == 0:
        return logits_BV.argmax(-1)
    # Relative to the best, so that no temperature is too small to divide by
    probabilities_BC, ids_BC = candidates((logits_BV - best_B1) / way.temperature, way)
    drawn_B1 = _draw(probabilities_BC, generator)
    return (drawn_B1 if ids_BC is None else ids_BC.gather(1, drawn_B1)).squeeze(1)


def candidates(scores_BV: Tensor, way: Sampling | TopK | TopP | TopKTopP) -> tuple[Tensor, Tensor | None]:
    """The probabilities of the tokens in question, and their ids; null: all tokens, in order."""
    scores_BC, ids_BC = scores_BV.to(torch.promote_types(scores_BV.dtype, torch.float32)), None
    if isinstance(way, TopK | TopKTopP):
        scores_BC, ids_BC = scores_BC.topk(min(way.k, scores_BC.shape[-1]))
    elif isinstance(way, TopP):
        scores_BC, ids_BC = scores_BC.sort(descending=True)
    probabilities_BC = scores_BC.softmax(-1)
    if isinstance(way, TopP | TopKTopP) and way.p < 1:
        # A token is in while those before it have not reached p
        before_BC = probabilities_BC.cumsum(-1) - probabilities_BC
        probabilities_BC = probabilities_BC.masked_fill(before_BC >= way.p, 0.0)
        probabilities_BC = probabilities_BC / probabilities_BC.sum(-1, keepdim=True)
    return probabilities_BC, ids_BC


def _draw(probabilities_BC: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index a row, drawn where the generator lives."""
    if generator is None:
        return probabilities_BC.multinomial(1)
    return probabilities_BC.to(generator.device).multinomial(1, generator=generator).to(probabilities_BC.device)
