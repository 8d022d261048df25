"""Find the tokenizer that a setting names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.config.path_hints import missing_path_hint
from shoal.data.hub.access import hub_answers, quiet
from shoal.data.packages import import_optional
from shoal.data.text.tokenizers.files import PATTERNS, TEMPLATE, read_files
from shoal.data.text.tokenizers.interface import CHAT_TIME, CHAT_TIME_FILE, FORMAT, OWN_FILE, Tokenizer, chat_time
from shoal.data.text.tokenizers.library import PretrainedTokenizer, from_json, from_vocabulary_and_merges, train_bpe
from shoal.data.text.tokenizers.own import ByteTokenizer, CharacterTokenizer
from shoal.errors import ShoalError
from shoal.manifest import check_manifest, is_small
from shoal.untrusted.huggingface import read_tokenizer

TRAINED = ("bpe", "characters")
"""Tokenizers that are made from the training text."""
OWN = ("bytes", *TRAINED)
_FILES = "tokenizer.json, or vocab.json and merges.txt, or the files that transformers saves"


def load_tokenizer(
    spec: str,
    *,
    texts: Callable[[], Iterable[str]] | None = None,
    cache_dir: str | Path | None = None,
    token: str | None = None,
    setting: str = "data.tokenizer",
) -> Tokenizer:
    """The tokenizer `bytes`, `bpe` or `characters`, one at a path, or one of the hub.

    `texts` gives the training text, for `bpe` and `characters`; a trained BPE is kept under `cache_dir`. `token` is for the hub. `setting`
    is the one that names the tokenizer, for messages.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec in TRAINED:
        if texts is None:
            raise ShoalError(f"the tokenizer `{spec}` is made from the training text, and there is none here")
        if spec == "characters":
            return CharacterTokenizer.from_texts(texts())
        return train_bpe(texts(), Path(cache_dir) if cache_dir else None)
    path = Path(spec).expanduser()
    if path.is_file():
        return from_json(path, path.name)
    if path.is_dir():
        return _from_folder(path)
    return _from_hub(spec, token, setting)


def _from_folder(folder: Path, name: str | None = None) -> Tokenizer:
    name = name or folder.name
    check_manifest(folder, is_small)
    made = _read_folder(folder, name)
    time = CHAT_TIME.read(folder / CHAT_TIME_FILE)
    made.chat_time = None if time is None else chat_time(time["time"], folder / CHAT_TIME_FILE)
    return made


def _read_folder(folder: Path, name: str) -> Tokenizer:
    if (own := FORMAT.read(folder / OWN_FILE)) is not None:
        made = _own(folder / OWN_FILE, own)
        made.files = {name: content for name, content in read_files(folder).items() if name == TEMPLATE}
        return made
    if (folder / "tokenizer.json").is_file():
        return from_json(folder / "tokenizer.json", name)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return from_vocabulary_and_merges(folder, name)
    try:
        with quiet():
            import_optional("transformers")
            read = read_tokenizer(str(folder))
            return PretrainedTokenizer(read, name, read_files(folder, _file_names(read)))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ShoalError(f"no tokenizer in {folder}: expected {_FILES}") from error


def _file_names(tokenizer: Any) -> list[str]:
    """The names of the files that the class of a tokenizer reads."""
    named = getattr(tokenizer, "vocab_files_names", {}).values()
    return [name for name in named if isinstance(name, str) and name == Path(name).name]


def _own(file: Path, content: Mapping[str, Any]) -> Tokenizer:
    if content["kind"] == "bytes":
        return ByteTokenizer()
    if content["kind"] == "characters":
        return CharacterTokenizer(content["alphabet"])
    raise ShoalError(f"{file} is a tokenizer of kind {content['kind']!r}, which this version does not know")


def _from_hub(name: str, token: str | None, setting: str) -> Tokenizer:
    if missing := missing_path_hint(name):
        raise ShoalError(f"{setting}: {missing}: expected a tokenizer.json, or a folder with {_FILES}")
    online = hub_answers()
    try:
        with quiet():
            return _from_folder(_downloaded(name, token, online), name)
    except (OSError, ValueError, KeyError) as error:
        beside = [one.parent.name for one in Path().glob("*/config.json")]
        near = difflib.get_close_matches(name, [*(OWN if setting == "data.tokenizer" else ()), *beside], 1)
        guess = f" (did you mean `{near[0]}`?)" if near else ""
        if online:
            raise ShoalError(f"{setting}: the hub has no tokenizer `{name}`{guess}: {_first_line(error)}") from error
        absent = f"{setting}: `{name}`{guess} is no folder here and not in the cache, and the Hugging Face hub cannot be reached"
        if setting != "data.tokenizer":
            raise ShoalError(f"{absent}: set it to a folder that transformers saved") from error
        raise ShoalError(
            f"{absent}: put {_FILES} in a folder, and set data.tokenizer to it; or use `bytes` or `bpe`, which need no download"
        ) from error


def _downloaded(name: str, token: str | None, online: bool) -> Path:
    """The folder with the files of a repository's tokenizer, now or before. Raises OSError and ValueError."""
    hub = import_optional("huggingface_hub")
    folder = Path(hub.snapshot_download(name, token=token, allow_patterns=["config.json", *PATTERNS], local_files_only=not online))
    if not any((folder / pattern).is_file() for pattern in PATTERNS):
        raise OSError(f"{name} holds no tokenizer: expected {_FILES}")
    return folder


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
