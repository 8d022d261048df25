"""Hints for settings that name a local path or something on the Hugging Face hub."""

from __future__ import annotations

import difflib
from pathlib import Path

_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".safetensors")


def missing_path_hint(name: str) -> str:
    """A message if the name can only be a path and nothing is there; otherwise an empty string.

    Names on the hub are `name` or `owner/name`.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or name.endswith(_FILES)
    path = Path(name).expanduser()
    if not is_path or path.exists():
        return ""
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, 1)
    return f"there is nothing at {name}" + (f" (did you mean {path.parent / near[0]}?)" if near else "")
