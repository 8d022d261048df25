"""Image files to pixels, with Pillow. Shapes: C channels, H × W pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.packages import import_optional
from shoal.errors import ShoalError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Pillow knows others, some of which start other programs."""
MOST_PIXELS = 1 << 26
_GREY = ("1", "L", "LA", "La", "I", "F")


class CorruptImageError(ShoalError):
    """An image that cannot be read."""


def decode(content: bytes, size: int | None, channels: int | None) -> NDArray[np.uint8]:
    """An image file as pixels [C, H, W]. With a size: the square in its middle, resized to it. Raises CorruptImageError."""
    try:
        image = import_optional("PIL.ImageOps").exif_transpose(_open(content))
        pixels: NDArray[np.uint8] = _to_pixels(_square(image, size), channels or (1 if is_grey(content) else 3))
    except ShoalError:
        raise
    except Exception as error:  # decoders of damaged images raise errors of every type
        raise CorruptImageError(str(error) or type(error).__name__) from error
    return pixels


def is_grey(content: bytes) -> bool:
    """Whether an image is grey, from the header of its file."""
    mode: str = _open(content).mode
    return mode in _GREY or mode.startswith("I;")


def resize(pixels_NCHW: NDArray[np.uint8], size: int, channels: int) -> NDArray[np.uint8]:
    """The squares in the middle of images, resized, in grey or in colour.

    Holds: they are what Pillow gives for each image alone. Pillow resizes each row by itself and then each column. So the rows of all
    images are resized as those of one, in a tenth of the time."""
    height, width = pixels_NCHW.shape[2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    squares_NCSS = pixels_NCHW[:, :, top : top + side, left : left + side]
    for _ in ("rows", "columns"):
        squares_NCSS = _resized_rows(squares_NCSS, size).swapaxes(2, 3)
    return _converted(np.ascontiguousarray(squares_NCSS), channels)


def _resized_rows(pixels_NCHW: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    rows = pixels_NCHW.reshape(-1, pixels_NCHW.shape[3])
    image = import_optional("PIL.Image").fromarray(rows).resize((width, len(rows)), _filter(rows.shape[1], width))
    return np.asarray(image).reshape(*pixels_NCHW.shape[:3], width)


def _converted(pixels_NCHW: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Images with another number of channels."""
    count, present, height, width = pixels_NCHW.shape
    if channels == present and channels in (1, 3):
        return pixels_NCHW
    rows = pixels_NCHW.transpose(0, 2, 3, 1).reshape(count * height, width, present)
    image = import_optional("PIL.Image").fromarray(rows[:, :, 0] if present == 1 else rows)
    return np.ascontiguousarray(_to_pixels(image, channels).reshape(channels, count, height, width).swapaxes(0, 1))


def _open(content: bytes) -> Any:
    library = import_optional("PIL.Image")
    try:
        image = library.open(io.BytesIO(content), formats=_FORMATS)
    except library.DecompressionBombError:
        raise CorruptImageError(f"it has more pixels than the {MOST_PIXELS:,} that are read: make it smaller") from None
    if image.width * image.height > MOST_PIXELS:
        raise CorruptImageError(f"it has {image.width * image.height:,} pixels, and at most {MOST_PIXELS:,} are read: make it smaller")
    return image


def _square(image: Any, size: int | None) -> Any:
    if size is None:
        return image
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    if image.mode == "P":  # a palette cannot be interpolated
        image = image.convert("RGBA")
    return image.crop((left, top, left + side, top + side)).resize((size, size), _filter(side, size))


def _filter(before: int, after: int) -> Any:
    resampling = import_optional("PIL.Image").Resampling
    return resampling.LANCZOS if before > after else resampling.BICUBIC


def _to_pixels(image: Any, channels: int) -> NDArray[np.uint8]:
    if channels not in (1, 3):
        raise ShoalError(f"model.channels is {channels}: images have 1 channel (grey) or 3 (colour)")
    if image.mode.startswith("I"):  # 16 bits a pixel: keep the upper 8, where Pillow would cut off at 255
        image = import_optional("PIL.Image").fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P":
        image = image.convert("RGBA")
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
