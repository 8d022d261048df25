"""The Stanford Natural Language Inference corpus as text: premise, hypothesis, label."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.config.schema.data import Snli
from shoal.data.hub.dataset import DataRequest, load_splits
from shoal.data.text.documents import Document, InMemoryDocuments, TextPart
from shoal.data.text.files import corpus_part, decode, files_by_split, open_file
from shoal.errors import ShoalError

HUB = "stanfordnlp/snli"
LABELS = ("entailment", "neutral", "contradiction")
_FILES = "snli_1.0_train.jsonl, snli_1.0_dev.jsonl and snli_1.0_test.jsonl (or .txt, or .tsv of premise, hypothesis, label; gzipped or not)"
_SPLITS = {"train": "train", "dev": "dev", "valid": "dev", "validation": "dev", "test": "test"}
_SUFFIXES = (".tsv", ".txt", ".jsonl")

Pair = tuple[str, str, str]
"""Premise, hypothesis, label."""


def open_snli(source: Snli, request: DataRequest, premise_as_context: bool = False) -> TextPart:
    """`premise_as_context`: the premise is not part of the text but its context."""
    if source.path:
        splits = {name: _texts(_read(file), premise_as_context) for name, file in _find(Path(source.path).expanduser()).items()}
    else:
        otherwise = f"put {_FILES} in a folder, and set data.source.path to it"
        rows = load_splits(request._replace(name=HUB, streaming=False, otherwise=otherwise), None)
        splits = {_SPLITS[name]: _texts(_hub_pairs(dataset), premise_as_context) for name, dataset in rows.items() if name in _SPLITS}
    return corpus_part("SNLI", splits, "dev", f"{source.path} has no file to train on: put snli_1.0_train.jsonl there")


def _texts(pairs: Iterable[Pair], premise_as_context: bool) -> InMemoryDocuments:
    """Pairs without an agreed label are left out, as the authors of the corpus recommend."""
    return InMemoryDocuments([_document(*pair, premise_as_context) for pair in pairs if pair[2] in LABELS])


def _document(premise: str, hypothesis: str, label: str, premise_as_context: bool) -> Document:
    text = f"Hypothesis: {hypothesis}\nLabel: {label}"
    return Document(text, context=premise) if premise_as_context else Document(f"Premise: {premise}\n{text}")


def _find(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for split, words, file in files_by_split(folder, _SPLITS):
        if file.name.removesuffix(".gz").endswith(_SUFFIXES) and words[0] == "snli":
            found.setdefault(split, file)
    if not found:
        raise ShoalError(
            f"data.source.path: there are no SNLI files in {folder}: put {_FILES} there, or set the path to null to get them from the hub"
        )
    return found


def _read(file: Path) -> Iterator[Pair]:
    with open_file(file) as content:
        raw = content.read()
    if not raw:
        raise ShoalError(f"{file} is empty")
    text = decode(raw, str(file))
    return _from_json(file, text) if ".jsonl" in file.suffixes else _from_columns(file, text)


def _from_json(file: Path, text: str) -> Iterator[Pair]:
    for number, line in enumerate(text.split("\n"), 1):
        if line:
            try:
                row = json.loads(line)
                yield row["sentence1"], row["sentence2"], row["gold_label"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ShoalError(f"{file}:{number}: not a row of SNLI (gold_label, sentence1, sentence2)") from error


def _from_columns(file: Path, text: str) -> Iterator[Pair]:
    """As published (a header, then gold_label … sentence1, sentence2), or plain premise, hypothesis, label 0 to 2."""
    rows = csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE)
    columns = ("sentence1", "sentence2", "gold_label")
    places = [0, 1, 2]
    try:
        for number, row in enumerate(rows, 1):
            if number == 1 and set(columns) <= set(row):
                places = [row.index(name) for name in columns]
            elif row:
                yield _pair(row, places, f"{file}:{number}")
    except csv.Error as error:
        raise ShoalError(f"{file}: line {rows.line_num} is not of SNLI: {error}") from error


def _pair(row: list[str], places: list[int], where: str) -> Pair:
    if len(row) <= max(places):
        raise ShoalError(f"{where}: {len(row)} columns, expected premise, hypothesis, label")
    premise, hypothesis, label = (row[place] for place in places)
    if label.isdigit():
        if int(label) >= len(LABELS):
            raise ShoalError(f"{where}: label {label} is out of range: labels are 0 to {len(LABELS) - 1}")
        label = LABELS[int(label)]
    elif label not in (*LABELS, "-"):
        raise ShoalError(f"{where}: `{label}` is no label: labels are {', '.join(LABELS)}, or - where there is none")
    return premise, hypothesis, label


def _hub_pairs(dataset: Iterable[dict[str, object]]) -> Iterator[Pair]:
    for row in dataset:
        label = row["label"]
        assert isinstance(label, int)
        yield str(row["premise"]), str(row["hypothesis"]), LABELS[label] if label >= 0 else "-"
