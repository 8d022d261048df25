"""Data sets of the Hugging Face hub, or local copies of them, read completely or as a stream."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from shoal.config.path_hints import missing_path_hint
from shoal.config.schema.data import HubDataset
from shoal.data.hub.access import hub_answers, offline, quiet
from shoal.data.interfaces import Progress
from shoal.data.packages import import_optional
from shoal.data.splits import HELD_OUT_NAMES, TRAIN_NAMES
from shoal.data.text.documents import Document, Position, TextPart
from shoal.data.text.rows import Fields, rows_to_documents
from shoal.errors import ShoalError
from shoal.untrusted.parquet_files import check_parquet

_SLICE = re.compile(r"^(?P<split>\w+)\s*(\[\s*(?P<start>-?\d+%?)?\s*:\s*(?P<stop>-?\d+%?)?\s*\])?$")
_ON_HUB = "hf://"
_ROWS = 1000
_COPIES = 100
"""Attempts to copy a data set while other threads open files."""
_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}


class Subset(NamedTuple):
    """`data.source.subset`, parsed: a configuration, or a split and a slice of it."""

    configuration: str | None = None
    split: str | None = None
    start: str | None = None
    stop: str | None = None

    @classmethod
    def parse(cls, text: str | None) -> Subset:
        if text is None:
            return cls()
        found = _SLICE.match(text)
        if found and ("[" in text or found["split"] in TRAIN_NAMES + HELD_OUT_NAMES):
            return cls(None, found["split"], found["start"], found["stop"])
        if "[" in text:
            raise ShoalError(f"data.source.subset: `{text}` is no slice; slices are such as `train[:1000]`, `train[10%:20%]`, `test[-50:]`")
        return cls(configuration=text)


class DataRequest(NamedTuple):
    """Options with which a data source is loaded."""

    name: str
    streaming: bool = False
    cache_dir: str | None = None
    token: str | None = None
    progress: Progress | None = None
    otherwise: str = ""
    """Advice in the message if there is no network; empty: to save the data set on another machine and copy it."""
    folder: Path | None = None
    """Folder of trained tokenizers; None: they are not cached."""


def open_dataset(source: HubDataset, request: DataRequest, fields: Fields) -> TextPart:
    subset = Subset.parse(source.subset)
    splits = load_splits(request, subset.configuration)
    name = subset.split or next((split for split in TRAIN_NAMES if split in splits), next(iter(splits)))
    if name not in splits:
        raise ShoalError(f"data.source.subset: {source.name} has no split `{name}`: it has {', '.join(splits)}")
    held = next((split for split in HELD_OUT_NAMES if split in splits and split != name), None)
    train = DatasetRows(_slice(splits[name], subset, source.name), fields, f"{source.name} ({name})")
    held_out = DatasetRows(splits[held], fields, f"{source.name} ({held})") if held else None
    path = Path(source.name).expanduser()
    return TextPart(path.resolve().name if path.exists() else source.name, train, held_out)


def load_splits(request: DataRequest, configuration: str | None) -> Mapping[str, Any]:
    """All splits of a data set, from a folder or file, else from the hub."""
    path = Path(request.name).expanduser()
    if missing := missing_path_hint(request.name):
        raise ShoalError(f"data.source.name: {missing}")
    try:
        with _without_progress_bars():
            if path.exists():
                return _local_splits(path, configuration, request)
            return _hub_splits(configuration, request)
    except (ValueError, FileNotFoundError, import_optional("datasets").exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        reason = str(cause).strip().split("\n")[0]
        setting = "data.source.subset" if "onfig" in reason and not isinstance(cause, UnicodeDecodeError) else "data.source.name"
        raise ShoalError(f"{setting}: {request.name} cannot be loaded: {reason}") from error


def _local_splits(path: Path, configuration: str | None, request: DataRequest) -> Mapping[str, Any]:
    datasets = import_optional("datasets")
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        if configuration is not None:
            raise ShoalError(f"data.source.subset: {path} is a saved data set, it has no configuration `{configuration}`")
        saved = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        return {name: split.to_iterable_dataset() for name, split in splits.items()} if request.streaming else splits
    for file in path.rglob("*.parquet") if path.is_dir() else [path]:
        if file.suffix == ".parquet":
            check_parquet(file)
    options: dict[str, Any] = {"streaming": request.streaming, "cache_dir": request.cache_dir}
    if path.is_dir():
        splits = datasets.load_dataset(str(path), configuration, **options)
    elif (builder := _BUILDERS.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix)) is None:
        raise ShoalError(f"data.source.name: {path} is no file of a data set ({', '.join(_BUILDERS)})")
    else:
        splits = datasets.load_dataset(builder, data_files=str(path), **options)
    return dict(splits)


def _hub_splits(configuration: str | None, request: DataRequest) -> Mapping[str, Any]:
    name = request.name
    if name in import_optional("datasets.packaged_modules")._PACKAGED_DATASETS_MODULES:
        raise ShoalError(f"data.source.name: `{name}` is a file format of the datasets library, no data set: name a data set or a path")
    online = hub_answers()
    if request.progress:
        request.progress(f"{name} from the hub", 0, None)
    try:
        with offline(not online):
            builder = import_optional("datasets").load_dataset_builder(
                name, configuration, cache_dir=request.cache_dir, token=request.token
            )
            _refuse_other_files(name, builder)
            if not request.streaming:
                builder.download_and_prepare()
            splits = builder.as_streaming_dataset() if request.streaming else builder.as_dataset()
    except ConnectionError as error:
        otherwise = request.otherwise or (
            f"on a machine with a network run `python -c \"import datasets; datasets.load_dataset('{name}').save_to_disk('DIR')\"`, "
            "copy DIR here, and set data.source.name to it"
        )
        raise ShoalError(f"the data set {name} is not in the cache, and the Hugging Face hub cannot be reached: {otherwise}") from error
    if request.progress:
        size = next(iter(splits.values())).info.download_size or 0
        request.progress(f"{name} from the hub", size, size)
    return dict(splits)


def _refuse_other_files(name: str, builder: Any) -> None:
    """Raises ShoalError where the card of a data set names files that are not on the hub, such as files of this machine."""
    files = [str(file) for split in (builder.config.data_files or {}).values() for file in split]
    if other := [file for file in files if not file.split("::")[-1].startswith(_ON_HUB)]:
        raise ShoalError(f"data.source.name: the data set {name} names files that are not on the hub, such as {other[0]}: it is refused")


def _slice(dataset: Any, subset: Subset, name: str) -> Any:
    """A slice of a split. Slices of a stream relative to its end need its length."""
    if subset.start is None and subset.stop is None:
        return dataset
    streaming = not hasattr(dataset, "__len__")
    length = _length(dataset)
    relative = any(bound and ("%" in bound or bound.startswith("-")) for bound in (subset.start, subset.stop))
    if length is None and relative:
        raise ShoalError(
            f"data.source.subset: the length of {name} is not known while streaming: give absolute numbers, such as train[:1000]"
        )
    start = _bound(subset.start, length, 0)
    stop = _bound(subset.stop, length, length)
    if stop is not None and stop <= start:
        raise ShoalError(f"data.source.subset: `{subset.split}[{subset.start or ''}:{subset.stop or ''}]` of {name} is empty")
    if not streaming:
        return dataset.select(range(start, stop or 0))
    dataset = dataset.skip(start) if start else dataset
    return dataset if stop is None else dataset.take(stop - start)


def _bound(text: str | None, length: int | None, default: int | None) -> Any:
    if text is None:
        return default
    value = int(text.rstrip("%"))
    if text.endswith("%"):
        value = round(value * (length or 0) / 100)
    if value < 0:
        value += length or 0
    return max(0, value if length is None else min(value, length))


def _length(dataset: Any) -> int | None:
    if hasattr(dataset, "__len__"):
        return len(dataset)
    splits = dataset.info.splits or {}
    known = splits.get(str(dataset.split)) if dataset.split else None
    return known.num_examples or None if known else None


class DatasetRows:
    """The rows of a data set as documents."""

    def __init__(self, dataset: Any, wanted: Fields, where: str) -> None:
        self._dataset = dataset
        self._wanted = wanted
        self._where = where

    def read(self, position: Position = None) -> Iterator[tuple[Document, Position]]:
        return rows_to_documents(((row, self._where, after) for row, after in self._rows(position)), self._wanted)

    def _rows(self, position: Position) -> Iterator[tuple[dict[str, Any], Position]]:
        rows = self._numbered(position) if hasattr(self._dataset, "__len__") else self._streamed(position)
        try:
            yield from rows
        except (OSError, ValueError, import_optional("datasets").exceptions.DatasetGenerationError) as error:
            reason = str(error.__cause__ or error).strip().split("\n")[0]
            raise ShoalError(f"{self._where} cannot be read any further: {reason}") from error

    def _numbered(self, position: Position) -> Iterator[tuple[dict[str, Any], Position]]:
        for start in range(position or 0, len(self._dataset), _ROWS):
            columns = self._dataset[start : start + _ROWS]
            for number, values in enumerate(zip(*columns.values(), strict=True), start + 1):
                yield dict(zip(columns, values, strict=True)), number

    def _streamed(self, position: Position) -> Iterator[tuple[dict[str, Any], Position]]:
        dataset = _copied(self._dataset)  # a data set holds the position of its only reader
        if position is not None:
            dataset.load_state_dict(position)
        if get_worker_info() is not None:
            import_optional("fsspec.asyn").reset_lock()  # after a fork, a lock of the parent may be held for ever
        # Not `for row in dataset`: in a loader process that would shard the rows a second time.
        for columns in dataset.iter(batch_size=1):
            yield {name: values[0] for name, values in columns.items()}, dataset.state_dict()

    def size(self) -> int | None:
        return _length(self._dataset)


def _copied(dataset: Any) -> Any:
    """A copy with a position of its own. Open file systems are part of it, and other threads may add some meanwhile."""
    for _ in range(_COPIES):
        try:
            return copy.deepcopy(dataset)
        except RuntimeError as error:
            if "changed size during iteration" not in str(error):
                raise
    return copy.deepcopy(dataset)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Disable the progress bars of the datasets library: only the command line writes to the terminal."""
    datasets = import_optional("datasets")
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with quiet():
            yield
    finally:
        if shown:
            datasets.enable_progress_bars()
