"""A data source: pictures of stripes, in one of two directions."""

from __future__ import annotations

from typing import Literal

import numpy as np

from shoal.plugins import Data, DataRequest, DataSource, ImageTarget, PositiveInt, Run, builds, from_pixels, image_data


class Stripes(DataSource):
    """Grey pictures of 8 × 8 with stripes across or down: two classes."""

    kind: Literal["stripes"] = "stripes"
    gives = "images"
    count: PositiveInt = 400
    """Pictures in all; some of them are held out."""


@builds(Stripes)
def load(source: Stripes, run: Run, request: DataRequest) -> Data:
    """A source of text returns a list of `TextPart` instead, and Shoal does the rest."""
    random = np.random.default_rng(run.seed)
    labels = random.integers(0, 2, source.count)
    bright = random.integers(100, 255, (source.count, 8)).astype(np.uint8) * (np.arange(8) % 2).astype(np.uint8)
    pixels = np.repeat(bright[:, None, :, None], 8, axis=3)
    pixels[labels == 1] = pixels[labels == 1].transpose(0, 1, 3, 2)
    samples = from_pixels(pixels, labels, ImageTarget.of(run))
    return image_data(run, "stripes", samples, None, (1, 8, 8), 2)
