"""Frozen weights in 16, 8 or 4 bits: layers that store a weight as bf16, int8 or nf4 and compute with the weight that these bits give.

int8 has one scale per row. nf4 is the data type of QLoRA, packed as bitsandbytes packs it: blocks of 64 weights with one scale, two
weights a byte. It is written in plain torch, since bitsandbytes and torchao have no kernels for every machine that Shoal trains on.

Holds: a layer computes exactly what a linear layer with the restored weight computes, in the type of its input or of autocast; its gradient
is that layer's gradient. No restored weight outlives the product that it is restored for.

Shapes: B blocks, I input, O output.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models.kernels import HAS_TRITON
from shoal.work_buffer import WorkBuffer

BLOCK = 64
"""Weights that share a scale in nf4."""
# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
"""The 16 values of nf4, in units of the block's largest: quantiles of the normal distribution (Dettmers et al., 2023)."""
_WEIGHTS_AT_A_TIME = 1 << 16
"""Weights that are converted at a time on a CPU, so that what lies between fits its cache, and little is ever allocated; other devices
take them all."""
_MOST_RESTORED = 1 << 22
"""Weights of a layer that a product on a CPU restores at a time: an output matrix of 128,000 tokens would take gigabytes."""
_BUFFER = WorkBuffer()
"""For weights that are restored."""
_MOST_LEFT = 0.05
"""Share of a model's weights that may lie outside of linear layers and embeddings, and stay in float32."""


class Stored(NamedTuple):
    """A matrix in few bits."""

    codes: Tensor
    scales: Tensor | None


def stored(weight_OI: Tensor, kind: str) -> Stored:
    """A matrix as bf16, int8 or nf4."""
    if kind == "bf16":
        return Stored(weight_OI.to(torch.bfloat16), None)
    if kind == "int8":
        return _stored_int8(weight_OI)
    return _stored_nf4(weight_OI.flatten())


def _stored_int8(weight_OI: Tensor) -> Stored:
    rows, columns = weight_OI.shape
    codes, scales = torch.empty_like(weight_OI, dtype=torch.int8), torch.empty(rows, device=weight_OI.device)
    for part in _parts(rows, columns, weight_OI):
        values = weight_OI[part].float()
        largest = values.abs().amax(1)
        codes[part] = (values * (127 / _nonzero(largest)).unsqueeze(1)).round_()
        scales[part] = largest / 127
    return Stored(codes, scales)


def _stored_nf4(flat: Tensor) -> Stored:
    table = _table(flat.device)
    between = (table[1:] + table[:-1]) / 2
    blocks = math.ceil(flat.numel() / BLOCK)
    codes, scales = (
        torch.empty(blocks * count, dtype=dtype, device=flat.device) for count, dtype in ((BLOCK // 2, torch.uint8), (1, torch.float32))
    )
    for part in _parts(blocks, BLOCK, flat):
        values = flat[part.start * BLOCK : part.stop * BLOCK].float()
        values_B = F.pad(values, (0, (part.stop - part.start) * BLOCK - len(values))).view(-1, BLOCK)
        scales[part] = values_B.abs().amax(1)
        nearest = torch.bucketize(values_B / _nonzero(scales[part]).unsqueeze(1), between, out_int32=True).to(torch.uint8).flatten()
        codes[part.start * BLOCK // 2 : part.stop * BLOCK // 2] = nearest[::2] << 4 | nearest[1::2]
    return Stored(codes, scales)


def _parts(count: int, width: int, like: Tensor) -> Iterator[slice]:
    """Slices of rows of this width, which are converted at a time on the device of a tensor."""
    step = max(1, _WEIGHTS_AT_A_TIME // width) if like.device.type == "cpu" else count
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


@cache
def _table(device: torch.device) -> Tensor:
    """The values of nf4: copying them for each product would let a GPU wait for the processor."""
    with torch.inference_mode(False), torch.device("cpu"):
        return torch.tensor(NF4).to(device)


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)


def restored(
    codes: Tensor, scales: Tensor | None, kind: str, shape: tuple[int, int], dtype: torch.dtype, room: Tensor | None = None
) -> Tensor:
    """The matrix [O, I] that the bits give, rounded once to `dtype`. `room`: memory for it, as `_room_for` gives it."""
    if scales is None:
        return codes.to(dtype) if room is None else room.view(shape).copy_(codes)
    if kind == "int8":
        rounded = torch.empty(shape, dtype=dtype, device=codes.device) if room is None else room.view(shape)
        for part in _parts(*shape, codes):  # torch makes a copy of the codes in `dtype`
            torch.mul(codes[part], scales[part].unsqueeze(1), out=rounded[part])
        return rounded
    codes, scales, blocks = codes.flatten(), scales.flatten(), scales.numel()
    table = _table(codes.device)
    if codes.is_cuda and HAS_TRITON:
        from shoal.models.kernels.nf4 import restore as restore_nf4

        return restore_nf4(codes, scales, table, BLOCK, dtype)[: shape[0] * shape[1]].view(shape)
    # A byte selects two weights: both lie side by side in a table of 256 numbers of 64 bits
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1).view(torch.int64).flatten()
    weight = torch.empty(blocks, BLOCK, dtype=dtype, device=codes.device) if room is None else room.view(blocks, BLOCK)
    for part in _parts(blocks, BLOCK, codes):
        found = pairs.index_select(0, codes[part.start * BLOCK // 2 : part.stop * BLOCK // 2].int()).view(torch.float32)
        torch.mul(found.view(-1, BLOCK), scales[part].unsqueeze(1), out=weight[part])
    return weight.flatten()[: shape[0] * shape[1]].view(shape)


def _restored_rows(
    codes: Tensor, scales: Tensor | None, kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """The rows that a product restores at a time, and their weights."""
    rows, columns = shape
    whole = codes.device.type != "cpu" or codes.dtype == dtype or rows * columns <= _MOST_RESTORED
    step = rows if whole else max(1, _MOST_RESTORED // columns // BLOCK) * BLOCK  # such rows begin with a block of nf4
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        beside = None if scales is None else scales[part]
        own = codes[part]
        if kind == "nf4":
            assert scales is not None
            codes, scales = codes.flatten(), scales.flatten()
            first, last = start * columns // BLOCK, math.ceil(part.stop * columns / BLOCK)
            own, beside = codes[first * BLOCK // 2 : last * BLOCK // 2], scales[first:last]
        some = (part.stop - start, columns)
        yield part, restored(own, beside, kind, some, dtype, _room_for(own, beside, kind, some, dtype))


def _room_for(codes: Tensor, scales: Tensor | None, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
    """Memory for a matrix that is used once, on a CPU; None: there is nothing to restore, or the device has an allocator that keeps up."""
    if codes.device.type != "cpu" or codes.dtype == dtype:
        return None
    count = scales.numel() * BLOCK if kind == "nf4" and scales is not None else shape[0] * shape[1]
    return _BUFFER.take(count, dtype)


# Operators of their own: torch.compile would keep a weight that it sees restored for the backward pass
@torch.library.custom_op("shoal::frozen_product", mutates_args=())
def _product(x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None, kind: str, outputs: int) -> Tensor:
    """x @ weight.T + bias, with a weight that is restored for each pass."""
    bias = None if bias is None else bias.to(x.dtype)
    made: Tensor | None = None
    for rows, weight in _restored_rows(codes, scales, kind, (outputs, x.shape[-1]), x.dtype):
        part = F.linear(x, weight, None if bias is None else bias[rows])
        if part.shape[-1] == outputs:
            return part
        made = x.new_empty(*x.shape[:-1], outputs) if made is None else made
        made[..., rows] = part
    assert made is not None
    return made


@torch.library.custom_op("shoal::frozen_product_backward", mutates_args=())
def _product_backward(slope: Tensor, codes: Tensor, scales: Tensor | None, kind: str, inputs: int) -> Tensor:
    with torch.autocast(slope.device.type, enabled=False):
        restored_rows = _restored_rows(codes, scales, kind, (slope.shape[-1], inputs), slope.dtype)
        parts = (slope[..., rows] @ weight for rows, weight in restored_rows)
        for_x = next(parts)
        if (more := next(parts, None)) is not None:
            for_x = sum(parts, for_x.float() + more)
    return for_x.to(slope.dtype)


@_product.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None, kind: str, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


@_product_backward.register_fake
def _(slope: Tensor, codes: Tensor, scales: Tensor | None, kind: str, inputs: int) -> Tensor:
    return slope.new_empty(*slope.shape[:-1], inputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, codes, scales, _, kind, _ = inputs
    ctx.save_for_backward(codes, scales)
    ctx.how = kind, x.shape[-1]


def _slopes(ctx: Any, slope: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
    codes, scales = ctx.saved_tensors
    return _product_backward(slope, codes, scales, *ctx.how) if ctx.needs_input_grad[0] else None, None, None, None, None, None


_product.register_autograd(_slopes, setup_context=_keep)


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is stored in few bits and is not trained.

    `weight` restores it as float32: peft reads device, type and, for DoRA, norms from it. `turned`: it replaces a Conv1D of transformers,
    which stores its matrix transposed.
    """

    def __init__(self, codes: nn.Parameter, scales: Tensor | None, bias: Tensor | None, kind: str, shape: tuple[int, int]) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = self.shape = shape
        self.kind, self.turned = kind, False
        self.codes = codes
        self.scales = None if scales is None else nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)  # type: ignore[assignment]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return restored(self.codes, self.scales, self.kind, self.shape, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if self.codes.dtype == dtype:
            return F.linear(x, self.codes, self.bias)
        return _product(x.to(dtype), self.codes, self.scales, self.bias, self.kind, self.out_features)

    def numbers(self) -> dict[int, int]:
        """The weights that each of its parameters stands for, by the parameter's id."""
        scales = {} if self.scales is None else {id(self.scales): 0}
        return {id(self.codes): self.in_features * self.out_features} | scales

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind}"


class FrozenEmbedding(nn.Embedding):
    """An embedding that is stored as bf16, not trained, and read as float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def store_frozen(inner: Any, kind: str) -> None:
    """Store the weights of a model of transformers in few bits, layer by layer: matrices of linear layers as `kind`, embeddings and the
    output matrix as bf16, and so the stacked matrices of experts if this is `kind`; all others become float32. Nothing is trainable
    afterwards. Raises ShoalError where most weights are elsewhere.
    """
    output = inner.get_output_embeddings()
    replaced = [one for one in inner.modules() if _is_replaced(one)]
    users = Counter(id(one.weight) for one in replaced)
    all_users = Counter(id(one._parameters["weight"]) for one in inner.modules() if one._parameters.get("weight") is not None)
    shared: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the original beside it, so that no other object gets its id
    places = [(parent, name, child) for parent in inner.modules() for name, child in parent.named_children() if _is_replaced(child)]
    for parent, name, child in places:
        place = id(child.weight)
        if users[place] != all_users[place]:
            continue  # an embedding of a special class has it too
        if users[place] > 1 and place not in shared:
            shared[place] = child.weight, nn.Parameter(child.weight.detach().to(torch.bfloat16), requires_grad=False)
        made = _frozen(child, "bf16" if child is output else kind, shared[place][1] if place in shared else None)
        setattr(parent, name, made)
        _drop_pages(child.weight, next(made.parameters()))
        child._parameters["weight"] = None  # what it held is freed before the next layer is stored
    inner.requires_grad_(False)
    for one in inner.modules():
        if kind == "bf16" and holds_experts(one):
            _to_bfloat16(one)
        elif not isinstance(one, FrozenLinear | FrozenEmbedding):
            _to_float32(one)
    inner.config.dtype = torch.float32
    _check_left(inner)


def _drop_pages(weight: Tensor, replaced_by: Tensor) -> None:
    """Let the system take back the memory of a weight that is not used any more: where it is a part of a mapped file, its pages would
    otherwise stay resident until the last tensor of that file is freed."""
    if sys.platform != "linux" or weight.device.type != "cpu" or not weight.is_contiguous() or weight.data_ptr() == replaced_by.data_ptr():
        return
    page = mmap.PAGESIZE
    start = -(-weight.data_ptr() // page) * page
    size = (weight.data_ptr() + weight.nbytes) // page * page - start
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def _is_replaced(module: nn.Module) -> bool:
    """A layer with one output is a gate, such as that of a shared expert: it stays as it is."""
    return type(module) in (nn.Linear, nn.Embedding, _conv1d()) and getattr(module, "out_features", 0) != 1


def _frozen(layer: Any, kind: str, given: nn.Parameter | None) -> nn.Module:
    """The layer that replaces another. `given`: its weight as bf16, where several layers share it."""
    kind = "bf16" if given is not None else kind
    if isinstance(layer, nn.Embedding):
        weight = given if given is not None else nn.Parameter(layer.weight.detach().to(torch.bfloat16), requires_grad=False)
        made = FrozenEmbedding(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, device="meta")
        made.weight = weight
        return made
    turned = isinstance(layer, _conv1d())
    weight_OI = layer.weight.detach().t() if turned else layer.weight.detach()
    codes, scales = (given, None) if given is not None else stored(weight_OI.contiguous(), kind)
    if not isinstance(codes, nn.Parameter):
        codes = nn.Parameter(codes, requires_grad=False)
    linear = FrozenLinear(codes, scales, layer.bias, kind, (weight_OI.shape[0], weight_OI.shape[1]))
    linear.turned = turned
    return linear


def holds_experts(module: nn.Module) -> bool:
    """Whether a module of transformers has the matrices of all experts of a layer."""
    stack = module._parameters.get("gate_up_proj")
    return stack is not None and stack.dim() == 3


def _to_bfloat16(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        stored_as = parameter.detach().to(torch.bfloat16)
        _drop_pages(parameter, stored_as)
        parameter.data = stored_as


def _to_float32(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.float()
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dtype in (torch.bfloat16, torch.float16):
            setattr(module, name, buffer.float())


def _check_left(inner: nn.Module) -> None:
    """Raises ShoalError where more than a few weights stay in float32."""
    kept = [(name, one) for name, one in inner.named_parameters() if one.dtype == torch.float32 and one.dim() > 1]
    tables = {id(one.weight) for one in inner.modules() if isinstance(one, nn.Embedding)}
    left = [(name, one) for name, one in kept if id(one) not in tables and not name.endswith(".scales")]
    whole = sum(one.in_features * one.out_features for one in inner.modules() if isinstance(one, FrozenLinear))
    stacks = [stack for one in inner.modules() if holds_experts(one) for stack in one.parameters(recurse=False)]
    whole += sum(stack.numel() for stack in stacks if stack.dtype == torch.bfloat16)
    if sum(one.numel() for _, one in left) > _MOST_LEFT * whole:
        largest = max(left, key=lambda one: one[1].numel())[0]
        instead = "bf16" if any(holds_experts(one) for one in inner.modules()) else "fp32"
        raise ShoalError(
            f"model.load: {type(inner).__name__} (model.pretrained) has weights outside of linear layers, such as {largest}, "
            f"and only linear layers and embeddings are stored in few bits: set it to {instead}"
        )


def plain_layer(layer: FrozenLinear | FrozenEmbedding) -> nn.Module:
    """The float32 layer of torch that a layer stands for."""
    weight = nn.Parameter(layer.weight.detach().float(), requires_grad=False)
    if isinstance(layer, FrozenEmbedding):
        return nn.Embedding(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, _weight=weight)
    made = nn.Linear(layer.in_features, layer.out_features, device="meta")
    made.weight, made.bias = weight, layer.bias
    return made
