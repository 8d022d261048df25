"""The files that a tokenizer came with: those of a model's folder that belong to it, kept byte for byte.

Holds: only names that transformers gives such files are read, as bytes; none of them is executed, and their sizes are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.files import make_folder, open_file, read_file
from shoal.untrusted.tokenizer_files import MOST_FILE_BYTES

TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
"""Folder of further templates, such as one for conversations with tools."""
MOST_TEMPLATE_BYTES = 4 << 20
_CONFIG = "tokenizer_config.json"
_SPECIALS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MOST_FILES = 64
"""Files of a tokenizer that are kept."""
_NAMES = (
    "tokenizer.json",
    _CONFIG,
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


def templates_in(files: Mapping[str, bytes]) -> dict[str, str]:
    """The chat templates of these files, by name. As transformers has it, templates in files of their own replace those of the
    configuration. Raises ShoalError."""
    found = {file.removeprefix(f"{TEMPLATES}/").removesuffix(".jinja"): file for file in files if file.startswith(f"{TEMPLATES}/")}
    if TEMPLATE in files:
        found["default"] = TEMPLATE
    if found:
        return {name: template_text(files[file], file) for name, file in found.items()}
    listed = _object(files, _CONFIG).get("chat_template")
    if isinstance(listed, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in listed if isinstance(one, dict)}
        return {name: source for name, source in named.items() if isinstance(name, str) and isinstance(source, str)}
    return {"default": listed} if isinstance(listed, str) else {}


def with_template(files: Mapping[str, bytes], source: str) -> dict[str, bytes]:
    """These files with one chat template, in place of all others."""
    others = {name: content for name, content in files.items() if not name.startswith(f"{TEMPLATES}/")}
    return others | {TEMPLATE: source.encode()}


def special_tokens_in(files: Mapping[str, bytes]) -> dict[str, str]:
    """The special tokens that these files name."""
    config, listed = _object(files, _CONFIG), _object(files, "special_tokens_map.json")
    found = {name: token_named(config, name) or token_named(listed, name) for name in _SPECIALS}
    return {name: token for name, token in found.items() if token is not None}


def token_named(config: Mapping[str, Any], key: str) -> str | None:
    """A token of a configuration, which is written as a text or as an object."""
    value = config.get(key)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def template_text(content: bytes, name: object) -> str:
    """The text of a template's file. Raises ShoalError."""
    if len(content) > MOST_TEMPLATE_BYTES:
        raise ShoalError(f"{name} is too large: it has more than the {MOST_TEMPLATE_BYTES} bytes that such a file may have")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ShoalError(f"{name} is not UTF-8: {error}") from None


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name) or b"{}")
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{name} of the tokenizer is damaged: {error}") from None
    return found if isinstance(found, dict) else {}
