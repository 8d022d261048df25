"""Layers with packed matrices, in place of a model's linear layers and of its token embedding.

Shapes: B batch, L tokens, N rows of a matrix, D columns, V vocabulary, X bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models.layers.embedding import TokenEmbedding
from shoal.models.packed.formats import KINDS, PackedShape, codes_and_scales, kind_for, packed, unpacked_rows
from shoal.models.packed.products import way_for

SMALL = 1 << 18
"""Numbers below which a matrix has int8 in place of int4: the fewer numbers a model has, the more it loses with 4 bits, and the less memory
it gains. Perplexity of stories15M, whose widest matrix has 442,368: +1.4 % instead of +5.9 %."""
_FEW_OUTPUTS = 16
"""Outputs below which a layer is not packed by itself, such as the one of a reward model."""


class PackedLayer(nn.Module):
    """A matrix whose parameter `weight` is its packed bytes [X], arranged as `way_for` says. It has no gradient."""

    def __init__(self, shape: PackedShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.nbytes, dtype=torch.uint8), requires_grad=False)

    def product(self, x: Tensor) -> Tensor:
        """The inputs times the matrix, in the type of the inputs."""
        found: Tensor = way_for(self.shape, x.device).multiply(x.reshape(-1, self.shape.columns), self.weight, self.shape)
        return found.to(x.dtype).view(*x.shape[:-1], self.shape.rows)

    def extra_repr(self) -> str:
        return f"{self.shape.columns} -> {self.shape.rows}, {self.shape.kind}"


class PackedLinear(PackedLayer):
    """A linear layer."""

    def __init__(self, shape: PackedShape, bias: nn.Parameter | None) -> None:
        super().__init__(shape)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) if self.bias is None else self.product(x) + self.bias.to(x.dtype)


class PackedEmbedding(PackedLayer):
    """A token embedding, which unpacks the rows of the tokens. A tied output matrix is its `product`."""

    can_lend = False

    def forward(self, input_ids_BL: Tensor) -> Tensor:
        codes, scales = codes_and_scales(self.weight, self.shape)
        ids = input_ids_BL.flatten()
        rows = unpacked_rows(codes[ids], None if scales is None else scales[ids])
        return rows.view(*input_ids_BL.shape, self.shape.columns)


def pack_layers(model: nn.Module, kind_of: Callable[[str, nn.Module], str | None]) -> dict[str, PackedShape]:
    """Put packed layers in place of linear layers and token embeddings of a model without weights. `kind_of`: the kind of a layer by the
    name of its weight; None: it stays. Returns the shapes by the names of the weights."""
    found: dict[str, PackedShape] = {}
    for prefix, parent in list(model.named_modules()):
        for key, child in list(parent.named_children()):
            name = f"{prefix}.{key}.weight" if prefix else f"{key}.weight"
            kind = kind_of(name, child) if can_pack(child) else None
            if kind is not None:
                found[name] = shape = PackedShape(kind, *child.weight.shape)
                setattr(parent, key, _made(child, shape))
    if "token_embedding.weight" in found and getattr(model, "output", None) is None:
        model.packed_output = model.token_embedding.product  # type: ignore[union-attr]
    elif "output.weight" in found:
        model.packed_output = model.output.product  # type: ignore[union-attr]
    return found


def can_pack(module: nn.Module) -> bool:
    """Whether a layer is a plain linear layer, or a token embedding of Shoal's own."""
    return type(module) in (nn.Linear, TokenEmbedding)


def _made(layer: Any, shape: PackedShape) -> PackedLayer:
    with layer.weight.device:
        if isinstance(layer, nn.Embedding):
            return PackedEmbedding(shape)
        return PackedLinear(shape, layer.bias)


def layer_kind(name: str, layer: Any, kind: str) -> str:
    """The kind of a layer where a model is packed as `kind`. The token embedding and the output matrix have at least 8 bits: errors in
    them are not evened out by other layers. So have small matrices."""
    rows, columns = layer.weight.shape
    if kind == "int4" and (isinstance(layer, nn.Embedding) or name == "output.weight" or rows * columns < SMALL):
        return "int8"
    return kind_for(kind, columns)


def pack_loaded(model: nn.Module, kind: str) -> None:
    """Pack the linear layers of a model with weights. Raises ShoalError where most weights are elsewhere."""
    whole = number_count(model)
    done = pack_linear_layers(model, kind)
    if 2 * done < whole:
        raise ShoalError(
            f"serving.weights: only linear layers are packed, and they have {done / whole:.0%} of the weights of this model: set it to bf16"
        )


@torch.no_grad()
def pack_linear_layers(model: nn.Module, weights: str) -> int:
    """Pack the linear layers of a model that does not learn, one by one where they are, for `serving.weights`; `auto` and fp32 leave them.
    The output matrix of Shoal's own models, a tied one, and layers with few outputs stay. Returns the numbers of the packed matrices.
    Raises ShoalError where an engine has cut the matrices."""
    if weights in ("auto", "fp32"):
        return 0
    output = model.inner.get_output_embeddings() if hasattr(model, "inner") else None  # type: ignore[operator, union-attr]
    kept = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    if output is None and isinstance(own := getattr(model, "output", None), nn.Linear):
        kept.add(id(own.weight))
    done = 0
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            if type(child) is nn.Linear and id(child.weight) not in kept and len(child.weight) >= _FEW_OUTPUTS:
                if hasattr(child.weight, "full_tensor"):
                    raise ShoalError(f"serving.weights: {weights} is for models that no engine has cut, as it did this one: set it to auto")
                name = "output.weight" if child is output else key
                shape = PackedShape(layer_kind(name, child, weights), *child.weight.shape)
                made, way = _made(child, shape), way_for(shape, child.weight.device)
                made.weight = nn.Parameter(way.arranged(packed(child.weight, shape.kind), shape), requires_grad=False)
                setattr(parent, key, made)
                done += shape.numbers
    return done


def packing(hold: Callable[[nn.Module], nn.Module], weights: str) -> Callable[[nn.Module], nn.Module]:
    """A function that keeps a model which does not learn as `hold` does, with its linear layers packed for `serving.weights`."""

    def hold_packed(network: nn.Module) -> nn.Module:
        held = hold(network)
        pack_linear_layers(held, weights)
        return held

    return hold_packed


def checked_kinds(given: Any) -> dict[str, str]:
    """The kinds of a model's layers by the names of their weights, as another machine sent them. Raises ShoalError."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and kind in KINDS for name, kind in given.items()):
        raise ShoalError(f"the server's kinds of packed weights are none of {', '.join(KINDS)}")
    return dict(given)


def arranged(get: Callable[[str], Tensor], shapes: Mapping[str, PackedShape], device: torch.device) -> Callable[[str], Tensor]:
    """Gets tensors as the layers read them on a device. `get` gets packed bytes. Raises ShoalError where their size differs."""

    def arrange(name: str) -> Tensor:
        raw, shape = get(name), shapes.get(name)
        if shape is None:
            return raw
        if raw.dtype != torch.uint8 or raw.shape != (shape.nbytes,):
            raise ShoalError(f"the tensor {name} is not {shape.nbytes} bytes of {shape.kind}")
        return way_for(shape, device).arranged(raw, shape)

    return arrange


def number_count(module: nn.Module) -> int:
    """Parameters of a module, those of packed matrices counted by their numbers."""
    return sum(count for count, _ in _sizes(module))


def byte_count(module: nn.Module) -> int:
    return sum(size for _, size in _sizes(module))


def _sizes(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Numbers and bytes of each parameter."""
    packed = {id(one.weight): one.shape.numbers for one in module.modules() if isinstance(one, PackedLayer)}
    for parameter in module.parameters():
        yield packed.get(id(parameter), parameter.numel()), parameter.nbytes
