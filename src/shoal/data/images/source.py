"""The data source `images`: finds the images, downloads them if they are missing, and loads them."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.config import Run
from shoal.config.schema.data import Images
from shoal.data.hub.dataset import DataRequest, load_splits
from shoal.data.hub.files import copy_files
from shoal.data.images.files import Folder, ZipFile, find_images, image_samples
from shoal.data.images.samples import Pixels, Target, from_pixels, image_data
from shoal.data.loaded_data import Data
from shoal.data.packages import import_optional
from shoal.errors import ShoalError
from shoal.untrusted.data_files import check_npz

_ARRAYS = ("images", "image", "x", "data", "arr_0")
_MOST_CLASSES = 1_000_000
_LABELS = ("labels", "label", "y", "targets")


def load_images(source: Images, run: Run, request: DataRequest) -> Data:
    path = _find(source, request)
    if path.suffix == ".npz":
        return _load_npz(path, run)
    store = ZipFile(path) if path.suffix == ".zip" else Folder(path)
    layout = find_images(store)
    target = Target.of(run)
    train = image_samples(store, layout, layout.train, target)
    channels, height, width = train.batch([0])["image"].shape[1:]
    held_out = image_samples(store, layout, layout.held_out, target, (channels, height, width)) if layout.held_out else None
    return image_data(run, path.stem, train, held_out, (channels, height, width), len(layout.classes) or None)


def _find(source: Images, request: DataRequest) -> Path:
    path = Path(source.path).expanduser()
    existing = find_existing(path)
    if existing is not None:
        return existing
    remedy = f"put a folder of images there, or {path.name}.zip next to it"
    if source.download is None:
        raise ShoalError(f"there are no images at {path}: {remedy}, or set data.source.path")
    try:
        return _download(request._replace(name=source.download, streaming=True), path)
    except (ShoalError, OSError) as error:
        raise ShoalError(
            f"there are no images at {path}, and {source.download} cannot be downloaded: {remedy}, or set data.source.path; "
            f"to try without images: --set data.source.kind=builtin --set data.source.name=digits\n({error})"
        ) from error


def find_existing(path: Path) -> Path | None:
    """The folder, zip or npz file of images at this path; None if there is none."""
    for candidate in (path, path.with_name(path.name + ".zip"), path.with_name(path.name + ".npz")):
        if candidate.is_file() or (candidate.is_dir() and any(candidate.iterdir())):
            return candidate
    return None


def _download(request: DataRequest, folder: Path) -> Path:
    """Write the images of a data set as files. The folder appears when it is complete. Of several processes, one downloads."""
    unfinished = folder.with_name(folder.name + ".part")
    while True:
        unfinished.mkdir(parents=True, exist_ok=True)
        try:
            lock = import_optional("filelock").FileLock(unfinished / "lock").acquire()
        except FileNotFoundError:  # the process that held the lock has finished, and removed the folder
            continue
        with lock:
            found = find_existing(folder)
            if found is None:
                local = Path(request.name).expanduser().exists()
                files = request.name if local else str(copy_files(request.name, unfinished / "files", request.token, request.progress))
                found = _unpack(request._replace(name=files), request.name, unfinished / "images").replace(folder)
            shutil.rmtree(unfinished, ignore_errors=True)
        return found


def _unpack(request: DataRequest, name: str, folder: Path) -> Path:
    """Write the images of a local copy of a data set."""
    splits = load_splits(request, None)
    dataset = splits.get("train", next(iter(splits.values())))
    column = next((name for name, kind in (dataset.features or {}).items() if type(kind).__name__ == "Image"), None)
    if column is None:
        raise ShoalError(f"{name} has no column of images")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    total, done = dataset.info.dataset_size or dataset.info.download_size, 0
    for number, row in enumerate(dataset.cast_column(column, type(dataset.features[column])(decode=False)), 1):
        image = row[column]
        content = image["bytes"] if image.get("bytes") else Path(image["path"]).read_bytes()
        (folder / f"{number:06d}{_suffix(content)}").write_bytes(content)
        done += len(content)
        if request.progress:
            request.progress(f"{name} (images)", done, total)
    return folder


def _suffix(content: bytes) -> str:
    starts = {b"\xff\xd8": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp", b"BM": ".bmp", b"GIF8": ".gif"}
    return next((suffix for start, suffix in starts.items() if content.startswith(start)), ".png")


def _load_npz(path: Path, run: Run) -> Data:
    pixels, labels = _read_npz(path)
    samples = from_pixels(pixels, labels, Target.of(run))
    channels, height, width = samples.images_NCHW.shape[1:]
    num_classes = None if labels is None else int(labels.max()) + 1
    return image_data(run, path.stem, samples, None, (channels, height, width), num_classes)


def _read_npz(path: Path) -> tuple[Pixels, NDArray[np.int64] | None]:
    try:
        check_npz(path)
        with np.load(path, allow_pickle=False) as content:
            name = next((name for name in _ARRAYS if name in content), None)
            label = next((name for name in _LABELS if name in content), None)
            if name is None:
                raise ShoalError(f"{path} has no array of images: expected one named {', '.join(_ARRAYS)}; it has {', '.join(content)}")
            return _to_pixels(content[name], f"{path} ({name})"), _to_labels(content[label], content[name], path) if label else None
    except (OSError, ValueError, EOFError, MemoryError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ShoalError(f"{path} is not an npz file that can be read: {error}") from error


def _to_pixels(images: NDArray[Any], where: str) -> Pixels:
    """Images as uint8 [N, C, H, W], from uint8 or floats from 0 to 1, with channels first, last, or none."""
    if images.ndim not in (3, 4) or not images.size:
        raise ShoalError(f"{where}: images of shape {images.shape}; expected [N, H, W], [N, H, W, C] or [N, C, H, W]")
    if images.dtype != np.uint8:
        if images.dtype.kind != "f" or not (np.isfinite(images).all() and images.min() >= 0 and images.max() <= 1):
            raise ShoalError(f"{where}: pixels must be bytes (uint8), or numbers from 0 to 1; they are {images.dtype}")
        images = (images * 255).round().astype(np.uint8)
    if images.ndim == 3:
        return images[:, None]
    if images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        return images
    if images.shape[3] not in (1, 3):
        raise ShoalError(f"{where}: images of shape {images.shape} have neither 1 channel nor 3")
    return images.transpose(0, 3, 1, 2)


def _to_labels(labels: NDArray[Any], images: NDArray[Any], path: Path) -> NDArray[np.int64]:
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise ShoalError(
            f"{path}: labels of shape {labels.shape} and type {labels.dtype} for {len(images)} images: expected one integer each"
        )
    if labels.min() < 0:
        raise ShoalError(f"{path}: label {int(np.argmin(labels))} is {labels.min()}, out of range: labels begin at 0")
    if labels.max() >= _MOST_CLASSES:
        at = int(np.argmax(labels))
        raise ShoalError(f"{path}: label {at} is {labels[at]}, out of range: labels are below {_MOST_CLASSES:,}")
    return labels.astype(np.int64)
