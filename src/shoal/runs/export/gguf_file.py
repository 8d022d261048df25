"""Writes a language model as a GGUF file, which llama.cpp reads: weights, vocabulary and chat template.

Matrices get the chosen type; vectors, norms and learned positions stay float32. In q4_0 the embedding and the output matrix are q8_0, since
4 bits there cost most of the quality. A matrix whose rows cannot be cut into blocks of 32 numbers stays f16.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from shoal.data import Tokenizer
from shoal.data.text.tokenizers.llama_cpp import LlamaCppVocabulary, vocabulary_for_llama_cpp
from shoal.errors import ShoalError
from shoal.files import make_folder, writing
from shoal.models.huggingface.adapters import Adapters
from shoal.models.huggingface.llama_cpp import LlamaCppModel, for_llama_cpp
from shoal.runs.export import GGUF_TYPES

_PLAIN = ("position_embd.weight", "rope_freqs.weight")
_LARGEST_F16 = 65_504.0
_BLOCK = 32
_QUANTIZED = ("q8_0", "q4_0")


def gguf_package() -> Any:
    """The package that writes the format. Raises ShoalError where it is missing."""
    try:
        import gguf
    except ImportError:
        raise ShoalError("writing a GGUF file needs the package gguf: pip install gguf") from None
    return gguf


def write_gguf(inner: Any, tokenizer: Tokenizer, kind: str, file: Path, name: str, warn: Callable[[str], None]) -> None:
    """Write a model of transformers and its tokenizer to a file, which appears whole or not at all. Raises ShoalError."""
    package, model = gguf_package(), for_llama_cpp(inner)
    vocabulary = vocabulary_for_llama_cpp(tokenizer, inner.config.vocab_size)
    for note in (*model.notes, *vocabulary.notes):
        warn(note)
    with _appearing(file) as partial:
        writer = package.GGUFWriter(str(partial), model.architecture)
        _add_fields(writer, package, model, kind, name)
        _add_vocabulary(writer, vocabulary)
        _write_tensors(writer, package, [*_plan(model.tensors(), kind, warn)], model.tensors())


def write_gguf_adapters(inner: Any, adapters: Adapters, kind: str, file: Path, name: str) -> None:
    """Write LoRA matrices beside a model of transformers to a file, which llama.cpp loads beside the model's. Raises ShoalError."""
    if kind in _QUANTIZED:
        raise ShoalError(f"adapters are small, and are not quantised: choose f16, bf16 or f32 instead of {kind}")
    package, model = gguf_package(), for_llama_cpp(inner)
    with _appearing(file) as partial:
        writer = package.GGUFWriter(str(partial), model.architecture)
        writer.add_type("adapter")
        writer.add_name(name)
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 0.0)  # the scale is in the matrices
        planned = [*_plan(model.adapter_tensors(adapters), kind, lambda note: None)]
        _write_tensors(writer, package, planned, model.adapter_tensors(adapters))


@contextmanager
def _appearing(file: Path) -> Iterator[Path]:
    """The name under which a file is written; it gets its own at the end. Raises ShoalError."""
    if file.exists():
        raise ShoalError(f"{file} is there already: choose another name")
    make_folder(file.parent)
    partial = file.with_name(f".{file.name}.partial")
    try:
        with writing(file):
            yield partial
            partial.rename(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _add_fields(writer: Any, package: Any, model: LlamaCppModel, kind: str, name: str) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(package.LlamaFileType[GGUF_TYPES[kind]])
    if kind in _QUANTIZED:
        writer.add_quantization_version(package.GGML_QUANT_VERSION)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in model.fields.items():
        add[type(value)](f"{model.architecture}.{key}", value)


def _add_vocabulary(writer: Any, vocabulary: LlamaCppVocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    ids = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "unknown": writer.add_unk_token_id}
    for key, number in vocabulary.ids.items():
        ids.get(key, writer.add_pad_token_id)(number)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    writer.add_add_space_prefix(vocabulary.add_space_prefix)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)


class PlannedTensor(NamedTuple):
    """A tensor of the file: its name, its shape, and the type in which it is written."""

    name: str
    shape: tuple[int, ...]
    kind: str


def _plan(tensors: Iterator[tuple[str, Tensor]], kind: str, warn: Callable[[str], None]) -> Iterator[PlannedTensor]:
    """The types of all tensors. Raises ShoalError where a number does not fit its type."""
    uneven = 0
    for name, value in tensors:
        chosen = _type_of(name, value, kind)
        uneven += chosen == "f16" and kind in _QUANTIZED
        largest = float(value.abs().max())
        if not largest < float("inf"):
            raise ShoalError(f"the tensor {name} has numbers that are not finite: export another checkpoint")
        if chosen == "f16" and largest > _LARGEST_F16:
            raise ShoalError(f"the tensor {name} has a number of {largest:.3g}, and f16 ends at {_LARGEST_F16:,.0f}: choose bf16 or f32")
        yield PlannedTensor(name, tuple(value.shape), chosen)
    if uneven:
        warn(f"{uneven} matrices stay f16: their rows cannot be cut into blocks of {_BLOCK} numbers")


def _type_of(name: str, value: Tensor, kind: str) -> str:
    if value.dim() < 2 or name in _PLAIN:
        return "f32"
    if kind not in _QUANTIZED:
        return kind
    if value.shape[-1] % _BLOCK:
        return "f16"
    return "q8_0" if name in ("token_embd.weight", "output.weight") else kind


def _write_tensors(writer: Any, package: Any, planned: list[PlannedTensor], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write header, fields and tensors, with one converted tensor at a time in memory."""
    kinds = [package.GGMLQuantizationType[one.kind.upper()] for one in planned]
    for one, kind in zip(planned, kinds, strict=True):
        shape = package.quant_shape_to_byte_shape(one.shape, kind)
        writer.add_tensor_info(one.name, shape, np.dtype(np.uint8), math.prod(shape), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for kind, (_, value) in zip(kinds, tensors, strict=True):
        writer.write_tensor_data(package.quants.quantize(value.contiguous().numpy(), kind))
    writer.flush()
    for file in writer.fout or ():
        os.fsync(file.fileno())
    writer.close()
