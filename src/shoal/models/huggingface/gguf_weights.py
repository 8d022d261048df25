"""The weights of a GGUF file under the names of Shoal's own GPT, read and packed block by block from the mapped file."""

from __future__ import annotations

import copy
import mmap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.huggingface.as_gpt import GptConversion
from shoal.models.huggingface.llama_cpp import GGUF_NAMES, ONE_PRODUCT
from shoal.models.layers.rotary import to_adjacent_pairs
from shoal.models.packed.formats import joined, packed_rows, row_blocks
from shoal.models.packed.gguf_formats import FORMATS, GgufFormat, floats, int4_rows
from shoal.models.packed.model import joint_kind
from shoal.models.stages import required_tensors
from shoal.untrusted.gguf_header import GgufHeader

_HALF_PAIRS = ("qwen2", "qwen3")
"""Architectures whose files have rotary pairs (i, i + half), as transformers has them."""
_FACTORS = "rope_freqs.weight"
ARCHITECTURES = ("llama", "gpt2", *_HALF_PAIRS)


class GgufWeights:
    """The tensors of a file. They are read when they are asked for."""

    def __init__(self, file: Path, header: GgufHeader, own: GptConversion) -> None:
        """Raises ShoalError where the file lacks a tensor, or has one in a format that is not read."""
        self.file, self.header = file, header
        with file.open("rb") as content:
            self._mapped = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_COPY)
        self._content = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.own = self._with_factors(own)
        self._fused = own.gpt2
        self._head_size = own.variant.head_size or own.settings.hidden_size // own.settings.num_heads
        if header.architecture not in ARCHITECTURES:
            raise ShoalError(f"{file.name}: the tensors of {header.architecture or 'an unnamed architecture'} are not read as they are")
        self.skeleton = self.own.make()
        self.names = frozenset(required_tensors(self.skeleton))
        for name, like in required_tensors(self.skeleton).items():
            shapes = [self._checked(source)[0] for source in self._sources(name)]
            if (sum(shape[0] for shape in shapes), *shapes[0][1:]) != tuple(like.shape):
                raise ShoalError(f"{file.name}: the tensor {name} has other sizes than the model")

    def stored_kind(self, name: str) -> str | None:
        """The packed kind that holds a tensor. Tables of tokens are read row by row, which int4 is not made for."""
        found = joint_kind({self._format(source).kind for source in self._sources(name)})
        return "int8" if found == "int4" and name == "token_embedding.weight" else found

    def repacked(self) -> Counter[str]:
        """How many matrices have formats that become another kind, by format and kind."""
        used = [self._format(source) for name in self.names for source in self._sources(name)]
        return Counter(f"{one.name} as {one.kind}" for one in used if one.repacked)

    def get(self, name: str, kind: str | None) -> Tensor:
        """A tensor in float32, or a matrix packed as `kind`. Pages of the file that were read do not stay resident."""
        found = self._read(name, kind)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)
        return found

    def _read(self, name: str, kind: str | None) -> Tensor:
        if kind is None:
            return torch.cat([self._floats(source) for source in self._sources(name)])
        parts = [(raw, self._format(source)) for source in self._sources(name) for raw in self._raw_rows(source)]
        both_int4 = (kind == stored.kind == "int4" for _, stored in parts)
        return joined(
            [
                int4_rows(raw, stored) if as_is else packed_rows(floats(raw, stored), kind)
                for (raw, stored), as_is in zip(parts, both_int4, strict=True)
            ]
        )

    def _floats(self, source: str) -> Tensor:
        shape, kind = self.header.tensors[source].shape, self._format(source)
        found = torch.cat([floats(raw, kind) for raw in self._raw_rows(source)]).view(shape)
        if len(shape) == 1 and self._is_turned(source):
            found = to_adjacent_pairs(found, self._head_size)
        return found

    def _sources(self, name: str) -> list[str]:
        """The names, in the file, of the parts of a tensor."""
        module, _, kind = name.rpartition(".")
        part, prefix = module, ""
        if module.startswith("blocks."):
            _, layer, part = module.split(".", 2)
            prefix = f"blk.{layer}."
        names = ONE_PRODUCT.get(part) if self._fused else None
        return [f"{prefix}{one}.{kind}" for one in names or GGUF_NAMES[part]]

    def _format(self, source: str) -> GgufFormat:
        return FORMATS[self.header.tensors[source].format]

    def _checked(self, source: str) -> tuple[tuple[int, ...], int]:
        """The shape of a tensor, and the bytes of one of its rows."""
        if source not in self.header.tensors:
            raise ShoalError(f"{self.file.name} has no tensor {source}")
        shape, number, offset = self.header.tensors[source]
        if (kind := FORMATS.get(number)) is None:
            raise ShoalError(f"{self.file.name}: the tensor {source} has the format {number}, which is not read as it is")
        if not 1 <= len(shape) <= 2 or 0 in shape or shape[-1] % kind.block:
            raise ShoalError(f"{self.file.name}: the tensor {source} has the shape {shape}, which {kind.name} does not have")
        size = kind.row_bytes(shape[-1])
        if offset + size * (shape[0] if len(shape) == 2 else 1) > len(self._content):
            raise ShoalError(f"{self.file.name}: the tensor {source} reaches beyond the end of the file")
        return shape, size

    def _raw_rows(self, source: str) -> Iterator[Tensor]:
        """The bytes of a tensor, some rows at a time, those of a matrix in the order in which Shoal's layers have them."""
        shape, size = self._checked(source)
        offset, rows = self.header.tensors[source].offset, shape[0] if len(shape) == 2 else 1
        raw = self._content[offset : offset + rows * size].view(rows, size)
        turned = len(shape) == 2 and self._is_turned(source)
        order = to_adjacent_pairs(torch.arange(rows), self._head_size) if turned else None
        for block in row_blocks(rows, shape[-1]):
            yield raw[block] if order is None else raw[order[block]]

    def _is_turned(self, source: str) -> bool:
        """Whether a tensor has rotary pairs in another order than Shoal's layers."""
        return self.header.architecture in _HALF_PAIRS and any(part in source for part in (".attn_q.", ".attn_k.", "_q_norm.", "_k_norm."))

    def _with_factors(self, own: GptConversion) -> GptConversion:
        """The conversion with the factors of the rotary frequencies that the file has beside its weights."""
        if _FACTORS not in self.header.tensors or own.frequencies is None:
            return own
        shape, size = self._checked(_FACTORS)
        if shape != tuple(own.frequencies.shape):
            raise ShoalError(f"{self.file.name}: {_FACTORS} has {shape} numbers, and a head has {tuple(own.frequencies.shape)} pairs")
        offset, changed = self.header.tensors[_FACTORS].offset, copy.copy(own)
        changed.frequencies = own.frequencies / floats(self._content[offset : offset + size].view(1, -1), self._format(_FACTORS))[0]
        return changed
