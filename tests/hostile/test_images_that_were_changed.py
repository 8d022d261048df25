"""Images that a class serves: whole and the same on the other side, or not taken at all."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from shoal.data.images import transfer as serving
from shoal.data.images.files import ZipFile, find_images
from shoal.data.images.transfer import ImageOffer, fetch_images, image_chunks, publish_images
from shoal.errors import ShoalError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(serving, "CHUNK_BYTES", 1000)
    made = tmp_path / "celeba" / "images"
    made.mkdir(parents=True)
    for number in range(20):
        (made / f"{number:03d}.jpg").write_bytes(bytes([number]) * 300)
    (made.parent / "list_eval_partition.txt").write_text("003.jpg 1\n004.jpg 0\n")
    return made


def served(folder: Path) -> tuple[ImageOffer, dict[int, bytes]]:
    pieces: dict[int, bytes] = {}
    return publish_images(image_chunks(folder), ".zip", pieces.__setitem__), pieces


def test_a_folder_arrives_as_a_file_that_is_read_like_the_folder(folder: Path, tmp_path: Path) -> None:
    offer, pieces = served(folder)
    told: list[int] = []
    file = fetch_images(ImageOffer.of(list(offer)), pieces.get, tmp_path / "here", lambda what, done, total: told.append(done))
    with zipfile.ZipFile(file) as content:
        assert {name: content.read(name) for name in content.namelist() if name.endswith(".jpg")} == {
            path.name: path.read_bytes() for path in folder.iterdir()
        }
    assert find_images(ZipFile(file)).held_out == ["003.jpg"], "what is held out stays held out"
    assert told[-1] == offer.total_bytes
    assert fetch_images(offer, {}.get, tmp_path / "here", None) == file, "what is there is not fetched again"


def test_a_piece_that_was_changed_is_not_taken(folder: Path, tmp_path: Path) -> None:
    offer, pieces = served(folder)
    for number in pieces:
        changed = pieces | {number: pieces[number][:-1] + b"!"}
        with pytest.raises(ShoalError, match="missing or was changed"):
            fetch_images(offer, changed.get, tmp_path / "here", None)
    with pytest.raises(ShoalError, match="missing or was changed"):
        fetch_images(offer, {number: piece for number, piece in pieces.items() if number != 3}.get, tmp_path / "here", None)
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("told", [None, ["x"], ["x", 0, 1, ".zip"], ["x", 1, 1 << 50, ".zip"], ["x", 1, 1, "/../../x"], [1, 1, 1, ".zip"]])
def test_an_offer_that_cannot_be_is_refused(told: object) -> None:
    with pytest.raises(ShoalError, match="offers images"):
        ImageOffer.of(told)


def test_a_file_is_served_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "digits.npz"
    file.write_bytes(content := io.BytesIO(bytes(range(256)) * 10).getvalue())
    pieces: dict[int, bytes] = {}
    offer = publish_images(image_chunks(file), ".npz", pieces.__setitem__)
    assert fetch_images(offer, pieces.get, tmp_path / "here", None).read_bytes() == content
