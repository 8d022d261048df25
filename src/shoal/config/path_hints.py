"""Settings that name a folder or file of this machine, or something on the Hugging Face hub."""

from __future__ import annotations

import difflib
from pathlib import Path

_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".safetensors")


def missing_path_hint(name: str) -> str:
    """What is wrong with a name that can only be a path, where nothing is at that path; empty for other names.

    On the hub names are `name` or `owner/name`, so nobody who wrote a path is told about the hub.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or name.endswith(_FILES)
    path = Path(name).expanduser()
    if not is_path or path.exists():
        return ""
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, 1)
    return f"there is nothing at {name}" + (f" (did you mean {path.parent / near[0]}?)" if near else "")
