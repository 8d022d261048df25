"""Attention of new tokens to the pages of their KV caches, on a GPU (flash decoding, and flash attention for prompts).

In decoding a program computes the query heads that share one key head, over a part of the request's pages; where a request has several
parts, a second kernel combines them. The new key and value are read from registers and written to their page by the program of the first
part, which no other program reads. Prompts are read as one row of tokens, in which each request begins at a multiple of
`tokens_of_block`; a program computes the query heads of one key head for the tokens of a block.

Shapes: T tokens, R rows, N slots, P pages of a request, G pages of the pool, W tokens of a page, H query heads, K key and value heads, E
head size, S parts of a context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 1024
"""Programs of a launch, about: eight for each multiprocessor of a large GPU."""
_MOST_PARTS = 64
_BLOCK = 64
"""Query heads that a program computes for a prompt, about."""
_LEAST_HEADS = 16
"""Rows that a product of matrices has at least."""
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_page(q, k, v, seen, scale, best, total, attended):
    """The running softmax after one more page: its largest scores, their sums, and the weighted values."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale * _LOG2_E
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    factor, weights = tl.exp2(best - higher), tl.exp2(scores - higher[:, None])
    attended = attended * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total * factor + tl.sum(weights, 1), attended


@triton.jit
def _place(table, position, head, K: tl.constexpr, W: tl.constexpr):
    """Where the key of a position is, in heads."""
    page = tl.load(table + position // W).to(tl.int64)
    return (page * K + head) * W + position % W


@triton.jit
def _append_one(key, value, target_key, target_value):
    """Write a key and a value to their page, and return them."""
    new_key, new_value = tl.load(key), tl.load(value)
    tl.store(target_key, new_key)
    tl.store(target_value, new_value)
    return new_key, new_value


# fmt: off
@triton.jit
def _attend(
    query, key, value, keys, values, rows, lengths, tables, found, sums, scale, pages, K: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, E: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr,
):
    # fmt: on
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(rows + row)
    length = tl.load(lengths + slot).to(tl.int32)
    group, number, token = tl.arange(0, M), tl.arange(0, E), tl.arange(0, W)
    own = (row * K + head).to(tl.int64)
    q = tl.load(query + (own * GROUP + group[:, None]) * E + number[None, :], mask=group[:, None] < GROUP, other=0.0)
    count = tl.cdiv(length, W)
    each = tl.cdiv(count, PARTS)
    first = part * each
    best = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    attended = tl.zeros((M, E), tl.float32)
    if part == 0:
        place = _place(tables + slot * pages, length, head, K, W) * E + number
        new_key, new_value = _append_one(key + own * E + number, value + own * E + number, keys + place, values + place)
        best = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale * _LOG2_E
        total += 1.0
        attended += new_value.to(tl.float32)[None, :]
    for i in range(first, tl.minimum(first + each, count)):
        page = tl.load(tables + slot * pages + i).to(tl.int64)
        place = ((page * K + head) * W + token[:, None]) * E + number[None, :]
        seen = (i * W + token) < length
        k = tl.load(keys + place, mask=seen[:, None], other=0.0)
        v = tl.load(values + place, mask=seen[:, None], other=0.0)
        best, total, attended = _attend_page(q, k, v, seen[None, :], scale, best, total, attended)
    if PARTS == 1:
        place = (own * GROUP + group[:, None]) * E + number[None, :]
        tl.store(found + place, attended / total[:, None], mask=group[:, None] < GROUP)
    else:
        heads = (own * PARTS + part) * GROUP + group
        tl.store(found + heads[:, None] * E + number[None, :], attended, mask=group[:, None] < GROUP)
        tl.store(sums + 2 * heads, best, mask=group < GROUP)
        tl.store(sums + 2 * heads + 1, total, mask=group < GROUP)


@triton.jit
def _combine(found, sums, combined, GROUP: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr):
    own, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, number = tl.arange(0, PARTS), tl.arange(0, E)
    heads = (own * PARTS + part) * GROUP + group
    best, total = tl.load(sums + 2 * heads), tl.load(sums + 2 * heads + 1)
    factor = tl.exp2(best - tl.max(best, 0))
    attended = tl.load(found + heads[:, None] * E + number[None, :])
    result = tl.sum(attended * factor[:, None], 0) / tl.sum(total * factor, 0)
    tl.store(combined + (own * GROUP + group) * E + number, result)


@torch.library.custom_op("shoal::paged_attention", mutates_args=("keys_GKWE", "values_GKWE"))
def attend_to_pages(
    query_RHE: Tensor,
    key_RKE: Tensor,
    value_RKE: Tensor,
    keys_GKWE: Tensor,
    values_GKWE: Tensor,
    rows_R: Tensor,
    lengths_N: Tensor,
    tables_NP: Tensor,
) -> Tensor:
    """Append the new keys and values, and attend to all of each request [R, H, E]. `rows_R`: the slot of each row; `lengths_N`: tokens that
    a slot's pages hold, without the new one."""
    (R, H, E), (_, K, W, _), pages = query_RHE.shape, keys_GKWE.shape, tables_NP.shape[1]
    group, parts = H // K, parts_of_context(R * K, pages)
    combined = torch.empty_like(query_RHE, memory_format=torch.contiguous_format)
    sums = query_RHE.new_empty(R, K, parts, group, 2, dtype=torch.float32)
    found = combined if parts == 1 else query_RHE.new_empty(R, K, parts, group, E, dtype=torch.float32)
    new = (query_RHE.contiguous(), key_RKE.contiguous(), value_RKE.contiguous())
    sizes = (K, group, max(_LEAST_HEADS, triton.next_power_of_2(group)), E, W, parts)
    given = (*new, keys_GKWE, values_GKWE, rows_R, lengths_N, tables_NP, found, sums, E**-0.5, pages)
    _attend[(R, K, parts)](*given, *sizes, num_warps=4, num_stages=3)
    if parts > 1:
        _combine[(R * K, group)](found, sums, combined, group, E, parts, num_warps=2)
    return combined


@attend_to_pages.register_fake
def _(
    query_RHE: Tensor,
    key_RKE: Tensor,
    value_RKE: Tensor,
    keys_GKWE: Tensor,
    values_GKWE: Tensor,
    rows_R: Tensor,
    lengths_N: Tensor,
    tables_NP: Tensor,
) -> Tensor:
    return torch.empty_like(query_RHE, memory_format=torch.contiguous_format)


@triton.jit
def _append(key, value, keys, values, slots, positions, tables, pages, K: tl.constexpr, E: tl.constexpr, W: tl.constexpr):
    token, head, number = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, E)
    slot, position = tl.load(slots + token), tl.load(positions + token)
    place, own = _place(tables + slot * pages, position, head, K, W) * E + number, (token * K + head) * E + number
    _append_one(key + own, value + own, keys + place, values + place)


# fmt: off
@triton.jit
def _read(
    query, keys, values, slots, positions, tables, found, scale, pages, K: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    M: tl.constexpr, E: tl.constexpr, W: tl.constexpr,
):
    # fmt: on
    block, head = tl.program_id(0), tl.program_id(1)
    row, number, place = tl.arange(0, M), tl.arange(0, E), tl.arange(0, W)
    token, group = block * (M // PADDED) + row // PADDED, row % PADDED
    slot = tl.load(slots + block * (M // PADDED))
    position = tl.load(positions + token).to(tl.int32)
    own = ((token.to(tl.int64) * K + head) * GROUP + group)[:, None] * E + number[None, :]
    real = (group < GROUP)[:, None]
    q = tl.load(query + own, mask=real, other=0.0)
    best = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    attended = tl.zeros((M, E), tl.float32)
    for i in range(tl.max(position, 0) // W + 1):
        page = tl.load(tables + slot * pages + i).to(tl.int64)
        at = ((page * K + head) * W + place[:, None]) * E + number[None, :]
        k, v = tl.load(keys + at), tl.load(values + at)
        best, total, attended = _attend_page(q, k, v, i * W + place[None, :] <= position[:, None], scale, best, total, attended)
    tl.store(found + own, attended / total[:, None], mask=real)


@torch.library.custom_op("shoal::read_pages", mutates_args=("keys_GKWE", "values_GKWE"))
def read_to_pages(
    query_THE: Tensor,
    key_TKE: Tensor,
    value_TKE: Tensor,
    keys_GKWE: Tensor,
    values_GKWE: Tensor,
    slots_T: Tensor,
    positions_T: Tensor,
    tables_NP: Tensor,
) -> Tensor:
    """Append the keys and values of prompts, and attend to all up to each token [T, H, E]. A block of tokens belongs to the slot of its
    first one; tokens of slot 0 are padding."""
    (T, H, E), (_, K, W, _), pages = query_THE.shape, keys_GKWE.shape, tables_NP.shape[1]
    group = H // K
    padded, found = triton.next_power_of_2(group), torch.empty_like(query_THE, memory_format=torch.contiguous_format)
    query, key, value = (one.contiguous() for one in (query_THE, key_TKE, value_TKE))
    _append[(T, K)](key, value, keys_GKWE, values_GKWE, slots_T, positions_T, tables_NP, pages, K, E, W, num_warps=1)
    given = (query, keys_GKWE, values_GKWE, slots_T, positions_T, tables_NP, found, E**-0.5, pages)
    block = tokens_of_block(group)
    _read[(T // block, K)](*given, K, group, padded, block * padded, E, W, num_warps=4, num_stages=2)
    return found


@read_to_pages.register_fake
def _(
    query_THE: Tensor,
    key_TKE: Tensor,
    value_TKE: Tensor,
    keys_GKWE: Tensor,
    values_GKWE: Tensor,
    slots_T: Tensor,
    positions_T: Tensor,
    tables_NP: Tensor,
) -> Tensor:
    return torch.empty_like(query_THE, memory_format=torch.contiguous_format)


def tokens_of_block(group: int) -> int:
    """Tokens of a prompt that a program computes, where `group` query heads share a key head."""
    return max(1, _BLOCK // triton.next_power_of_2(group))


def parts_of_context(programs: int, pages: int) -> int:
    """In how many parts contexts of up to `pages` pages are read, a power of two; `programs` are launched for each part."""
    parts = max(1, min(_MOST_PARTS, pages, _PROGRAMS // programs))
    return 1 << (parts.bit_length() - 1)


def takes(head_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernel computes heads of this size and type."""
    return 16 <= head_size <= 256 and head_size & (head_size - 1) == 0 and dtype in (torch.bfloat16, torch.float16, torch.float32)
