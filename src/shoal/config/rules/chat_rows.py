"""Whether rows of data are conversations, and whether a model's files hold a chat template: what `config check` must know before it starts.

The names of the columns are here once, for `data/text/conversations.py`, too.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from shoal.config.schema import Run

Form = Literal["messages", "pair", "alpaca"]
LISTS = ("messages", "conversations", "conversation")
"""Columns that hold a list of messages."""
PAIR = ("prompt", "completion")
_FIRST_BYTES = 1 << 20


def form_of(row: Mapping[str, Any]) -> Form | None:
    """How the columns of a row hold a conversation; None: they hold none."""
    if list_column(row) is not None:
        return "messages"
    if all(is_list_of_objects(row.get(name)) for name in PAIR):
        return "pair"
    return "alpaca" if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str) else None


def list_column(row: Mapping[str, Any]) -> str | None:
    return next((name for name in LISTS if is_list_of_objects(row.get(name))), None)


def is_list_of_objects(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0 and isinstance(value[0], Mapping)


def has_no_template(run: Run) -> bool:
    """Whether the model certainly has no chat template: its files are here and hold none, and none is named."""
    tokenizer = run.data.tokenizer or "bytes"
    folder = Path(tokenizer).expanduser()
    local = tokenizer in ("bytes", "bpe", "characters") or (folder.exists() and not _has_template(folder))
    return run.data.chat_template is None and local


def file_of_conversations(path: Path, chosen_field: str = "chosen") -> Path | None:
    """The first file of rows at a path, if they are conversations or pairs of them."""
    file = _first_rows(path.expanduser())
    row = (_first_row(file) if file is not None else None) or {}
    told = form_of(row) is not None or any(is_list_of_objects(row.get(name)) for name in ("prompt", chosen_field))
    return file if told else None


def _has_template(folder: Path) -> bool:
    folder = folder.parent if folder.is_file() else folder
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        with (folder / "tokenizer_config.json").open("rb") as file:
            return bool(json.loads(file.read(64 * _FIRST_BYTES)).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _first_rows(path: Path) -> Path | None:
    """The first file of rows at a path."""
    files = sorted(path.rglob("*.jsonl*")) if path.is_dir() else [path]
    return next((file for file in files if file.is_file() and ".jsonl" in file.suffixes[-2:]), None)


def _first_row(file: Path) -> dict[str, Any] | None:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            row = json.loads(content.readline(_FIRST_BYTES))
    except (OSError, EOFError, ValueError, RecursionError):  # reading the data says what is wrong with it
        return None
    return row if isinstance(row, dict) else None
