"""The log-probabilities of tokens, as the logits of a model give them.

Shapes: R rows, V vocabulary, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.models.generation.decoding import NotFiniteError, finite_rows
from shoal.serve.batching.generation_job import GeneratedToken, PromptCollector, TokenLogprob

_ROWS_AT_ONCE = 64
"""Rows whose probabilities are computed together, which bounds their memory."""


class PromptLogprobs(PromptCollector):
    """The log-probability of each token of a prompt after those before it, and of the likeliest tokens there. The first has none."""

    output = "logits"

    def __init__(self, ids: Sequence[int], count: int) -> None:
        """`count`: how many likely tokens are reported."""
        self.ids, self.count = ids, count
        self.found = [GeneratedToken(ids[0])]

    def add(self, values_LX: Tensor) -> None:
        if not finite_rows(values_LX).all():
            raise NotFiniteError
        for logits_RV in torch.split(values_LX, _ROWS_AT_ONCE):
            tokens = self.ids[len(self.found) : len(self.found) + len(logits_RV)]  # after the last token of the prompt comes none
            self.found += with_logprobs(logits_RV[: len(tokens)], tokens, self.count)


def with_logprobs(logits_RV: Tensor, tokens: Sequence[int], count: int) -> list[GeneratedToken]:
    """Each token with its log-probability, and those of the `count` likeliest tokens."""
    logprobs_RV = logits_RV.double().log_softmax(-1)
    own = logprobs_RV.gather(1, torch.tensor(tokens, device=logits_RV.device, dtype=torch.long)[:, None])[:, 0].tolist()
    best = logprobs_RV.topk(min(count, logprobs_RV.shape[1]))
    rows = zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [GeneratedToken(token, logprob, tuple(map(TokenLogprob, ids, values))) for token, logprob, ids, values in rows]
