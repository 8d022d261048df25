"""A model: two convolutions and a linear layer, for small images."""

from __future__ import annotations

from typing import Literal

from torch import nn

from shoal.plugins import DataShapes, Model, PositiveInt, Run, builds


class Conv(Model):
    """Two convolutions, a mean over the image, and a linear layer."""

    kind: Literal["conv"] = "conv"
    learns = ("classification",)
    width: PositiveInt = 16
    """Feature maps of each convolution."""


@builds(Conv)
def networks(settings: Conv, run: Run, shapes: DataShapes) -> dict[str, nn.Module]:
    assert shapes.image_shape is not None
    assert shapes.num_classes is not None
    channels, width = shapes.image_shape[0], settings.width
    layers = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return {"model": nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, shapes.num_classes))}
