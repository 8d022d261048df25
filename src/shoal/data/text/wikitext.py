"""WikiText-2: the files as published (wiki.train.tokens, wiki.valid.raw, …), or from the hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shoal.config.schema.data import Wikitext
from shoal.data.hub.dataset import DataRequest, load_splits
from shoal.data.text.documents import Documents, InMemoryDocuments, TextPart, Unit
from shoal.data.text.files import TextFiles, corpus_part, files_by_split
from shoal.data.text.rows import Fields
from shoal.errors import ShoalError

HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1")
_FILES = "wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens (or .raw, gzipped or not)"
_SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


def open_wikitext(source: Wikitext, request: DataRequest, unit: Unit) -> TextPart:
    splits = _from_files(Path(source.path).expanduser(), unit) if source.path else _from_hub(request, unit)
    return corpus_part("WikiText-2", splits, "valid", f"{source.path} has no file to train on: put wiki.train.tokens there")


def _from_files(folder: Path, unit: Unit) -> dict[str, Documents]:
    """The files of the variant with more splits; of `raw`, if both have the same number."""
    variants: dict[str, dict[str, Path]] = {"raw": {}, "tokens": {}}
    for split, words, file in files_by_split(folder, _SPLITS):
        if "wiki" in words[0]:
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
    """Join the rows of the hub, which are lines, unless samples are lines."""
    if unit == "line":
        return InMemoryDocuments([line.rstrip("\n") for line in lines if line and not line.isspace()])
    return InMemoryDocuments(["".join(lines)])
