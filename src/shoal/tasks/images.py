"""Images for people: a grid as a PNG file, and pictures made of characters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shoal.files import make_folder, writing

_SHADES = " .:-=+*#%@"


def grid(images_NCHW: Tensor, columns: int = 8, gap: int = 2) -> Tensor:
    """Images side by side, as one image [C, H, W]."""
    count, channels, height, width = images_NCHW.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    sheet = torch.ones(channels, rows * (height + gap) - gap, columns * (width + gap) - gap)
    for i, image in enumerate(images_NCHW):
        top, left = (i // columns) * (height + gap), (i % columns) * (width + gap)
        sheet[:, top : top + height, left : left + width] = image
    return sheet


def save_png(image_CHW: Tensor, path: Path) -> None:
    """Write an image with values in 0..1. The file appears whole."""
    from PIL import Image

    pixels = (image_CHW.clamp(0, 1) * 255).round().to(torch.uint8)
    array = pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).numpy()
    partial = path.with_name(f".{path.name}")
    with writing(path):
        make_folder(path.parent)
        Image.fromarray(array).save(partial, "PNG")
        partial.replace(path)


def as_text(image_HW: Tensor) -> list[str]:
    """A grey image as lines of characters, two for each pixel."""
    levels = (image_HW.clamp(0, 1) * (len(_SHADES) - 1)).round().long()
    return ["".join(_SHADES[level] * 2 for level in row) for row in levels.tolist()]
