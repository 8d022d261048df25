"""The files that a tokenizer came with: those of a model's folder that belong to it, kept byte for byte.

Holds: only names that transformers gives such files are read, as bytes; none of them is executed, and their sizes are bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.errors import ShoalError
from shoal.files import make_folder, open_file, read_file
from shoal.untrusted.tokenizer_files import MOST_FILE_BYTES

TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
"""Folder of further templates, such as one for conversations with tools."""
MOST_FILES = 64
"""Files of a tokenizer that are kept."""
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "dict.txt",
    "emoji.json",
    "entity_vocab.json",
    "byte_maps.json",
    "prophetnet.tokenizer",
    *(f"{name}.model" for name in ("tokenizer", "spiece", "sentencepiece", "sentencepiece.bpe", "spm", "spm_char", "tiktoken")),
    "tokenizer.model.v3",
    "tokenizer.tiktoken",
    "qwen.tiktoken",
)
PATTERNS = (*_NAMES, f"{TEMPLATES}/*.jinja")
"""The names, for a download."""


def read_files(folder: Path, more: Iterable[str] = ()) -> dict[str, bytes]:
    """The content of the files of a folder that belong to a tokenizer, by their names. `more`: further names of its class. Raises
    ShoalError."""
    found = {name: content for name in [*_names(folder), *more] if (content := read_file(folder / name, MOST_FILE_BYTES)) is not None}
    if sum(map(len, found.values())) > 2 * MOST_FILE_BYTES:
        raise ShoalError(f"{folder} is refused: its tokenizer's files have more than {2 * MOST_FILE_BYTES:,} bytes together")
    return found


def _names(folder: Path) -> list[str]:
    templates = sorted(file.name for file in (folder / TEMPLATES).glob("*.jinja")) if (folder / TEMPLATES).is_dir() else []
    names = [*_NAMES, *(f"{TEMPLATES}/{name}" for name in templates)]
    if len(names) > len(_NAMES) + MOST_FILES // 2:
        raise ShoalError(f"{folder / TEMPLATES} holds {len(templates)} templates, and at most {MOST_FILES // 2} are read")
    return names


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write these files into a folder, which is made. Raises ShoalError."""
    make_folder(folder)
    for name, content in files.items():
        make_folder((folder / name).parent)
        with open_file(folder / name, "wb") as file:
            file.write(content)


def saved_files(folder: Path) -> dict[str, Path]:
    """The files of a tokenizer that Shoal wrote, by their names in the folder, in the order of these."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()} if folder.is_dir() else {}
    return dict(sorted(found.items()))
