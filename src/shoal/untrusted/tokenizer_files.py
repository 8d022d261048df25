"""Tokenizers that somebody else wrote: what their files, a text's encoding and a model's vocabulary may cost.

Holds: a vocabulary's highest id, its longest token, and the factor by which a text may grow before and after it is encoded are bounded.
The time is not: a pattern of a tokenizer can need time that grows with the square of a text's length. A server therefore encodes in a
process with a deadline (`limited_process.py`).
"""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError

MOST_FILE_BYTES = 256 << 20
_LONGEST_TOKEN = 16_384
_MOST_GROWTH = 1000
_MOST_WORD_LENGTH = 1000
_FREE_IDS = 100_000
"""Ids that a vocabulary may leave out, beside as many as it has."""
_TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")


def check_tokenizer_folder(folder: Path) -> None:
    """Raises ShoalError where a file that is read whole is none, or is larger than any such file."""
    for file in folder.iterdir():
        if file.suffix in _TEXT_SUFFIXES:
            check_tokenizer_file(file)


def check_tokenizer_file(file: Path) -> None:
    try:
        found = file.stat()
    except OSError as error:
        raise ShoalError(f"{file} cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ShoalError(f"{file} is no regular file: remove it, or put the file back")
    if found.st_size > MOST_FILE_BYTES:
        raise ShoalError(f"{file} is refused: it has {found.st_size:,} bytes, and such a file may have {MOST_FILE_BYTES:,}")


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Raises ShoalError where a tokenizer of the `tokenizers` library exceeds a bound."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    count, highest = len(vocabulary), max(vocabulary.values(), default=0)
    if highest > 2 * count + _FREE_IDS:
        raise _refusal(name, f"its highest id is {highest:,}, and it has only {count:,} tokens")
    longest = max(map(len, vocabulary), default=0)
    if longest > _LONGEST_TOKEN:
        raise _refusal(name, f"a token has {longest:,} letters, and at most {_LONGEST_TOKEN:,} are allowed")
    word_length = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if word_length > _MOST_WORD_LENGTH:
        raise _refusal(name, f"max_input_chars_per_word is {word_length:,}, and at most {_MOST_WORD_LENGTH:,} are allowed")
    for part in ("normalizer", "decoder"):
        component = getattr(tokenizer, part)
        if component is not None and (growth := _growth(json.loads(component.__getstate__()))) > _MOST_GROWTH:
            raise _refusal(name, f"its {part} can make a text {growth:.3g} times as long, and {_MOST_GROWTH} times is allowed")


def _refusal(name: str, reason: str) -> ShoalError:
    return ShoalError(f"the tokenizer {name} is refused: {reason}")


def _growth(component: Mapping[str, Any]) -> float:
    """An upper bound of the factor by which a part of a tokenizer lengthens a text."""
    kind = component.get("type")
    if kind == "Sequence":
        growth = 1.0
        for part in component.get("normalizers") or component.get("decoders") or ():
            growth *= _growth(part)
        return growth
    if kind == "Replace":
        text = len(component["content"].encode())
        pattern = component["pattern"].get("String")
        return max(1.0, text / len(pattern.encode())) if pattern else text + 1.0  # an expression may match nothing, between letters
    if kind == "Prepend":
        return 1.0 + len(component["prepend"].encode())
    if kind == "Precompiled":
        return float(_longest_replacement(component["precompiled_charsmap"]))
    return 2.0 if kind == "ByteLevel" else 1.0


def _longest_replacement(charsmap: str) -> int:
    """The longest of the texts, separated by NUL, that follow the table of a SentencePiece map."""
    content = base64.b64decode(charsmap)
    start = 4 + int.from_bytes(content[:4], "little")
    return max(1, *map(len, content[start:].split(b"\0")))


@contextmanager
def panic_is_an_error(name: str) -> Iterator[None]:
    """Raises ShoalError where the library gives up on a text, which it does with an exception that ends a process."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ShoalError(f"the tokenizer {name} gives up on this text: {error}") from None
