"""LoRA adapters beside one copy of a model's weights. In a batch each row has an adapter of its own, or none.

Holds: a row gets what the model with this adapter merged computes, up to rounding, whatever the other rows have. A matrix that fits no
linear layer is refused before anything is changed.

One product with the first matrices of all adapters of the batch, whose results of other rows are set to zero, takes less time than a
product for each adapter as long as rows have few tokens. On one core of a Xeon, 576 → 1,536, rank 16, 8 rows with 4 adapters: 62 µs and
177 µs beside 577 µs of the layer, and 322 µs with matrices gathered for each row. Prompts of 64 tokens: 2,029, 1,483 and 1,300 µs beside
11,602 µs. SmolLM2-135M in 4 bits with rank 16 at all matrices of the blocks, 8 answers: 95 tokens per second of processor time without
adapters, 75 with one, 64 with four.

Shapes: B rows, L tokens, M tokens of all rows, I input, O output, P outputs of a part, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models.huggingface.adapters import Adapters, LoraPair
from shoal.models.huggingface.as_gpt import GptConversion
from shoal.models.layers.rotary import to_adjacent_pairs
from shoal.models.packed.layers import PackedLinear

_MOST_RANK = 1024
"""Of one matrix. Higher ranks take more time than the weight that they change."""
_FEW_TOKENS = 8
"""Tokens of a row up to which one product with the matrices of all adapters is used."""
_WITHOUT = ""
"""The name of no adapter."""


class _LayerPart(NamedTuple):
    """Rows [first, last) of a layer, which are one weight of the model's own files."""

    path: str
    first: int
    last: int
    head_size: int
    """Where the rows are queries or keys, whose order differs (see `to_adjacent_pairs`). 0: it does not."""


class _PartProduct(NamedTuple):
    """What is added to the outputs [first, last) of a layer."""

    first: int
    last: int
    rank: int
    """The first of its rows in the first matrix."""
    b_PR: Tensor
    """With the scale."""


class _LowRank(NamedTuple):
    """What an adapter, or several, add to one layer."""

    a_RI: Tensor
    parts: tuple[_PartProduct, ...]
    gain_O: Tensor | None = None
    """DoRA: what the outputs of the layer itself are multiplied by."""

    def like(self, x: Tensor) -> _LowRank:
        """The matrices in the type of the inputs."""
        parts = tuple(part._replace(b_PR=part.b_PR.to(x)) for part in self.parts)
        return _LowRank(self.a_RI.to(x), parts, None if self.gain_O is None else self.gain_O.to(x))

    @property
    def nbytes(self) -> int:
        return self.a_RI.nbytes + sum(part.b_PR.nbytes for part in self.parts) + (0 if self.gain_O is None else self.gain_O.nbytes)

    def add_to(self, y_MO: Tensor, low_MR: Tensor) -> None:
        """Add the second products. `low_MR`: the results of the first."""
        for first, last, rank, b_PR in self.parts:
            y_MO[:, first:last].addmm_(low_MR[:, rank : rank + b_PR.shape[1]], b_PR.t())


class _RowChoice(NamedTuple):
    """Which rows of a batch have which adapter."""

    names: tuple[str, ...]
    """Of each row."""
    present: tuple[str, ...]
    """The adapters that a row has, each once."""
    indices: dict[tuple[str, ...], Tensor]
    """The place of each row's adapter [B, 1] among some of them; −1: it is not among them."""

    def places(self, among: tuple[str, ...], device: torch.device) -> Tensor:
        if among not in self.indices:
            places = [[among.index(name) if name in among else -1] for name in self.names]
            self.indices[among] = torch.tensor(places, device=device)
        return self.indices[among]


class _AdaptedLayer:
    """A linear layer, and the matrices of all adapters that change it."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.changes: dict[str, _LowRank] = {}
        self._joined: tuple[tuple[str, ...], _LowRank, Tensor] | None = None
        """The matrices of the adapters of the last batch with few tokens per row, as one: their names, and which of them has each rank."""

    def add_to(self, x: Tensor, y: Tensor, rows: _RowChoice) -> Tensor:
        """The outputs of the layer with those of the adapters, which are written into them."""
        present = tuple(name for name in rows.present if name in self.changes)
        if not present:
            return y
        count = len(rows.names)
        x_BLI, y_BLO = x.reshape(count, -1, x.shape[-1]), y.reshape(count, -1, y.shape[-1])
        changes = [self._change(name, x) for name in present]
        if any(change.gain_O is not None for change in changes):
            y_BLO = self._scaled(y_BLO, rows)
        if rows.present == present and len(present) == 1 and _WITHOUT not in rows.names:
            changes[0].add_to(y_BLO.flatten(0, 1), F.linear(x_BLI.flatten(0, 1), changes[0].a_RI))
        elif (tokens := x_BLI.shape[1]) <= _FEW_TOKENS:
            places_M1 = rows.places(present, x.device).repeat_interleave(tokens, 0)
            self._add_together(x_BLI.flatten(0, 1), y_BLO.flatten(0, 1), places_M1, present, changes)
        else:
            for name, change in zip(present, changes, strict=True):
                for row in [row for row, one in enumerate(rows.names) if one == name]:
                    change.add_to(y_BLO[row], F.linear(x_BLI[row], change.a_RI))
        return y_BLO.view(y.shape)

    def _add_together(self, x_MI: Tensor, y_MO: Tensor, places_M1: Tensor, present: tuple[str, ...], changes: list[_LowRank]) -> None:
        """One product with all first matrices, of which each row keeps the results of its own adapter."""
        if self._joined is None or self._joined[0] != present:
            self._joined = present, *_side_by_side(changes, x_MI.device)
        _, joined, owner_R = self._joined
        joined.add_to(y_MO, F.linear(x_MI, joined.a_RI).masked_fill(places_M1 != owner_R, 0))

    def _scaled(self, y_BLO: Tensor, rows: _RowChoice) -> Tensor:
        """The outputs of the layer, those of rows with DoRA multiplied. Its bias is not."""
        ones_O = torch.ones(y_BLO.shape[-1], dtype=y_BLO.dtype, device=y_BLO.device)
        gains = [self.changes[name].gain_O if name in self.changes else None for name in rows.names]
        gain_B1O = torch.stack([ones_O if gain is None else gain for gain in gains])[:, None]
        bias_O: Any = getattr(self.layer, "bias", None)
        if bias_O is None:
            return y_BLO * gain_B1O
        bias_O = bias_O.to(y_BLO.dtype)
        return (y_BLO - bias_O) * gain_B1O + bias_O

    def _change(self, name: str, x: Tensor) -> _LowRank:
        change = self.changes[name]
        if change.a_RI.dtype != x.dtype or change.a_RI.device != x.device:
            self.changes[name] = change = change.like(x)
        return change


def _side_by_side(changes: Sequence[_LowRank], device: torch.device) -> tuple[_LowRank, Tensor]:
    """The matrices of several adapters as one, and to which of them each rank belongs."""
    a_RI, parts, owners = list[Tensor](), list[_PartProduct](), list[int]()
    for first, last in sorted({(part.first, part.last) for change in changes for part in change.parts}):
        rank, found = len(owners), list[Tensor]()
        for owner, change in enumerate(changes):
            for part in change.parts:
                if (part.first, part.last) == (first, last):
                    found.append(part.b_PR)
                    a_RI.append(change.a_RI[part.rank : part.rank + part.b_PR.shape[1]])
                    owners += [owner] * part.b_PR.shape[1]
        parts.append(_PartProduct(first, last, rank, torch.cat(found, 1)))
    return _LowRank(torch.cat(a_RI), tuple(parts)), torch.tensor(owners, device=device)


class BatchedLora:
    """All adapters of a model. Its linear layers add what the adapters of the rows give, inside of `rows`."""

    def __init__(self, model: Any, conversion: GptConversion | None) -> None:
        """`conversion`: how the model follows from that of Hugging Face, if Shoal's own layers compute it."""
        self.model, self.names = model, list[str]()
        self._parts = _parts_of_layers(model, conversion)
        self._layers: dict[str, _AdaptedLayer] = {}
        self._rows: _RowChoice | None = None

    @property
    def nbytes(self) -> int:
        return sum(change.nbytes for layer in self._layers.values() for change in layer.changes.values())

    @torch.inference_mode()
    def add(self, name: str, adapters: Adapters) -> None:
        """Read the matrices of one adapter. Raises ShoalError where they fit no linear layer, and changes nothing then."""
        by_layer: dict[str, list[tuple[_LayerPart, LoraPair]]] = {}
        for module, pair in adapters.pairs.items():
            if module not in self._parts:
                raise ShoalError(
                    f"the adapter {name} changes {module}, which is no linear layer of a block of this model: it belongs to another "
                    "model, or must be merged with peft"
                )
            part = self._parts[module]
            _check_pair(name, module, pair, part.last - part.first, _width(self.model.get_submodule(part.path)))
            by_layer.setdefault(part.path, []).append((part, pair))
        found = {path: _joined_parts(self.model.get_submodule(path), parts) for path, parts in by_layer.items()}
        for path, change in found.items():
            if path not in self._layers:
                self._layers[path] = made = _AdaptedLayer(self.model.get_submodule(path))
                made.layer.register_forward_hook(self._hook(made))
            self._layers[path].changes[name] = change
        self.names.append(name)

    def _hook(self, layer: _AdaptedLayer) -> Any:
        def add_adapters(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output if self._rows is None else layer.add_to(inputs[0], output, self._rows)

        return add_adapters

    @contextmanager
    def rows(self, names: Sequence[str]) -> Iterator[None]:
        """Context: the rows of the next batches have these adapters; the empty name is none."""
        present = tuple(dict.fromkeys(name for name in names if name != _WITHOUT))
        self._rows = _RowChoice(tuple(names), present, {}) if present else None
        try:
            yield
        finally:
            self._rows = None


def _check_pair(name: str, module: str, pair: LoraPair, rows: int, columns: int) -> None:
    if pair.b_OR.shape[0] != rows or pair.a_RI.shape[1] != columns:
        raise ShoalError(f"the adapter {name} has another shape at {module} than the model: it belongs to another model")
    if pair.a_RI.shape[0] > _MOST_RANK:
        raise ShoalError(
            f"the adapter {name} has rank {pair.a_RI.shape[0]} at {module}; at most {_MOST_RANK} is served: merge it with peft"
        )
    tensors = [one for one in (pair.a_RI, pair.b_OR, pair.magnitude_O) if one is not None]
    if not all(one.is_floating_point() and bool(one.isfinite().all()) for one in tensors):
        raise ShoalError(f"the adapter {name} has values at {module} that are not finite numbers: it is damaged")


def _parts_of_layers(model: Any, conversion: GptConversion | None) -> dict[str, _LayerPart]:
    """The parts of linear layers that adapters can change, by the names of the modules in the model's own files."""
    if conversion is None:
        output = model.inner.get_output_embeddings()
        layers = {name: one for name, one in model.inner.named_modules() if one is not output and _is_linear(one)}
        return {name: _LayerPart(f"inner.{name}", 0, _height(one), 0) for name, one in layers.items()}
    found = dict[str, _LayerPart]()
    for path in conversion.linear_layers():
        names = [source.removeprefix("inner.").rpartition(".")[0] for source in conversion.sources(f"{path}.weight")]
        turns, first = "query_key_value" in path and not conversion.gpt2, 0
        for number, (name, rows) in enumerate(zip(names, _part_rows(model.get_submodule(path), path, conversion), strict=True)):
            found[name] = _LayerPart(path, first, first + rows, conversion.head_size if turns and number < 2 else 0)
            first += rows
    return found


def _part_rows(layer: nn.Module, path: str, conversion: GptConversion) -> list[int]:
    """The rows of each weight that a layer joins."""
    count, settings = len(conversion.sources(f"{path}.weight")), conversion.settings
    if "query_key_value" in path and count == 3:
        kv_heads = settings.num_kv_heads or settings.num_heads
        return [heads * conversion.head_size for heads in (settings.num_heads, kv_heads, kv_heads)]
    return [_height(layer) // count] * count


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | PackedLinear) or type(layer).__name__ == "Conv1D"


def _height(layer: Any) -> int:
    """The outputs of a layer. The weight of a Conv1D is transposed."""
    return int(layer.shape.rows if isinstance(layer, PackedLinear) else layer.weight.shape[type(layer).__name__ == "Conv1D"])


def _width(layer: Any) -> int:
    return int(layer.shape.columns if isinstance(layer, PackedLinear) else layer.weight.shape[type(layer).__name__ != "Conv1D"])


def _joined_parts(layer: nn.Module, parts: list[tuple[_LayerPart, LoraPair]]) -> _LowRank:
    """The matrices beside the parts of a layer."""
    a_RI, found, rank = torch.cat([pair.a_RI.float() for _, pair in parts]), list[_PartProduct](), 0
    for part, pair in parts:
        b_PR = _reordered(pair.scale * pair.b_OR.float(), part)
        found.append(_PartProduct(part.first, part.last, rank, b_PR))
        rank += b_PR.shape[1]
    if all(pair.magnitude_O is None for _, pair in parts):
        return _LowRank(a_RI, tuple(found))
    gain_O, weight_OI = torch.ones(_height(layer)), _weight_of(layer)
    for i, (part, pair) in enumerate(parts):
        if pair.magnitude_O is not None:
            first, last, rank, b_PR = found[i]
            norms_P = (weight_OI[first:last] + b_PR @ a_RI[rank : rank + b_PR.shape[1]]).norm(dim=1)
            gain_O[first:last] = _reordered(pair.magnitude_O.float(), part) / norms_P
            found[i] = _PartProduct(first, last, rank, b_PR * gain_O[first:last, None])
    return _LowRank(a_RI, tuple(found), gain_O)


def _reordered(rows: Tensor, part: _LayerPart) -> Tensor:
    return to_adjacent_pairs(rows, part.head_size).contiguous() if part.head_size else rows


def _weight_of(layer: Any) -> Tensor:
    """The weight of a layer as [O, I], whatever its form: by the layer's own product."""
    bias: Any = getattr(layer, "bias", None)
    device, dtype = layer.weight.device, torch.float32 if isinstance(layer, PackedLinear) else layer.weight.dtype
    weight_OI: Tensor = layer(torch.eye(_width(layer), device=device, dtype=dtype)).float().t()
    return (weight_OI if bias is None else weight_OI - bias.float()[:, None]).cpu()
