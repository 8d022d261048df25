"""WikiText-2: the files as published (wiki.train.tokens, wiki.valid.raw, …), or from the hub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.config.schema.data import Wikitext
from shoal.data.hub.dataset import DataRequest, load_splits
from shoal.data.text.documents import Documents, InMemoryDocuments, TextPart, Unit
from shoal.data.text.files import TextFiles
from shoal.data.text.rows import Fields
from shoal.errors import ShoalError

HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1")
_FILES = "wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens (or .raw, gzipped or not)"
_SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


def open_wikitext(source: Wikitext, request: DataRequest, unit: Unit) -> TextPart:
    """Train on `train`, be judged on `valid`. Where there is no train file, on `valid` and `test`, and the name says so."""
    splits = _from_files(Path(source.path).expanduser(), unit) if source.path else _from_hub(request, unit)
    train = next((name for name in ("train", "valid") if name in splits), None)
    if train is None:
        raise ShoalError(f"data.source.path: {source.path} has no file to train on: put wiki.train.tokens there")
    held_out = splits.get("valid" if train == "train" else "test")
    name = "WikiText-2" if train == "train" else "WikiText-2 (its valid part: there is no train file)"
    return TextPart(name, splits[train], held_out)


def _from_files(folder: Path, unit: Unit) -> dict[str, Documents]:
    """The files of one variant: the one with more splits; `raw` where both have as many."""
    variants: dict[str, dict[str, Path]] = {"raw": {}, "tokens": {}}
    for file in sorted(folder.rglob("*")) if folder.is_dir() else []:
        words = file.name.lower().replace("-", ".").replace("_", ".").split(".")
        split = next((_SPLITS[word] for word in words if word in _SPLITS), None)
        if file.is_file() and split and "wiki" in words[0]:
            variants["raw" if "raw" in words else "tokens"].setdefault(split, file)
    files = max(variants.values(), key=lambda found: ("train" in found, len(found)))
    if not files:
        raise ShoalError(
            f"data.source.path: there are no WikiText files in {folder}: put {_FILES} there, "
            "or set the path to null to get them from the hub"
        )
    return {split: TextFiles([file], Fields(), unit) for split, file in files.items()}


def _from_hub(request: DataRequest, unit: Unit) -> dict[str, Documents]:
    name, configuration = HUB
    otherwise = f"put {_FILES} in a folder, and set data.source.path to it"
    splits = load_splits(request._replace(name=name, streaming=False, otherwise=otherwise), configuration)
    return {_SPLITS[split]: _lines(dataset["text"], unit) for split, dataset in splits.items() if split in _SPLITS}


def _lines(lines: Iterable[str], unit: Unit) -> InMemoryDocuments:
    """Join the lines that the hub gives as rows, unless samples are lines."""
    rows: Sequence[str] = list(lines)
    return (
        InMemoryDocuments([row.rstrip("\n") for row in rows if not row.isspace() and row])
        if unit == "line"
        else InMemoryDocuments(["".join(rows)])
    )
