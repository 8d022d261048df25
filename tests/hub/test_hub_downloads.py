"""A data set that is missing comes from the hub: whole or not at all, and from where it was cut off."""

from __future__ import annotations

import io
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shoal.config import Run
from shoal.config.load import resolve_data
from shoal.data import Data, load
from shoal.errors import ShoalError
from tests.support.fake_hub import FakeHub
from tests.support.processes import Command

NAME = "nielsr/CelebA-faces"
IMAGES = 40


def noise(number: int) -> bytes:
    buffer = io.BytesIO()
    pixels = random.Random(number).randbytes(3 * 48 * 48)
    Image.frombytes("RGB", (48, 48), pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def parquet() -> dict[str, bytes]:
    """The data set's files, as the hub has them: two shards and a card."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features
    from datasets import Image as ImageFeature

    files = {}
    schema = Features({"image": ImageFeature()}).arrow_schema
    for shard in range(2):
        rows = [{"bytes": noise(number), "path": None} for number in range(shard * IMAGES // 2, (shard + 1) * IMAGES // 2)]
        buffer = io.BytesIO()
        pq.write_table(pa.table({"image": rows}, schema=schema), buffer)
        files[f"data/train-0000{shard}-of-00002.parquet"] = buffer.getvalue()
    return {"README.md": b"# Faces\n", **files}


@pytest.fixture(autouse=True)
def there(hub: FakeHub, parquet: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.datasets[NAME] = parquet
    monkeypatch.setattr("shoal.data.hub.files.FIRST_WAIT_S", 0.0)


def classroom() -> Run:
    """A classroom file that says nothing of its data but where it is."""
    tree: dict[str, Any] = {"data": {"dataset_path": "data/celeba", "num_workers_dataloader": 0}, "training": {"num_epochs": 1}}
    return resolve_data(tree, name="test", dialect="classroom").run


def fetch(told: list[tuple[str, int, int | None]] | None = None) -> Data:
    return load(classroom(), progress=lambda *figures: told.append(figures) if told is not None else None)


def contents(folder: str = "data/celeba") -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(folder).iterdir())]


def assert_whole() -> None:
    assert contents() == [noise(number) for number in range(IMAGES)]
    assert [path.name for path in Path("data").iterdir()] == ["celeba"], "nothing is left beside it"


def test_what_is_missing_comes_with_progress_and_stays(hub: FakeHub, parquet: dict[str, bytes]) -> None:
    told: list[tuple[str, int, int | None]] = []
    data = fetch(told)
    assert data.eval is not None
    assert len(data.train) + len(data.eval) == IMAGES
    assert_whole()
    size = sum(map(len, parquet.values()))
    assert (NAME, size, size) in told
    assert all(done <= size for what, done, _ in told if what == NAME)
    before = len(hub.asked)
    fetch()
    assert len(hub.asked) == before, "the next start asks nobody"


def test_a_connection_that_ends_is_taken_up_again(hub: FakeHub) -> None:
    hub.cut_after = 50_000
    fetch()
    assert_whole()
    ranges = [asked.headers["Range"] for asked in hub.asked if "/cdn/" in asked.path and "Range" in asked.headers]
    assert ranges == ["bytes=50000-"]


@pytest.mark.parametrize("status", [500, 429, "drop"])
def test_a_failure_that_passes_is_waited_for(hub: FakeHub, status: int | str) -> None:
    hub.fail("/cdn/.*00001", status, times=2)
    fetch()
    assert_whole()
    assert not hub.faults


def test_a_download_that_was_killed_goes_on_where_it_was(hub: FakeHub, parquet: dict[str, bytes]) -> None:
    Path("config.json").write_text(json.dumps({"data": {"dataset_path": "data/celeba"}}))
    Path("program.py").write_text(
        "import json; from shoal.config.load import resolve_data; from shoal.data import load\n"
        "load(resolve_data(json.load(open('config.json')), name='test', dialect='classroom').run)"
    )
    hub.fail("/cdn/.*00001", "hang", times=99)
    environ = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(Path("home").absolute())}
    process = Command(["program.py"], Path(), environ)
    try:
        hub.wait_for(lambda: any("/cdn/" in asked.path and "00001" in asked.path for asked in hub.asked))
    finally:
        process.close()
    assert not Path("data/celeba").exists(), "a part is not taken for the whole"
    hub.faults.clear()
    hub.asked.clear()
    fetch()
    assert_whole()
    assert not [asked for asked in hub.asked if "00000-of" in asked.path], "what had come is not asked for again"


def test_of_two_who_miss_it_one_downloads(hub: FakeHub) -> None:
    with ThreadPoolExecutor() as threads:
        for outcome in [threads.submit(fetch) for _ in range(2)]:
            outcome.result()
    assert_whole()
    assert len([asked for asked in hub.asked if "/cdn/" in asked.path]) == 3, "each file once"


def test_a_damaged_file_is_not_kept(hub: FakeHub, parquet: dict[str, bytes]) -> None:
    name = "data/train-00001-of-00002.parquet"
    part = Path("data/celeba.part/files")
    hub.fail("/cdn/.*00001", 404)
    with pytest.raises(ShoalError, match="that you may read"):
        fetch()
    (partial,) = part.rglob("train-00001*.part")
    partial.write_bytes(bytes(2000))  # another disk's idea of what was written
    hub.faults.clear()
    with pytest.raises(ShoalError, match=f"{name} of {NAME} came damaged: start again"):
        fetch()
    fetch()
    assert_whole()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_may_not_be_read_is_told(hub: FakeHub, status: int) -> None:
    hub.fail("/api/datasets", status, times=9)
    what = rf"there are no images at data.celeba, .*: put a folder of images there(.|\n)*no {NAME} that you may read \({status}\)"
    with pytest.raises(ShoalError, match=what):
        fetch()


def test_without_a_network_it_says_what_to_put_where(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ShoalError, match=r"put a folder of images there, or celeba\.zip next to it(.|\n)*hub cannot be reached"):
        fetch()
    assert not hub.asked
