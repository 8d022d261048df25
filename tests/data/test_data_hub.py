"""Data sets of the Hugging Face library from local copies: whole and as streams, subsets and slices, and what cannot be had."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest

from shoal.config.schema.data import Loader
from shoal.data import Data, ShardFeed, load
from shoal.data.hub.dataset import DataRequest, Subset, _copied, load_splits
from shoal.errors import ShoalError

Make = Callable[..., Any]
ROWS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of JSON lines in three files and a validation file, as people have them."""
    folder = tmp_path_factory.mktemp("hub") / "rows"
    folder.mkdir()
    for part in range(3):
        rows = [{"id": i, "text": f"training row {i}"} for i in range(part * ROWS // 3, (part + 1) * ROWS // 3)]
        (folder / f"train-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "validation.jsonl").write_text("".join(json.dumps({"id": i, "text": f"held out {i}"}) + "\n" for i in range(9)))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {"text": [f"training row {i}" for i in range(ROWS)]}
    held_out = {"text": [f"held out {i}" for i in range(9)]}
    path = tmp_path_factory.mktemp("hub") / "saved"
    datasets.disable_progress_bars()
    both = {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(held_out)}
    datasets.DatasetDict(both).save_to_disk(str(path))
    return path


@pytest.fixture
def hub_of(make_run: Make, tmp_path: Path) -> Make:
    def load_dataset(name: Path | str, subset: str | None = None, text_field: str | None = None, **settings: Any) -> Data:
        source = {"kind": "huggingface", "name": str(name), "subset": subset, "text_field": text_field}
        defaults = {"model__kind": "gpt", "data__sequence_length": 32, "data__batching": "dynamic", "data__shuffle_buffer": 10}
        return load(make_run(data__source=source, **defaults | settings), cache_dir=tmp_path / "cache")

    return load_dataset


def test_a_data_set_of_the_hub_reads_no_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its card may name any path as its files."""
    (tmp_path / "private.txt").write_text("Dear diary")
    (tmp_path / "card").mkdir()
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {tmp_path}/private.txt\n---\n"
    (tmp_path / "card" / "README.md").write_text(card)
    builder = datasets.load_dataset_builder(str(tmp_path / "card"), cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *given, **options: builder)
    with pytest.raises(ShoalError, match="names files that are not on the hub"):
        load_splits(DataRequest("eve/stories"), None)


def test_the_name_of_a_file_format_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would read all files of this format in the current folder."""
    (tmp_path / "diary.txt").write_text("Dear diary")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShoalError, match="is a file format"):
        load_splits(DataRequest("text"), None)


def texts_of(data: Data) -> list[str]:
    feed = ShardFeed(data.train, batch_size=1, seed=1)
    texts = []
    while not feed.at_epoch_end:
        batch = next(feed)
        assert data.info.tokenizer is not None
        texts.append(data.info.tokenizer.decode(batch["input_ids"][0].tolist()))
    return texts


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["folder", "saved"])
def test_local_copies(request: pytest.FixtureRequest, hub_of: Make, kind: str, streaming: bool) -> None:
    data = hub_of(request.getfixturevalue(kind), data__streaming=streaming)
    assert sorted(texts_of(data)) == sorted(f"training row {i}" for i in range(ROWS))
    assert len(data.eval) == 9, "its own held-out split"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("subset", "expected"),
    [("train[:10]", range(10)), ("train[100:]", range(100, ROWS)), ("train[5:8]", range(5, 8)), ("train", range(ROWS))],
)
def test_slices(folder: Path, hub_of: Make, subset: str, expected: range, streaming: bool) -> None:
    data = hub_of(folder, subset, data__streaming=streaming)
    assert sorted(texts_of(data)) == sorted(f"training row {i}" for i in expected)


def test_slices_in_per_cent_and_from_the_end(folder: Path, hub_of: Make) -> None:
    with pytest.raises(ShoalError, match="is not known while streaming"):
        hub_of(folder, "train[:10%]", data__streaming=True)
    assert len(texts_of(hub_of(folder, "train[:10%]"))) == 12
    assert sorted(texts_of(hub_of(folder, "train[-2:]"))) == ["training row 118", "training row 119"]


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        ("english", r"data\.source\.subset: .* cannot be loaded: BuilderConfig 'english' not found\. Available: \['default'\]"),
        ("test", r"data\.source\.subset: .* has no split `test`: it has train, validation"),
        ("train[10", "is no slice; slices are such as"),
        ("train[7:3]", "is empty"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_subsets_that_do_not_exist(folder: Path, hub_of: Make, subset: str, message: str, streaming: bool) -> None:
    with pytest.raises(ShoalError, match=message):
        hub_of(folder, subset, data__streaming=streaming)


def test_subset_is_a_configuration_or_a_slice() -> None:
    assert Subset.parse("sample-10BT") == Subset(configuration="sample-10BT")
    assert Subset.parse("english") == Subset(configuration="english")
    assert Subset.parse("train") == Subset(split="train")
    assert Subset.parse("train[:1000]") == Subset(split="train", stop="1000")
    assert Subset.parse("test[10%:20%]") == Subset(split="test", start="10%", stop="20%")


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("folder", 0), ("saved", 0), pytest.param("folder", 2, marks=pytest.mark.whole), pytest.param("saved", 2, marks=pytest.mark.long)],
)
def test_a_stream_goes_on_exactly(request: pytest.FixtureRequest, hub_of: Make, kind: str, workers: int) -> None:
    def feed() -> ShardFeed:
        data = hub_of(request.getfixturevalue(kind), data__streaming=True)
        return ShardFeed(data.train, batch_size=4, seed=1, loader=Loader(num_workers=workers))

    first = feed()
    whole, states = [], []
    for _ in range(45):
        states.append(json.loads(json.dumps(first.state_dict())))
        whole.append(next(first)["input_ids"].tolist())
    assert first.epoch == 1
    first.close()
    for at in (29,) if workers else (3, 17, 29, 31):
        second = feed()
        second.load_state_dict(states[at])
        assert [batch["input_ids"].tolist() for batch in islice(second, 10)] == whole[at : at + 10]
        second.close()


class OpenedMeanwhile:
    """As a data set is whose table of open files grows twice while it is copied."""

    def __init__(self, problem: str) -> None:
        self.problem, self.attempts = problem, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        self.attempts += 1
        if self.attempts < 3:
            raise RuntimeError(self.problem)
        return "a copy"


def test_a_stream_is_copied_though_workers_of_the_same_process_open_files() -> None:
    assert _copied(OpenedMeanwhile("dictionary changed size during iteration")) == "a copy"
    with pytest.raises(RuntimeError, match="another"):
        _copied(OpenedMeanwhile("another problem"))


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["folder", pytest.param("saved", marks=pytest.mark.long)])
def test_processes_share_the_rows_of_a_stream(request: pytest.FixtureRequest, hub_of: Make, kind: str) -> None:
    """The datasets library shards by itself in such a process, which must not come on top."""
    data = hub_of(request.getfixturevalue(kind), data__streaming=True)
    feed = ShardFeed(data.train, batch_size=1, seed=1, loader=Loader(num_workers=2))
    batches = islice(iter(feed), ROWS)
    texts = [data.info.tokenizer.decode(batch["input_ids"][0].tolist()) for batch in batches]
    assert sorted(texts) == sorted(f"training row {i}" for i in range(ROWS))
    assert feed.at_epoch_end
    feed.close()


def test_single_files_and_fields(tmp_path: Path, hub_of: Make) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("question,answer\n" + "".join(f"q{i},a{i}\n" for i in range(30)))
    with pytest.raises(ShoalError, match=r"which field is the text.*`question`, `answer`"):
        hub_of(file)
    assert set(texts_of(hub_of(file, text_field="answer"))) <= {f"a{i}" for i in range(30)}
    with pytest.raises(ShoalError, match="there is no field `reply`"):
        hub_of(file, text_field="reply")
    (tmp_path / "rows.zip").write_bytes(b"")
    with pytest.raises(ShoalError, match=r"rows\.zip is no file of a data set"):
        hub_of(tmp_path / "rows.zip")


def test_parquet_and_prompts(tmp_path: Path, hub_of: Make) -> None:
    (tmp_path / "set").mkdir()
    rows = {"prompt": [f"Q{i}:" for i in range(40)], "completion": [f"A{i}" for i in range(40)]}
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "set" / "train.parquet"))
    data = hub_of(tmp_path / "set")
    batch = next(ShardFeed(data.train, batch_size=8, seed=1))
    learned = [[int(label) for label in labels if label != -100] for labels in batch["labels"]]
    assert all(row[0] == ord("A") and row[-1] == 256 for row in learned)


def test_damaged_data_sets(tmp_path: Path, hub_of: Make) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(ShoalError, match="cannot be loaded"):
        hub_of(tmp_path / "set")
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "a"}\n{oops\n')
    with pytest.raises(ShoalError, match="cannot be loaded"):
        hub_of(tmp_path / "set")
    with pytest.raises(ShoalError, match="cannot be read any further"):
        hub_of(tmp_path / "set", data__streaming=True)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("streaming", [False, True])
def test_without_a_network_it_says_what_to_put_where(hub_of: Make, streaming: bool) -> None:
    with pytest.raises(
        ShoalError, match=r"nobody/such-a-data-set is not in the cache, .*\.save_to_disk\('DIR'\).* set data\.source\.name to it"
    ):
        hub_of("nobody/such-a-data-set", data__streaming=streaming)


def test_the_hub_is_asked_once_and_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from shoal.data.hub.access import hub_answers, offline

    class Unreachable:
        def head(self, address: str, timeout: float) -> None:
            raise OSError(f"no route to {address}")

    monkeypatch.setattr(huggingface_hub, "get_session", Unreachable)
    assert not hub_answers()
    monkeypatch.setattr(Unreachable, "head", lambda self, address, timeout: None)
    assert hub_answers()
    with offline():
        assert not hub_answers()
    assert hub_answers()
