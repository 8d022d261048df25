"""Choosing the next token from the logits: penalties, temperature, top-k, top-p, min-p, in the order of transformers.

Random numbers are derived from the seed, the prompt, the number of the choice and the position alone, not from a shared generator. So a
request gives the same text alone, in a batch with others, and when it is repeated.

Shapes: B batch, V vocabulary, C candidates.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.config.schema.serving import Decoding
from shoal.errors import ShoalError


class Warp(NamedTuple):
    """How the distribution is changed before a token is drawn. A temperature of 0 takes the most likely token."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


class LogitPenalties(NamedTuple):
    """Penalties on the logits of tokens that occurred already, and biases of chosen tokens."""

    repetition: float = 1.0
    """Divides positive logits, and multiplies negative ones, of the tokens of the prompt and the text."""
    presence: float = 0.0
    """Subtracted once for a token that occurs in the text."""
    frequency: float = 0.0
    """Subtracted for each occurrence in the text."""
    bias: Mapping[int, float] = {}


NO_PENALTIES = LogitPenalties()


def warp_of(decoding: Decoding) -> Warp:
    settings = getattr(decoding, decoding.active)
    temperature = 0.0 if decoding.active == "greedy" else settings.temperature
    return Warp(temperature, getattr(settings, "k", None), getattr(settings, "p", None))


class TokenDraws:
    """The random numbers of a text, one for each position. Without a seed they are unpredictable."""

    def __init__(self, seed: int | None, prompt_ids: Sequence[int], choice: int = 0) -> None:
        start = secrets.token_bytes(16) if seed is None else seed.to_bytes(16, "little", signed=True)
        key = hashlib.blake2b(start, digest_size=32)
        key.update(np.asarray(prompt_ids, "<i8").tobytes())
        key.update(choice.to_bytes(8, "little"))
        self._key = key.digest()

    def at(self, position: int) -> float:
        """The number of a position, in [0, 1)."""
        word = hashlib.blake2b(position.to_bytes(8, "little"), key=self._key, digest_size=8).digest()
        return (int.from_bytes(word, "little") >> 11) * 2.0**-53


def group_draws(seed: int, first: int, prompts: Sequence[Sequence[int]], group: int) -> list[TokenDraws]:
    """The draws of `group` answers to each prompt, from the run's seed and the prompt's number; `first` is that of the first one."""
    seeds = [(seed % 2**62 << 64) + first + index for index in range(len(prompts))]
    return [TokenDraws(own, ids, choice) for own, ids in zip(seeds, prompts, strict=True) for choice in range(group)]


def row_draws(seed: int | None, prompts: Sequence[Sequence[int]]) -> list[TokenDraws]:
    """The draws of the rows of a batch. Equal prompts are different choices of one prompt; other rows do not influence a row."""
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    for prompt in map(tuple, prompts):
        found.append(TokenDraws(seed, prompt, seen[prompt]))
        seen[prompt] += 1
    return found


class TextPenalties:
    """The penalties of one text. It counts the tokens as they are written: to count a long text anew for each token takes 40 ms."""

    def __init__(self, penalties: LogitPenalties, prompt_ids: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.penalties = penalties
        self._seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        """The tokens of the prompt and the text."""
        self._seen_V[torch.tensor(prompt_ids, dtype=torch.long, device=device)] = True
        self._counts_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        """How often a token occurs in the text."""
        self._counted = 0

    def count(self, written_ids: Sequence[int]) -> None:
        """Count what was written since the last time."""
        new_N = torch.tensor(written_ids[self._counted :], dtype=torch.long, device=self._seen_V.device)
        self._counted += len(new_N)
        self._seen_V[new_N] = True
        self._counts_V.index_add_(0, new_N, torch.ones_like(new_N, dtype=torch.float64))

    def apply(self, logits_V: Tensor) -> Tensor:
        """The logits of the next token after biases and penalties, as a copy."""
        own = self.penalties
        logits_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32), copy=True)
        if own.repetition != 1.0:
            repeated_V = torch.where(logits_V < 0, logits_V * own.repetition, logits_V / own.repetition)
            logits_V = torch.where(self._seen_V, repeated_V, logits_V)
        if own.presence or own.frequency:
            logits_V -= torch.where(self._counts_V > 0, own.presence + own.frequency * self._counts_V, 0.0).to(logits_V.dtype)
        if own.bias:
            added = torch.tensor(list(own.bias.values()), dtype=logits_V.dtype, device=logits_V.device)
            logits_V[list(own.bias)] += added
        return logits_V


def apply_penalties(logits_V: Tensor, penalties: LogitPenalties, prompt_ids: Sequence[int], written_ids: Sequence[int]) -> Tensor:
    """The logits of one row after biases and penalties, as a copy."""
    if penalties == NO_PENALTIES:
        return logits_V
    text = TextPenalties(penalties, prompt_ids, len(logits_V), logits_V.device)
    text.count(written_ids)
    return text.apply(logits_V)


def choose(logits_BV: Tensor, warps: Sequence[Warp], draws_B: Sequence[float]) -> Tensor:
    """The next token ids [B], each row with its own warp. Rows with the same warp are computed together."""
    chosen_B = torch.empty(len(warps), dtype=torch.long, device=logits_BV.device)
    for warp in set(warps):
        rows = [row for row, own in enumerate(warps) if own == warp]
        some_BV = logits_BV if len(rows) == len(warps) else logits_BV[rows]
        require_finite(finite_rows(some_BV))
        own_B = torch.tensor([draws_B[row] for row in rows], dtype=torch.float64).to(logits_BV.device)
        # On a CPU `max` takes a third of the time of `argmax`
        chosen_B[rows] = some_BV.max(-1).indices if warp.temperature <= 0 else draw_tokens(some_BV, warp, own_B)[0]
    return chosen_B


def finite_rows(logits_BV: Tensor) -> Tensor:
    """Whether the logits of each row are usable [B]."""
    return logits_BV.amax(-1).isfinite()  # amax propagates NaN


class NotFiniteError(ShoalError):
    """The logits of a row are not finite."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite: its weights are damaged, or its training diverged; use an earlier checkpoint")


def require_finite(finite_B: Tensor) -> None:
    """Raise NotFiniteError if the logits of a row were not finite."""
    if not finite_B.all():
        raise NotFiniteError


def draw_tokens(logits_BV: Tensor, warp: Warp, draws_B: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that the draws select [B], and their log-probabilities in float32 or wider. The logits must be finite."""
    probabilities_BC, ids_BC = candidates(logits_BV, warp)
    if ids_BC is not None:
        # In the order of the ids: if rounding swaps two near-equal tokens, the other tokens stay in place
        ids_BC, order_BC = ids_BC.sort(-1)
        probabilities_BC = probabilities_BC.gather(1, order_BC)
    reached_BC = probabilities_BC.double().cumsum(-1)
    target_B1 = draws_B[:, None] * reached_BC[:, -1:]
    drawn_B1 = torch.searchsorted(reached_BC, target_B1, right=True).clamp(max=reached_BC.shape[1] - 1)
    log_p_B = probabilities_BC.gather(1, drawn_B1).log().squeeze(1)
    return (drawn_B1 if ids_BC is None else ids_BC.gather(1, drawn_B1)).squeeze(1), log_p_B


def draw_gap(logits_NV: Tensor, warp: Warp, tokens_N: Tensor, draws_N: Sequence[float]) -> Tensor:
    """Distance of each draw from the interval of its token in the cumulative distribution [N]. Below 0: the draw selects that token, with
    this margin. Intervals are in the order of token ids, as in `draw_tokens`."""
    probabilities_NV, _ = candidates(logits_NV, warp)
    reached_NV = torch.nn.functional.pad(probabilities_NV.double().cumsum(-1), (1, 0))
    start_N, end_N = (reached_NV.gather(1, (tokens_N + after)[:, None]).squeeze(1) for after in (0, 1))
    target_N = torch.tensor(draws_N, dtype=torch.float64, device=reached_NV.device) * reached_NV[:, -1]
    return torch.maximum(target_N - end_N, start_N - target_N)


def candidates(logits_BV: Tensor, warp: Warp) -> tuple[Tensor, Tensor | None]:
    """The probabilities of the candidate tokens, and their ids; None: all tokens, in order."""
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    scores_BC, ids_BC = logits_BV, None
    if warp.temperature != 1:  # relative to the best, so that a small temperature leaves its score at 0
        least = torch.finfo(logits_BV.dtype).tiny
        scores_BC = (logits_BV - logits_BV.amax(-1, keepdim=True)).div_(max(warp.temperature, least))
    share = 1.0 if warp.top_p is None else warp.top_p
    if warp.top_k is not None and warp.top_k < scores_BC.shape[-1]:
        scores_BC, ids_BC = scores_BC.topk(warp.top_k)
    elif share < 1:
        scores_BC, ids_BC = scores_BC.sort(descending=True)
    probabilities_BC = scores_BC.softmax(-1)
    if share >= 1 and warp.min_p is None:
        return probabilities_BC, ids_BC
    if share < 1:
        # A token is kept while the tokens before it have not reached p
        before_BC = probabilities_BC.cumsum(-1) - probabilities_BC
        probabilities_BC = probabilities_BC.masked_fill(before_BC >= share, 0.0)
    if warp.min_p is not None:
        least_B1 = warp.min_p * probabilities_BC.amax(-1, keepdim=True)
        probabilities_BC = probabilities_BC.masked_fill(probabilities_BC < least_B1, 0.0)
    return probabilities_BC / probabilities_BC.sum(-1, keepdim=True), ids_BC
