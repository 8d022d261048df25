"""How the next token is chosen from the logits.

The order is that of transformers: penalties and biases, temperature, the k most likely, the fewest with probability p, the least
likely against the best. A draw is no number of a generator that others use, too: it follows from the seed, the prompt, the number of the
choice and the position alone. So a request gives the same text alone, beside others, and when it is computed again.

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
    """What the distribution is changed by before a token is drawn. A temperature of 0 takes the most likely."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


class LogitPenalties(NamedTuple):
    """What is taken from the logits of tokens that were there already, and what is added to tokens by name."""

    repetition: float = 1.0
    """Divides a positive logit, and multiplies a negative one, of each token of the prompt and of the text."""
    presence: float = 0.0
    """Subtracted once for a token that the text has."""
    frequency: float = 0.0
    """Subtracted as often as the text has the token."""
    bias: Mapping[int, float] = {}


NO_PENALTIES = LogitPenalties()


def warp_of(decoding: Decoding) -> Warp:
    """The way that is active."""
    way = getattr(decoding, decoding.active)
    temperature = 0.0 if decoding.active == "greedy" else way.temperature
    return Warp(temperature, getattr(way, "k", None), getattr(way, "p", None))


class TokenDraws:
    """The numbers that decide a text, one for each position. Without a seed nobody can foretell them."""

    def __init__(self, seed: int | None, prompt_ids: Sequence[int], choice: int = 0) -> None:
        start = secrets.token_bytes(16) if seed is None else seed.to_bytes(16, "little", signed=True)
        key = hashlib.blake2b(start, digest_size=32)
        key.update(np.asarray(prompt_ids, "<i8").tobytes())
        key.update(choice.to_bytes(8, "little"))
        self._key = key.digest()

    def at(self, position: int) -> float:
        """At least 0 and below 1."""
        word = hashlib.blake2b(position.to_bytes(8, "little"), key=self._key, digest_size=8).digest()
        return (int.from_bytes(word, "little") >> 11) * 2.0**-53


def group_draws(seed: int, first: int, prompts: Sequence[Sequence[int]], group: int) -> list[TokenDraws]:
    """The draws of so many answers to each of a run's prompts. They follow from the run's seed and from the prompt's number among all of
    them; `first` is the number of the first one here."""
    seeds = [(seed % 2**62 << 64) + first + place for place in range(len(prompts))]
    return [TokenDraws(own, ids, choice) for own, ids in zip(seeds, prompts, strict=True) for choice in range(group)]


def row_draws(seed: int | None, prompts: Sequence[Sequence[int]]) -> list[TokenDraws]:
    """The draws of several prompts: equal ones are choices of one, the others do not depend on who stands beside them."""
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    for prompt in map(tuple, prompts):
        found.append(TokenDraws(seed, prompt, seen[prompt]))
        seen[prompt] += 1
    return found


def apply_penalties(logits_V: Tensor, penalties: LogitPenalties, prompt_ids: Sequence[int], written_ids: Sequence[int]) -> Tensor:
    """The logits of one row after biases and penalties; the given ones are left as they are."""
    if penalties == NO_PENALTIES:
        return logits_V
    logits_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32), copy=True)
    if penalties.repetition != 1.0 and (present := sorted({*prompt_ids, *written_ids})):
        scores = logits_V[present]
        logits_V[present] = torch.where(scores < 0, scores * penalties.repetition, scores / penalties.repetition)
    if (penalties.presence or penalties.frequency) and written_ids:
        counts = Counter(written_ids)
        taken = [penalties.presence + penalties.frequency * count for count in counts.values()]
        logits_V[list(counts)] -= torch.tensor(taken, dtype=logits_V.dtype, device=logits_V.device)
    if penalties.bias:
        added = torch.tensor(list(penalties.bias.values()), dtype=logits_V.dtype, device=logits_V.device)
        logits_V[list(penalties.bias)] += added
    return logits_V


def choose(logits_BV: Tensor, warps: Sequence[Warp], draws_B: Sequence[float]) -> Tensor:
    """The next token ids [B], each row in its own way. Rows of one way are worked out together."""
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
    """Whether each row's logits can be chosen from [B]."""
    return logits_BV.amax(-1).isfinite()  # a number that is none counts as the largest


def require_finite(finite_B: Tensor) -> None:
    """Raises ShoalError where some row's logits were not finite."""
    if not finite_B.all():
        raise ShoalError("the model's logits are not finite: its weights are damaged, or its training diverged; use an earlier checkpoint")


def draw_tokens(logits_BV: Tensor, warp: Warp, draws_B: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that the draws decide for [B], and the log-probabilities that they were drawn with, in float32 at least. The logits must
    be finite."""
    probabilities_BC, ids_BC = candidates(logits_BV, warp)
    if ids_BC is not None:
        # In the order of the ids: two tokens that change places because a sum was rounded otherwise change nothing else
        ids_BC, order_BC = ids_BC.sort(-1)
        probabilities_BC = probabilities_BC.gather(1, order_BC)
    reached_BC = probabilities_BC.double().cumsum(-1)
    target_B1 = draws_B[:, None] * reached_BC[:, -1:]
    drawn_B1 = torch.searchsorted(reached_BC, target_B1, right=True).clamp(max=reached_BC.shape[1] - 1)
    log_p_B = probabilities_BC.gather(1, drawn_B1).log().squeeze(1)
    return (drawn_B1 if ids_BC is None else ids_BC.gather(1, drawn_B1)).squeeze(1), log_p_B


def draw_gap(logits_NV: Tensor, warp: Warp, tokens_N: Tensor, draws_N: Sequence[float]) -> Tensor:
    """How far each draw lies from the token that was taken for it, as a share of all probability [N]. Below 0: the draw gives that token,
    and lies so far from the nearest other one.

    The probabilities of tokens lie end to end in the order of their ids, as they do where a token is drawn.
    """
    probabilities_NV, _ = candidates(logits_NV, warp)
    reached_NV = torch.nn.functional.pad(probabilities_NV.double().cumsum(-1), (1, 0))
    start_N, end_N = (reached_NV.gather(1, (tokens_N + after)[:, None]).squeeze(1) for after in (0, 1))
    target_N = torch.tensor(draws_N, dtype=torch.float64, device=reached_NV.device) * reached_NV[:, -1]
    return torch.maximum(target_N - end_N, start_N - target_N)


def candidates(logits_BV: Tensor, warp: Warp) -> tuple[Tensor, Tensor | None]:
    """The probabilities of the tokens in question, and their ids; null: all tokens, in order."""
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    scores_BC, ids_BC = logits_BV, None
    if warp.temperature != 1:  # relative to the best, so that no temperature is too small to divide by
        scores_BC = (logits_BV - logits_BV.amax(-1, keepdim=True)).div_(warp.temperature)
    share = 1.0 if warp.top_p is None else warp.top_p
    if warp.top_k is not None and warp.top_k < scores_BC.shape[-1]:
        scores_BC, ids_BC = scores_BC.topk(warp.top_k)
    elif share < 1:
        scores_BC, ids_BC = scores_BC.sort(descending=True)
    probabilities_BC = scores_BC.softmax(-1)
    if share >= 1 and warp.min_p is None:
        return probabilities_BC, ids_BC
    if share < 1:
        # A token is in while those before it have not reached p
        before_BC = probabilities_BC.cumsum(-1) - probabilities_BC
        probabilities_BC = probabilities_BC.masked_fill(before_BC >= share, 0.0)
    if warp.min_p is not None:
        least_B1 = warp.min_p * probabilities_BC.amax(-1, keepdim=True)
        probabilities_BC = probabilities_BC.masked_fill(probabilities_BC < least_B1, 0.0)
    return probabilities_BC / probabilities_BC.sum(-1, keepdim=True), ids_BC
