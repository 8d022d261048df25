"""Choice of the next tokens on a GPU, in one kernel: temperature, top-k, top-p, min-p and a draw, each row with its own.

It computes what `generation/decoding.py` does without sorting: the least kept logit is found by a search over its bits, as the largest one
above which, it included, enough tokens (top-k) or enough probability (top-p) lie. Of equal logits at that bound the first are kept, as by a
stable sort. A program computes one row, whose logits stay in the GPU's cache between its passes.

Shapes: R rows, N slots, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.models.generation.choice_state import Choices, ChoiceState

_TILE, _WARPS = 8192, 16


@triton.jit
def _key(x, BITS: tl.constexpr):
    """Whole numbers in the order of the logits."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    return (ordered >> (32 - BITS)).to(tl.int64)


@triton.jit
def _logit(key, BITS: tl.constexpr):
    """The inverse of `_key`."""
    ordered = (key << (32 - BITS)).to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.where(ordered < 0, ordered ^ -2147483648, ~ordered).to(tl.float32, bitcast=True)


@triton.jit
def _load(source, start, V, TILE: tl.constexpr):
    column = start + tl.arange(0, TILE)
    return tl.load(source + column, mask=column < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _bound(source, V, best, inverse, goal, counts, BITS: tl.constexpr, TILE: tl.constexpr):
    """The largest key such that the tokens from it on have the weight `goal`; a weight is 1 (`counts`) or a probability."""
    found = tl.zeros((), tl.int64)
    for turn in range(BITS // 2):
        step = tl.full((), 1, tl.int64) << (BITS - 2 - 2 * turn)
        one, two, three = 0.0, 0.0, 0.0
        for start in range(0, V, TILE):
            x = _load(source, start, V, TILE)
            key, weight = _key(x, BITS), tl.where(counts, tl.where(x > float("-inf"), 1.0, 0.0), tl.exp((x - best) * inverse))
            one += tl.sum(tl.where(key >= found + step, weight, 0.0))
            two += tl.sum(tl.where(key >= found + 2 * step, weight, 0.0))
            three += tl.sum(tl.where(key >= found + 3 * step, weight, 0.0))
        found += step * ((one >= goal).to(tl.int64) + (two >= goal).to(tl.int64) + (three >= goal).to(tl.int64))
    return found


@triton.jit
def _above(source, V, best, inverse, bound, BITS: tl.constexpr, TILE: tl.constexpr):
    """How many tokens lie above a bound, and their probability."""
    count, mass = 0.0, 0.0
    for start in range(0, V, TILE):
        x = _load(source, start, V, TILE)
        above = _key(x, BITS) > bound
        count += tl.sum(tl.where(above, 1.0, 0.0))
        mass += tl.sum(tl.where(above, tl.exp((x - best) * inverse), 0.0))
    return count, mass


@triton.jit
def _kept(source, start, V, best, inverse, bound, ties, before, least, BITS: tl.constexpr, TILE: tl.constexpr):
    """Probabilities of the kept tokens of a tile, and how many tokens at the bound there are up to its end."""
    x = _load(source, start, V, TILE)
    key = _key(x, BITS)
    at = (key == bound).to(tl.int32)
    rank = before + tl.cumsum(at, 0)
    weight = tl.exp((x - best) * inverse)
    keeps = ((key > bound) | ((at > 0) & (rank <= ties))) & (weight >= least)
    return tl.where(keeps, weight, 0.0).to(tl.float64), before + tl.sum(at)


@triton.jit
def _best(source, V, TILE: tl.constexpr):
    """The largest logit, its first token, and how many logits are no numbers."""
    best, token, broken = float("-inf"), 0, 0
    for start in range(0, V, TILE):
        x = _load(source, start, V, TILE)
        broken += tl.sum((x != x).to(tl.int32))
        here = tl.max(x, 0)
        place = tl.min(tl.where(x == here, start + tl.arange(0, TILE), V), 0)
        token = tl.where(here > best, place, token)
        best = tl.maximum(best, here)
    return best, token, broken


@triton.jit
def _kept_bound(source, slot, top_k, top_p, V, best, inverse, BITS: tl.constexpr, TILE: tl.constexpr):
    """The least key that top-k and top-p keep, and how many of the tokens that have it are kept."""
    bound, ties = tl.full((), -1, tl.int64), V.to(tl.float32)
    k, p = tl.load(top_k + slot), tl.load(top_p + slot)
    count, mass = _above(source, V, best, inverse, bound, BITS, TILE)
    if (k > 0) & (k < V):
        bound = _bound(source, V, best, inverse, k.to(tl.float32), True, BITS, TILE)
        count, above = _above(source, V, best, inverse, bound, BITS, TILE)
        ties = k.to(tl.float32) - count
        mass = above + ties * tl.exp((_logit(bound, BITS) - best) * inverse)
    if p < 1:
        nucleus = _bound(source, V, best, inverse, p * mass, False, BITS, TILE)
        if nucleus >= bound:
            count, above = _above(source, V, best, inverse, nucleus, BITS, TILE)
            needed = tl.ceil((p * mass - above) / tl.exp((_logit(nucleus, BITS) - best) * inverse))
            needed = tl.maximum(needed, 1.0)
            ties = tl.where(nucleus == bound, tl.minimum(needed, ties), needed)
            bound = nucleus
    return bound, ties


@triton.jit
def _drawn(source, token, draw, V, best, inverse, bound, ties, least, BITS: tl.constexpr, TILE: tl.constexpr):
    """The token that the draw selects, in the order of the ids, and the sum of the probabilities of all kept ones."""
    total, before = tl.zeros((), tl.float64), 0
    for start in range(0, V, TILE):
        weights, before = _kept(source, start, V, best, inverse, bound, ties, before, least, BITS, TILE)
        total += tl.sum(weights)
    target = draw * total
    reached, before, open_ = tl.zeros((), tl.float64), 0, True
    for start in range(0, V, TILE):
        weights, before = _kept(source, start, V, best, inverse, bound, ties, before, least, BITS, TILE)
        here = tl.sum(weights)
        if open_ & (reached + here > target):
            passed = reached + tl.cumsum(weights, 0) > target
            token = tl.min(tl.where(passed & (weights > 0), start + tl.arange(0, TILE), V - 1), 0)
            open_ = False
        reached += here
    return token, total


@triton.jit
def _choose(
    logits,
    rows,
    draws,
    temperature,
    top_k,
    top_p,
    min_p,
    tokens,
    lengths,
    chosen,
    log_probs,
    V,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, source = tl.load(rows + row), logits + row * V
    best, token, broken = _best(source, V, TILE)
    usable = (broken == 0) & (best < float("inf")) & (best > float("-inf"))
    heat = tl.load(temperature + slot)
    log_p = 0.0
    if usable & (heat > 0):
        inverse = 1.0 / heat
        bound, ties = _kept_bound(source, slot, top_k, top_p, V, best, inverse, BITS, TILE)
        least, draw = tl.load(min_p + slot), tl.load(draws + row)
        token, total = _drawn(source, token, draw, V, best, inverse, bound, ties, least, BITS, TILE)
        log_p = (tl.load(source + token).to(tl.float32) - best) * inverse - tl.log(total).to(tl.float32)
    tl.store(chosen + row, tl.where(usable, token, -1).to(tl.int64))
    tl.store(log_probs + row, log_p)
    if slot > 0:
        tl.store(tokens + slot, token.to(tl.int64))
        tl.store(lengths + slot, tl.load(lengths + slot) + 1)


def choose_tokens(logits_RV: Tensor, rows_R: Tensor, draws_R: Tensor, state: ChoiceState) -> Choices:
    """Choose a token in each row, and make it its slot's last one."""
    (R, V), device = logits_RV.shape, logits_RV.device
    chosen = Choices(torch.empty(R, dtype=torch.long, device=device), torch.empty(R, dtype=torch.float32, device=device))
    bits = 16 if logits_RV.dtype == torch.bfloat16 else 32
    _choose[(R,)](logits_RV.contiguous(), rows_R, draws_R, *state, *chosen, V, bits, _TILE, num_warps=_WARPS)
    return chosen
