"""Blocks of a Llama with packed matrices, computed by `blocks.c`: in torch the many small operations of one token take longer than its
products. It takes a few new tokens of each row, in float32 on a CPU; other inputs and other blocks are left to torch.

Shapes: B rows, L new tokens, S tokens with those in the cache, D width, K key and value heads, E head size, P pairs of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoal.models.generation.kv_cache import KeyValueCache, LayerCache
from shoal.models.gpt import Attention, FeedForward
from shoal.models.layers.rotary import Rotary
from shoal.models.packed.compiled import library
from shoal.models.packed.layers import PackedLinear
from shoal.models.packed.products import is_compiled
from shoal.models.transformer import Block, LayerInputs, RmsNorm

_MOST_NEW, _MOST_TOKENS = 32, 64
"""New tokens of a row, and of all rows, up to which torch takes longer: its attention is faster."""
_TOLERANCE = 1e-3
_MATRICES = ("query_key_value", "output", "up", "down")


class _Block(ctypes.Structure):
    """`struct block` of `blocks.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "feed_forward_norm", *_MATRICES, "keys", "values")),
        ("capacity", ctypes.c_int64),
        *((f"{name}_bits", ctypes.c_int32) for name in _MATRICES),
    )


class _Sizes(ctypes.Structure):
    """`struct sizes` of `blocks.c`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "past", "width", "heads", "kv_heads", "head", "inner", "turns_per_row")),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class _Prepared(NamedTuple):
    """Blocks in the form of the library."""

    blocks: ctypes.Array[_Block]
    sizes: _Sizes
    linears: list[PackedLinear]
    kept: list[Tensor]
    """What the addresses in `blocks` point to."""


class CompiledBlocks:
    """Computes the blocks of a model, or of a part of it."""

    def __init__(self) -> None:
        self._prepared: WeakKeyDictionary[nn.Module, _Prepared | None] = WeakKeyDictionary()

    def through(self, blocks: nn.Module, x_BLD: Tensor, inputs: LayerInputs, cache: KeyValueCache) -> Tensor | None:
        """The residual stream after the blocks, whose new keys and values are in the cache. None: nothing was computed."""
        if not _is_small(x_BLD, inputs, cache):
            return None
        if blocks not in self._prepared:
            self._prepared[blocks] = _checked(list(blocks.children()))
        prepared = self._prepared[blocks]
        if prepared is None or len(prepared.blocks) != len(cache.layers) or any(one._forward_hooks for one in prepared.linears):
            return None
        return _compute(prepared, x_BLD, inputs, cache.layers)


def _is_small(x_BLD: Tensor, inputs: LayerInputs, cache: KeyValueCache) -> bool:
    """Whether these are inputs that the library takes."""
    B, L, _ = x_BLD.shape
    plain = inputs.turns is not None and inputs.documents is None and inputs.context is None and inputs.counted_BL is None
    fits = L <= _MOST_NEW and B * L <= _MOST_TOKENS and x_BLD.dtype == torch.float32 and x_BLD.device.type == "cpu"
    stored = [buffer for layer in cache.layers for buffer in layer.keys_and_values]
    usable = all(type(layer) is LayerCache for layer in cache.layers) and all(
        one.is_contiguous() and one.dtype == torch.float32 for one in stored
    )
    return plain and fits and usable and not torch.is_grad_enabled()


def _compute(prepared: _Prepared, x_BLD: Tensor, inputs: LayerInputs, layers: Sequence[LayerCache]) -> Tensor:
    loaded, sizes, turns = library(), prepared.sizes, inputs.turns
    assert loaded is not None
    assert turns is not None
    x_BLD, turns = x_BLD.clone(memory_format=torch.contiguous_format), turns.contiguous()
    sizes.rows, sizes.length, sizes.past, _ = *x_BLD.shape[:2], layers[0].length, 0
    sizes.turns_per_row, sizes.threads = turns[0].numel() if turns.dim() == 4 else 0, torch.get_num_threads()
    for one, layer in zip(prepared.blocks, layers, strict=True):
        if not layer.keys_and_values:
            layer.keys_and_values = [x_BLD.new_empty(sizes.rows, sizes.kv_heads, layer.capacity, sizes.head) for _ in range(2)]
        layer.extend(sizes.length)
        keys, values = layer.keys_and_values
        one.keys, one.values, one.capacity = keys.data_ptr(), values.data_ptr(), layer.capacity
    real_BS = None if inputs.real_BS is None else inputs.real_BS.bool().contiguous()
    places = x_BLD.data_ptr(), turns.data_ptr(), None if real_BS is None else real_BS.data_ptr()
    if loaded.shoal_blocks(prepared.blocks, len(prepared.blocks), ctypes.byref(sizes), *places):
        raise MemoryError
    return x_BLD


def _checked(blocks: list[Any]) -> _Prepared | None:
    """The blocks for the library; None: it computes others, or is not here, or computes something else than torch."""
    if library() is None or not all(map(_is_known, blocks)):
        return None
    first: Any = blocks[0]
    sizes = _Sizes(width=first.attention.query_key_value.shape.columns, heads=first.attention.query_heads, eps=first.attention_norm.eps)
    sizes.kv_heads, sizes.head, sizes.inner = first.attention.kv_heads, first.attention.head_size, first.feed_forward.down.shape.columns
    linears, kept, made = list[PackedLinear](), list[Tensor](), (_Block * len(blocks))()
    for block, one in zip(blocks, made, strict=True):
        matrices = dict(zip(_MATRICES, _linears(block), strict=True))
        for name, linear in matrices.items():
            setattr(one, name, linear.weight.data_ptr())
            setattr(one, f"{name}_bits", 4 if linear.shape.kind == "int4" else 8)
        one.attention_norm, one.feed_forward_norm = block.attention_norm.weight.data_ptr(), block.feed_forward_norm.weight.data_ptr()
        kept += [*(linear.weight for linear in matrices.values()), block.attention_norm.weight, block.feed_forward_norm.weight]
        linears += matrices.values()
    prepared = _Prepared(made, sizes, linears, kept)
    return prepared if _is_right(prepared._replace(blocks=(_Block * 1)(made[0])), first) else None


def _is_known(block: Any) -> bool:
    if type(block) is not Block or type(block.attention) is not Attention or type(block.feed_forward) is not FeedForward:
        return False
    norms, linears = (block.attention_norm, block.feed_forward_norm), _linears(block)
    gated = block.feed_forward.gated and not block.feed_forward.gelu_gate
    plain = gated and block.attention.query_norm is None and block.attention.head_size % 2 == 0 and not block.training
    plain = plain and not block._forward_hooks and not block._forward_pre_hooks
    known = all(type(one) is RmsNorm and one.weight.dtype == torch.float32 for one in norms)
    packed = all(type(one) is PackedLinear and one.bias is None and not one._forward_hooks for one in linears)
    return bool(plain and known and packed and all(is_compiled(one.shape, one.weight.device) for one in linears))


def _linears(block: Any) -> list[Any]:
    return [block.attention.query_key_value, block.attention.output, block.feed_forward.up, block.feed_forward.down]


def _is_right(prepared: _Prepared, block: Any) -> bool:
    """Whether the library computes a block as torch does: two tokens, and then one."""
    rotary, random = Rotary(3, prepared.sizes.head), torch.Generator().manual_seed(0)
    caches = LayerCache(0), LayerCache(0)
    for past, length in ((0, 2), (2, 1)):
        x_BLD = torch.randn(2, length, prepared.sizes.width, generator=random)
        inputs = LayerInputs(rotary(past, length), None, past == 0, torch.zeros(2, length, dtype=torch.long), past=past)
        wanted_BLD, _ = block(x_BLD, inputs, caches[0])
        found_BLD = _compute(prepared, x_BLD, inputs, [caches[1]])
        if not bool((found_BLD - wanted_BLD).abs().max() <= _TOLERANCE * wanted_BLD.abs().max()):
            return False
    return True
