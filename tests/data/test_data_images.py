"""Images of every source: in the right shape and colours, split and labelled; damaged ones are named."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.config.schema.data import Loader
from shoal.data import Data, ShardFeed, load
from shoal.data.images.decoding import resize
from shoal.errors import ShoalError

Make = Callable[..., Any]


def write_image(file: Path, size: tuple[int, int] = (8, 8), colour: Any = (200, 100, 50), mode: str = "RGB") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)
    return file


def write_idx(file: Path, values: Any, magic: int | None = None, cut: int | None = None) -> None:
    array = np.asarray(values, np.uint8)
    content = struct.pack(f">I{array.ndim}I", magic or 0x800 + array.ndim, *array.shape) + array.tobytes()
    content = content[:cut]
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def write_mnist(folder: Path, suffix: str = "", labels: Any = (3, 1, 9)) -> np.ndarray[Any, Any]:
    folder.mkdir(exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 4))
    for split in ("train", "t10k"):
        write_idx(folder / f"{split}-images-idx3-ubyte{suffix}", pixels)
        write_idx(folder / f"{split}-labels-idx1-ubyte{suffix}", labels)
    return pixels


def everything(data: Data) -> dict[str, torch.Tensor]:
    assert hasattr(data.train, "batch")
    batch: dict[str, torch.Tensor] = data.train.batch(range(len(data.train)))
    return batch


@pytest.fixture
def images_of(make_run: Make) -> Make:
    def load_images(path: Path, size: int = 8, **settings: Any) -> Data:
        return load(make_run(model={"kind": "dcgan", "image_size": size}, data__source={"kind": "images", "path": str(path)}, **settings))

    return load_images


def test_digits(make_run: Make) -> None:
    from sklearn.datasets import load_digits

    data = load(make_run())
    assert data.info.name == "digits: 1,437 training images of 8 × 8"
    assert data.eval is not None
    assert (len(data.train), len(data.eval), data.info.image_shape, data.info.num_classes) == (1437, 360, (1, 8, 8), 10)
    batch = everything(data)
    assert batch["image"].dtype == torch.float32
    assert batch["label"].dtype == torch.int64
    theirs = {(tuple(image.flatten()), int(label)) for image, label in zip(*load_digits(return_X_y=True), strict=True)}
    ours = lambda batch: {  # noqa: E731
        (tuple((image.flatten() * 16).tolist()), int(label)) for image, label in zip(batch["image"], batch["label"], strict=True)
    }
    held = data.eval.batch(range(360))
    assert ours(batch) | ours(held) == theirs
    assert not ours(batch) & ours(held)
    assert all(34 <= count <= 38 for count in torch.bincount(held["label"]).tolist()), "each class is held out alike"
    again = everything(load(make_run()))
    assert torch.equal(again["image"], batch["image"])
    assert not torch.equal(everything(load(make_run(seed=7)))["image"], batch["image"])


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_files(tmp_path: Path, make_run: Make, suffix: str) -> None:
    pixels = write_mnist(tmp_path, suffix)
    data = load(make_run(data__source={"kind": "mnist", "path": str(tmp_path)}))
    batch = everything(data)
    assert torch.equal(batch["image"], torch.from_numpy(pixels[:, None] / np.float32(255)).float())
    assert batch["label"].tolist() == [3, 1, 9]
    assert (data.info.image_shape, data.info.num_classes) == ((1, 4, 4), 10)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: write_idx(folder / "train-images-idx3-ubyte", np.zeros((3, 4, 4)), cut=40),
            "truncated or damaged: its header says 3 × 4",
        ),
        (
            lambda folder: write_idx(folder / "train-images-idx3-ubyte", np.zeros((3, 4, 4)), magic=0x801),
            "is not an idx file of 3 dimensions",
        ),
        (lambda folder: (folder / "train-images-idx3-ubyte").write_bytes(b""), "is empty"),
        (lambda folder: write_idx(folder / "train-labels-idx1-ubyte", [1, 2]), "3 images and .* 2 labels"),
        (lambda folder: write_idx(folder / "t10k-labels-idx1-ubyte", [1, 10, 2]), "label 1 is 10, out of range: labels are 0 to 9"),
        (lambda folder: write_idx(folder / "train-images-idx3-ubyte", np.zeros((0, 4, 4))), "holds no samples"),
    ],
)
def test_damaged_idx_files(tmp_path: Path, make_run: Make, damage: Any, message: str) -> None:
    write_mnist(tmp_path)
    damage(tmp_path)
    with pytest.raises(ShoalError, match=message):
        load(make_run(data__source={"kind": "mnist", "path": str(tmp_path)}))


def test_a_truncated_gzip_file(tmp_path: Path, make_run: Make) -> None:
    write_mnist(tmp_path, ".gz")
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:30])
    with pytest.raises(ShoalError, match=r"train-images-idx3-ubyte\.gz is truncated or damaged"):
        load(make_run(data__source={"kind": "mnist", "path": str(tmp_path)}))


def test_missing_mnist_is_downloaded_with_progress_or_asked_for(tmp_path: Path, make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    published = tmp_path / "published"
    write_mnist(published, ".gz")
    run = make_run(data__source={"kind": "mnist", "path": str(tmp_path / "here")})
    monkeypatch.setattr("shoal.data.images.mnist.ADDRESSES", ((tmp_path / "gone").as_uri(), published.as_uri()))
    with pytest.raises(ShoalError, match="checksum differs"):
        load(run)
    assert not list((tmp_path / "here").iterdir()), "what did not pass is not left behind"
    sums = {name: hashlib.md5(gzip.decompress((published / f"{name}.gz").read_bytes())).hexdigest() for name in _mnist_names()}
    monkeypatch.setattr("shoal.data.images.mnist.FILES", sums)
    told: list[tuple[str, int, int | None]] = []
    data = load(run, progress=lambda *step: told.append(step))
    assert len(data.train) == 3
    assert {what for what, _, _ in told} == {f"{name}.gz" for name in sums}
    assert all(done == total for _, done, total in told)
    monkeypatch.setattr("shoal.data.images.mnist.ADDRESSES", ((tmp_path / "gone").as_uri(),))
    elsewhere = make_run(data__source={"kind": "mnist", "path": str(tmp_path / "elsewhere")})
    with pytest.raises(ShoalError, match=r"cannot be downloaded .*: put train-images-idx3-ubyte\.gz, .* in .*elsewhere"):
        load(elsewhere)


def _mnist_names() -> list[str]:
    return [f"{split}-{what}-ubyte" for split in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]


def test_real_mnist(shared_data: Path, make_run: Make) -> None:
    data = load(make_run(data__source={"kind": "mnist", "path": str(shared_data / "mnist")}))
    assert data.eval is not None
    assert (len(data.train), len(data.eval)) == (60_000, 10_000)
    batch = data.eval.batch([0])
    assert int(batch["label"]) == 7
    with gzip.open(shared_data / "mnist" / "t10k-images-idx3-ubyte.gz") as content:
        first = np.frombuffer(content.read(16 + 784), np.uint8, offset=16)
    assert torch.equal(batch["image"].flatten(), torch.from_numpy(first / np.float32(255)))


def test_a_dcgan_gets_its_size_and_channels(make_run: Make, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    source = {"kind": "mnist", "path": str(tmp_path)}
    data = load(make_run(model={"kind": "dcgan", "image_size": 16, "channels": 3}, data__source=source))
    assert data.info.image_shape == (3, 16, 16)
    image = everything(data)["image"]
    assert image.shape == (3, 3, 16, 16)
    assert torch.equal(image[:, 0], image[:, 2])
    with pytest.raises(ShoalError, match="images have 1 channel"):
        load(make_run(model={"kind": "dcgan", "image_size": 16, "channels": 4}, data__source=source))


@pytest.mark.parametrize(("channels", "width", "size", "wanted"), [(1, 8, 16, 1), (1, 8, 5, 3), (3, 13, 16, 3), (3, 9, 4, 1)])
def test_images_that_are_resized_together_are_what_pillow_makes_of_each(channels: int, width: int, size: int, wanted: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, channels, 8, width), dtype=np.uint8)
    found = resize(pixels, size, wanted)
    left, filtered = (width - 8) // 2, Image.Resampling.BICUBIC if size > 8 else Image.Resampling.LANCZOS
    for image, together in zip(pixels, found, strict=True):
        alone = Image.fromarray(image[0] if channels == 1 else image.transpose(1, 2, 0)).crop((left, 0, left + 8, 8))
        expected = np.asarray(alone.resize((size, size), filtered).convert("L" if wanted == 1 else "RGB"))
        assert np.array_equal(together, expected[None] if wanted == 1 else expected.transpose(2, 0, 1))


def test_a_folder_of_images(tmp_path: Path, images_of: Make) -> None:
    for number, suffix in enumerate(("png", "jpg", "webp", "bmp")):
        write_image(tmp_path / "deep" / f"{number}.{suffix}", (8 + number, 8), colour=(255, 0, 0))
    (tmp_path / "notes.txt").write_text("no image")
    data = images_of(tmp_path)
    assert data.info.image_shape == (3, 8, 8)
    assert len(data.train) + len(data.eval) == 4
    image = everything(data)["image"]
    assert "label" not in everything(data)
    assert (image[:, 0] > 0.97).all()
    assert (image[:, 1:] < 0.03).all()


def test_the_square_in_the_middle_is_taken(tmp_path: Path, images_of: Make) -> None:
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 255
    for number in range(2):
        Image.fromarray(wide).save(tmp_path / f"{number}.png")
        Image.fromarray(wide.transpose(1, 0, 2)).save(tmp_path / f"tall{number}.png")
    assert (everything(images_of(tmp_path, 5))["image"] == 1).all()


def test_grey_images_have_one_channel_unless_asked_otherwise(tmp_path: Path, images_of: Make, make_run: Make) -> None:
    for number in range(3):
        write_image(tmp_path / f"{number}.png", colour=100 + number, mode="L")
    assert images_of(tmp_path).info.image_shape == (1, 8, 8)
    write_image(tmp_path / "coloured.png")
    assert images_of(tmp_path).info.image_shape == (3, 8, 8)
    run = make_run(model={"kind": "dcgan", "image_size": 8, "channels": 1}, data__source={"kind": "images", "path": str(tmp_path)})
    assert load(run).info.image_shape == (1, 8, 8)


def test_unusual_image_modes(tmp_path: Path, images_of: Make) -> None:
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([255, 0, 0] * 256)
    palette.save(tmp_path / "palette.png", transparency=b"\x00" * 256)
    write_image(tmp_path / "alpha.png", colour=(255, 0, 0, 128), mode="RGBA")
    deep = tmp_path / "deep"
    deep.mkdir()
    for number in range(2):
        Image.fromarray(np.full((8, 8), 128 << 8, np.uint16)).save(deep / f"{number}.png")
    image = everything(images_of(deep))["image"]
    assert torch.allclose(image, torch.full_like(image, 128 / 255)), "16 bits are scaled, not cut off"
    (tmp_path / "both").mkdir()
    for name in ("palette.png", "alpha.png"):
        (tmp_path / name).rename(tmp_path / "both" / name)
    assert torch.allclose(everything(images_of(tmp_path / "both"))["image"][0, 0], torch.ones(8, 8), atol=0.01)


def write_classes(folder: Path, per_class: int = 12) -> None:
    for label, name in enumerate(("cat", "dog", "eel")):
        for number in range(per_class):
            write_image(folder / name / f"{number}.png", colour=(label * 100, 0, 0))


def test_sub_folders_are_classes(tmp_path: Path, make_run: Make) -> None:
    write_classes(tmp_path)
    data = load(make_run(data__source={"kind": "images", "path": str(tmp_path)}))
    assert data.info.num_classes == 3
    batch = everything(data)
    assert (batch["image"][:, 0, 0, 0].mul(2.55).round().long() == batch["label"]).all()
    assert sorted(set(batch["label"].tolist())) == [0, 1, 2]
    assert (len(data.train), len(data.eval)) == (34, 2)


def test_folders_named_train_and_test_are_splits(tmp_path: Path, make_run: Make) -> None:
    write_classes(tmp_path / "train", 3)
    write_classes(tmp_path / "test", 2)
    data = load(make_run(data__source={"kind": "images", "path": str(tmp_path)}))
    assert (len(data.train), len(data.eval), data.info.num_classes) == (9, 6, 3)
    assert sorted(data.eval.batch(range(6))["label"].tolist()) == [0, 0, 1, 1, 2, 2]


def test_a_class_may_be_called_train(tmp_path: Path, make_run: Make) -> None:
    for name in ("train", "plane", "test-car"):
        for number in range(4):
            write_image(tmp_path / name / f"{number}.png")
    data = load(make_run(data__source={"kind": "images", "path": str(tmp_path)}))
    assert (len(data.train), len(data.eval), data.info.num_classes) == (11, 1, 3)


def test_few_samples_of_sorted_classes_are_of_all_classes(tmp_path: Path, make_run: Make) -> None:
    write_classes(tmp_path)
    data = load(make_run(data__source={"kind": "images", "path": str(tmp_path)}, data__max_train_samples=15, data__max_eval_samples=1))
    assert (len(data.train), len(data.eval)) == (15, 1)
    assert set(everything(data)["label"].tolist()) == {0, 1, 2}


def test_celeba_with_its_partition(tmp_path: Path, images_of: Make) -> None:
    folder = tmp_path / "celeba" / "img_align_celeba"
    for number in range(1, 7):
        write_image(folder / f"{number:06d}.jpg", (178, 218), colour=(number * 40, 0, 0))
    (tmp_path / "celeba" / "list_eval_partition.txt").write_text("".join(f"{n:06d}.jpg {0 if n < 5 else n - 4}\n" for n in range(1, 7)))
    for path in (folder, tmp_path / "celeba"):
        data = images_of(path)
        assert (len(data.train), len(data.eval)) == (4, 2)
        assert data.info.num_classes is None
        assert everything(data)["image"][:, 0].max() < 0.7, "5 and 6 are held out"


def test_a_zip_file(tmp_path: Path, images_of: Make, make_run: Make) -> None:
    write_classes(tmp_path / "files", 4)
    archive = tmp_path / "images.zip"
    with zipfile.ZipFile(archive, "w") as output:
        for file in (tmp_path / "files").rglob("*.png"):
            output.write(file, file.relative_to(tmp_path / "files"))
        output.writestr("__MACOSX/._1.png", b"junk")
    assert len(everything(images_of(archive))["image"]) == 11
    assert len(everything(images_of(tmp_path / "images"))["image"]) == 11, "images.zip stands in for a folder that is not there"
    assert load(make_run(data__source={"kind": "images", "path": str(archive)})).info.num_classes == 3
    archive.write_bytes(archive.read_bytes()[:50])
    with pytest.raises(ShoalError, match=r"images\.zip is not a zip file"):
        images_of(archive)


@pytest.mark.parametrize("packed", [False, True])
def test_many_images_are_decoded_when_needed(tmp_path: Path, images_of: Make, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    write_classes(tmp_path / "files", 6)
    path = tmp_path / "files"
    if packed:
        path = tmp_path / "images.zip"
        with zipfile.ZipFile(path, "w") as output:
            for file in sorted((tmp_path / "files").rglob("*.png")):
                output.write(file, file.relative_to(tmp_path / "files"))
    whole = images_of(path)
    monkeypatch.setattr("shoal.data.images.files.LAZY_BYTES", 100)
    lazy = images_of(path)
    assert type(lazy.train).__name__ == "LazyImages"
    expected, batch = everything(whole), everything(lazy)
    assert torch.equal(batch["image"], expected["image"])
    assert torch.equal(batch["label"], expected["label"])
    feed = ShardFeed(lazy.train, batch_size=4, seed=1, loader=Loader(num_workers=2))
    plain = ShardFeed(whole.train, batch_size=4, seed=1)
    for _ in range(6):
        assert torch.equal(next(feed)["image"], next(plain)["image"])
    feed.close()


def test_corrupt_images_are_named(tmp_path: Path, images_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        write_image(tmp_path / f"{number}.png", (40, 40), colour=(number, 0, 0))
    whole = write_image(tmp_path / "0.png", (40, 40)).read_bytes()
    (tmp_path / "5.png").write_bytes(whole[:60])
    with pytest.raises(ShoalError, match=r"5\.png is not an image that can be read: .*\nReplace or remove it\.$"):
        images_of(tmp_path)
    monkeypatch.setattr("shoal.data.images.files.LAZY_BYTES", 100)
    lazy = images_of(tmp_path)
    with pytest.raises(ShoalError, match=r"5\.png is not an image"):
        [lazy.train.batch([i]) for i in range(len(lazy.train))] + [lazy.eval.batch([0])]
    monkeypatch.undo()
    for number in range(1, 9):
        (tmp_path / f"{number}.png").write_bytes(b"this is no image" if number % 2 else b"")
    with pytest.raises(ShoalError) as caught:
        images_of(tmp_path)
    assert str(caught.value).count(" is not an image that can be read") == 5
    assert "and 3 more" in str(caught.value)


def test_folders_without_images(tmp_path: Path, images_of: Make, make_run: Make) -> None:
    with pytest.raises(ShoalError, match=r"there are no images at .*nowhere: put a folder of images there"):
        images_of(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(ShoalError, match="there are no images in "):
        images_of(tmp_path)


def test_images_without_labels_are_not_classified(tmp_path: Path, make_run: Make) -> None:
    for number in range(3):
        write_image(tmp_path / f"{number}.png")
    with pytest.raises(ShoalError, match="need labels"):
        load(make_run(data__source={"kind": "images", "path": str(tmp_path)}))


def test_images_of_different_sizes_are_only_for_models_that_resize(tmp_path: Path, make_run: Make) -> None:
    write_classes(tmp_path, 2)
    write_image(tmp_path / "cat" / "9.png", (9, 8))
    with pytest.raises(ShoalError, match=r"9\.png: images have different sizes, 8 × 9 and 8 × 8"):
        load(make_run(data__source={"kind": "images", "path": str(tmp_path)}))


def test_npz(tmp_path: Path, images_of: Make, make_run: Make) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(20) % 4)
    data = load(make_run(data__source={"kind": "images", "path": str(tmp_path / "a.npz")}, data__max_eval_samples=1))
    assert (data.info.image_shape, data.info.num_classes, len(data.train)) == ((3, 8, 8), 4, 19)
    np.savez(tmp_path / "b.npz", arr_0=pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255)
    assert torch.equal(everything(images_of(tmp_path / "b.npz"))["image"], everything(data)["image"])
    np.savez(tmp_path / "c.npz", images=pixels[..., 0])
    assert images_of(tmp_path / "c.npz").info.image_shape == (1, 8, 8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": np.zeros((2, 8, 8), np.uint8)}, "has no array of images: .* it has pictures"),
        ({"images": np.zeros((2, 8), np.uint8)}, r"images of shape \(2, 8\)"),
        ({"images": np.full((2, 8, 8), 7.0)}, "pixels must be bytes"),
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([0])}, r"labels of shape \(1,\)"),
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([0, -1])}, "label 1 is -1, out of range"),
        ({"images": np.array([{}, {}], object)}, "is not an npz file that can be read: .*pickle"),
    ],
)
def test_bad_npz(tmp_path: Path, images_of: Make, arrays: Any, message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ShoalError, match=message):
        images_of(tmp_path / "a.npz")


def test_real_faces(shared_data: Path, images_of: Make) -> None:
    data = images_of(shared_data / "faces" / "congress_faces64.npz", 64)
    assert data.eval is not None
    assert (len(data.train) + len(data.eval), data.info.image_shape) == (955, (3, 64, 64))


def test_large_sets_stay_bytes(tmp_path: Path, images_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", images=np.arange(20 * 64, dtype=np.int64).reshape(20, 8, 8).astype(np.uint8))
    expected = everything(images_of(tmp_path / "a.npz"))["image"]
    monkeypatch.setattr("shoal.data.images.samples._FLOAT_BYTES", 100)
    data = images_of(tmp_path / "a.npz")
    assert data.train.images_NCHW.dtype == torch.uint8
    assert torch.equal(everything(data)["image"], expected)


def test_images_do_not_stream_and_are_not_read(make_run: Make) -> None:
    with pytest.raises(ShoalError, match="images are not streamed"):
        make_run(data__streaming=True)
    with pytest.raises(ShoalError, match="learns from text, and the data source digits gives images"):
        make_run(model__kind="gpt", data__source={"kind": "builtin", "name": "digits"})
    with pytest.raises(ShoalError, match="needs images, and `python-source` is text"):
        load(make_run(data__source={"kind": "builtin", "name": "python-source"}))


def test_missing_images_come_from_a_data_set(tmp_path: Path, make_run: Make) -> None:
    """A local copy of a data set stands in for the hub: the same code reads both."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features, Value
    from datasets import Image as ImageFeature

    contents = []
    for number in range(5):
        buffer = io.BytesIO()
        Image.new("RGB", (10, 10), (number * 50, 0, 0)).save(buffer, "PNG" if number % 2 else "JPEG")
        contents.append({"bytes": buffer.getvalue(), "path": None})
    features = Features({"image": ImageFeature(), "id": Value("int64")})
    table = pa.table({"image": contents, "id": list(range(5))}, schema=features.arrow_schema)
    (tmp_path / "hub").mkdir()
    pq.write_table(table, tmp_path / "hub" / "train.parquet")
    source = {"kind": "images", "path": str(tmp_path / "celeba"), "download": str(tmp_path / "hub")}
    run = make_run(model={"kind": "dcgan", "image_size": 8}, data__source=source)
    told: list[int] = []
    data = load(run, progress=lambda what, done, total: told.append(done), cache_dir=tmp_path / "cache")
    assert len(told) == 5
    assert told[-1] == sum(len(content["bytes"]) for content in contents)
    assert len(list((tmp_path / "celeba").iterdir())) == 5
    assert len(data.train) + len(data.eval) == 5


@pytest.mark.usefixtures("no_network")
def test_missing_images_without_a_network(tmp_path: Path, make_run: Make) -> None:
    source = {"kind": "images", "path": str(tmp_path / "celeba"), "download": "nobody/such-a-data-set"}
    run = make_run(model={"kind": "dcgan", "image_size": 8}, data__source=source)
    what = r"no images at .*celeba, and nobody/such-a-data-set cannot be downloaded: put a folder of images there.*data\.source\.path"
    with pytest.raises(ShoalError, match=what):
        load(run, cache_dir=tmp_path / "cache")
