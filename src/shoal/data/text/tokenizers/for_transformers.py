"""Shoal's own tokenizers as a tokenizer.json, which transformers loads."""

from __future__ import annotations

from pathlib import Path

from shoal.data.packages import import_optional
from shoal.data.text.tokenizers.interface import Tokenizer
from shoal.data.text.tokenizers.library import END_OF_TEXT, LibraryTokenizer
from shoal.data.text.tokenizers.own import ByteTokenizer, CharacterTokenizer


def save_for_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files from which AutoTokenizer makes a tokenizer with the same ids."""
    library_form(tokenizer).save(folder)


def library_form(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the same ids as one of the `tokenizers` library. Texts that contain `<|endoftext|>` are the exception: there the
    library finds the end-of-text id, as in every vocabulary of its kind."""
    if isinstance(tokenizer, ByteTokenizer):
        return LibraryTokenizer(_bytes(), name=tokenizer.name, config={"eos_token": END_OF_TEXT}, files=tokenizer.files)
    if isinstance(tokenizer, CharacterTokenizer):
        return LibraryTokenizer(_characters(tokenizer.alphabet), name=tokenizer.name, config={}, files=tokenizer.files)
    return tokenizer


def _bytes() -> object:
    library = import_optional("tokenizers")
    # The letter that byte-level vocabularies write for each byte: itself if it is printable, else one from 256 on
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}
    made = library.Tokenizer(library.models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])
    return made


def _characters(alphabet: str) -> object:
    library = import_optional("tokenizers")
    made = library.Tokenizer(library.models.WordLevel(vocab={letter: number for number, letter in enumerate(alphabet)}))
    made.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
    made.decoder = library.decoders.Fuse()
    return made
