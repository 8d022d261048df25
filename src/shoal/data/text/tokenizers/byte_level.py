"""Each byte of the UTF-8 text is a token; one more id ends a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from shoal.data.text.tokenizers.interface import FORMAT, OWN_FILE, Ids, Tokenizer


class ByteTokenizer(Tokenizer):
    """256 bytes and an end-of-text id. It needs no training and encodes every text."""

    name = "bytes"
    vocab_size = 257
    eos_id = 256
    pad_id = 256

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", "replace")

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        FORMAT.write(Path(folder) / OWN_FILE, {"kind": "bytes"})
