"""Shoal's own GPT or mixture with the LoRA adapters of peft, for a Hugging Face model that it computes.

The model of peft stays in the network as `inner`, with its adapters and without the frozen weights. So adapters have the names, the
initial values and the order that they have beside the layers of transformers: updates, checkpoints and exports are the same. Each linear
layer here reads the adapters of the layers whose weights it joins.

Holds: the network computes what transformers and peft compute, up to rounding. No gradient is taken for a frozen weight.

Shapes: I input, O output, R ranks of all adapters of a layer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.models.gpt import Gpt
from shoal.models.huggingface.as_gpt import Get, GptConversion
from shoal.models.huggingface.frozen_weights import BLOCK, FrozenLinear
from shoal.models.huggingface.model import HuggingFace
from shoal.models.huggingface.tensor_names import plain_name
from shoal.models.layers.embedding import TokenEmbedding
from shoal.models.layers.rotary import to_adjacent_pairs
from shoal.models.moe import Moe
from shoal.models.transformer import Trunk

_ADAPTER = "default"
"""peft's name of the only adapter."""


class Adapter(NamedTuple):
    """The matrices beside some rows of a weight."""

    layer: Any
    """peft's layer, which has the matrices, their scale and their dropout."""
    first: int
    last: int
    head_size: int
    """Where the rows are queries or keys: their order differs from peft's (see `to_adjacent_pairs`). 0: it does not."""

    def b_OR(self) -> Tensor:
        """The second matrix, with its scale."""
        b_OR: Tensor = self.layer.lora_B[_ADAPTER].weight * self.layer.scaling[_ADAPTER]
        return to_adjacent_pairs(b_OR, self.head_size) if self.head_size else b_OR


def _with_adapters(product: Tensor, x: Tensor, adapters: tuple[Adapter, ...]) -> Tensor:
    """The product of a frozen weight, plus that of its adapters: two thin products, whatever the number of adapters."""
    if not adapters or adapters[0].layer.disable_adapters:
        return product
    a_RI = [one.layer.lora_A[_ADAPTER].weight for one in adapters]
    dropouts = [one.layer.lora_dropout[_ADAPTER] for one in adapters]
    if all(isinstance(dropout, nn.Identity) for dropout in dropouts):
        low = F.linear(x, a_RI[0] if len(a_RI) == 1 else torch.cat(a_RI))
    else:
        low = torch.cat([F.linear(dropout(x), a) for dropout, a in zip(dropouts, a_RI, strict=True)], dim=-1)
    b_RO = _joined(adapters, product.shape[-1]).t()
    return torch.addmm(product.flatten(0, -2), low.flatten(0, -2), b_RO).view(product.shape)


def _joined(adapters: tuple[Adapter, ...], rows: int) -> Tensor:
    """The second matrices of several adapters as one [O, R], which is zero outside of their rows and ranks."""
    parts = [one.b_OR() for one in adapters]
    if len(parts) == 1 and len(parts[0]) == rows:
        return parts[0]
    ranks, column, wide = sum(part.shape[1] for part in parts), 0, []
    for adapter, part in zip(adapters, parts, strict=True):
        after = ranks - column - part.shape[1]
        wide.append(F.pad(part, (column, after, adapter.first, rows - adapter.last)))
        column += part.shape[1]
    return torch.stack(wide).sum(0)


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with adapters."""

    adapters: tuple[Adapter, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return _with_adapters(super().forward(x), x, self.adapters)


class AdaptedFrozenLinear(FrozenLinear):
    """A linear layer in few bits with adapters."""

    adapters: tuple[Adapter, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return _with_adapters(super().forward(x), x, self.adapters)


class _FrozenTokenEmbedding(TokenEmbedding):
    """A token embedding that is stored as bf16 and read as float32."""

    def forward(self, input_ids_BL: Tensor, lends: bool = False) -> Any:
        return super().forward(input_ids_BL).float()


class _Place(NamedTuple):
    """Where a frozen weight was in the model of peft."""

    owner: nn.Module
    key: str
    shape: torch.Size
    shared_with: str
    """The first name of the same weight, which may be its own."""

    def take(self, row: torch.Size) -> Tensor:
        """The weight, which leaves its place, as rows of this shape."""
        value: Any = self.owner._parameters[self.key]
        self.owner._parameters[self.key] = None
        tensor: Tensor = value.detach()
        return tensor if tensor.dim() == 1 + len(row) else tensor.view(-1, *row)


class AdaptedTrunk(Trunk):
    """A model with frozen weights, and the model of peft whose adapters it reads."""

    has_adapters = True
    inner: Any
    conversion: GptConversion
    places: dict[str, _Place]
    """By the names of the frozen weights in the model's own files."""

    def without_adapters(self) -> AbstractContextManager[None]:
        """Context: the network without its LoRA adapters."""
        context: AbstractContextManager[None] = self.inner.disable_adapter()
        return context

    @property
    def output_weight(self) -> Tensor:
        output = self.token_embedding if self.output is None else self.output
        table: Tensor = output.codes if isinstance(output, FrozenLinear) else output.weight
        return table if torch.is_autocast_enabled(table.device.type) else table.float()

    def as_huggingface(self) -> HuggingFace:
        """The model of transformers and peft again. This object must not be used afterwards."""
        given = dict[str, nn.Parameter]()
        for name, value in self.named_parameters():
            if self.conversion.owns(name):
                for source, part in self.conversion.originals(name, value.detach()).items():
                    given[source] = nn.Parameter(part.view(self.places[source].shape), requires_grad=False)
        for place in self.places.values():
            place.owner._parameters[place.key] = given[place.shared_with]
        return HuggingFace(self.inner)


class AdaptedGpt(AdaptedTrunk, Gpt):
    """A `Gpt` with adapters."""


class AdaptedMoe(AdaptedTrunk, Moe):
    """A mixture with adapters. Its routers and experts are frozen."""


def reason_against(network: HuggingFace, conversion: GptConversion) -> str:
    """Why Shoal's own layers cannot read the adapters of a network; empty: they can."""
    joined = {source for path in conversion.linear_layers() for source in _source_modules(conversion, path)}
    others = [name for name, one in _modules(network).items() if hasattr(one, "lora_A") and name not in joined]
    if others:
        return f"an adapter is beside {others[0].removeprefix('inner.')}, which is no linear layer of a block"
    for one in network.inner.modules():
        if isinstance(one, FrozenLinear) and one.kind == "nf4" and one.in_features % BLOCK:
            return f"rows of {one.in_features} weights are not whole blocks of {BLOCK} (model.load: nf4)"
    return ""


def own_layers(network: HuggingFace, conversion: GptConversion) -> AdaptedGpt | AdaptedMoe:
    """The network with Shoal's own layers. Its frozen weights move there one by one; the network must not be used afterwards."""
    made: Any = conversion.make(AdaptedMoe if isinstance(conversion.settings, schema.Moe) else AdaptedGpt)
    theirs = _modules(network)
    made.places = _places(network)
    if any(isinstance(one, FrozenLinear) for one in theirs.values()):
        with torch.device("meta"):
            made.token_embedding = _FrozenTokenEmbedding(conversion.vocab_size, conversion.settings.hidden_size)
    for path in (*conversion.linear_layers(), *(["output"] if made.output is not None else [])):
        parent, _, name = path.rpartition(".")
        adapters = _adapters_of(conversion, path, theirs)
        layer = _like(made.get_submodule(path), theirs[_source_modules(conversion, path)[0]], bool(adapters))
        if adapters:
            layer.adapters = adapters
        setattr(made.get_submodule(parent), name, layer)
    for name, slot in list(made.named_parameters()):
        path, _, key = name.rpartition(".")
        value = conversion.tensor(name, _taking(made.places, slot.shape[1:]))
        made.get_submodule(path)._parameters[key] = nn.Parameter(value, requires_grad=False)
    for place in made.places.values():
        place.owner._parameters[place.key] = None  # matrices that are shared with the embedding
    made.inner = network.inner
    adapted: AdaptedGpt | AdaptedMoe = made.train()
    return adapted


def _taking(places: dict[str, _Place], row: torch.Size) -> Get:
    return lambda source: places[source].take(row)


def _modules(network: HuggingFace) -> dict[str, Any]:
    """The modules by their names in the model's own files."""
    return {plain_name(f"inner.{name}"): one for name, one in network.inner.named_modules() if not name.endswith(".base_layer")}


def _source_modules(conversion: GptConversion, path: str) -> list[str]:
    return [source.rpartition(".")[0] for source in conversion.sources(f"{path}.weight")]


def _places(network: HuggingFace) -> dict[str, _Place]:
    found, first = dict[str, _Place](), dict[int, str]()
    for path, owner in network.inner.named_modules():
        for key, value in owner._parameters.items():
            if value is not None and not value.requires_grad:
                name = plain_name(f"inner.{path}.{key}")
                found[name] = _Place(owner, key, value.shape, first.setdefault(id(value), name))
    return found


def _adapters_of(conversion: GptConversion, path: str, theirs: dict[str, Any]) -> tuple[Adapter, ...]:
    """The adapters beside a layer that joins several."""
    found, first = list[Adapter](), 0
    turned = "query_key_value" in path and not conversion.gpt2
    for number, source in enumerate(_source_modules(conversion, path)):
        layer = theirs[source]
        last = first + (layer.out_features if hasattr(layer, "out_features") else layer.nf)  # GPT-2's layers have nf
        if hasattr(layer, "lora_A"):
            found.append(Adapter(layer, first, last, conversion.head_size if turned and number < 2 else 0))
        first = last
    return tuple(found)


def _like(linear: nn.Linear, theirs: Any, adapted: bool) -> Any:
    """A layer without weights, for those of one of the layers that it joins."""
    stored, shape = getattr(theirs, "base_layer", theirs), (linear.out_features, linear.in_features)
    if not isinstance(stored, FrozenLinear):
        return (AdaptedLinear if adapted else nn.Linear)(shape[1], shape[0], bias=linear.bias is not None, device="meta")
    per_byte, block = (2, BLOCK) if stored.kind == "nf4" else (1, 0)
    codes = torch.empty(shape[0], shape[1] // per_byte, dtype=stored.codes.dtype, device="meta")
    scales = None if stored.scales is None else torch.empty((shape[0], shape[1] // block) if block else shape[:1], device="meta")
    kind = AdaptedFrozenLinear if adapted else FrozenLinear
    return kind(nn.Parameter(codes, requires_grad=False), scales, linear.bias, stored.kind, shape)
