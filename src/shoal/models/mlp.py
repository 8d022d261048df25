"""Fully connected layers for images and other flat inputs."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor, nn

from shoal.config import Run
from shoal.config.data_shapes import DataShapes, misfit
from shoal.config.schema import model as schema
from shoal.errors import ShoalError


class Mlp(nn.Module):
    """Flatten, hidden layers with ReLU after each, one logit per class.

    Input and hidden layers have LayerNorm: the network learns about as much in one epoch as one without does in two, and needs no
    statistics of the whole data set, which no single worker has.
    """

    def __init__(self, input_dim: int, hidden_sizes: tuple[int, ...], output_dim: int) -> None:
        super().__init__()
        widths = (input_dim, *hidden_sizes)
        hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.LayerNorm(pair[1]), nn.ReLU())]
        self.layers = nn.Sequential(nn.LayerNorm(input_dim, elementwise_affine=False), *hidden, nn.Linear(widths[-1], output_dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


def players(model: schema.Mlp, run: Run, shapes: DataShapes) -> dict[str, nn.Module]:
    return {"model": Mlp(_input_dim(model, shapes), model.hidden_sizes, _output_dim(model, shapes))}


def _input_dim(model: schema.Mlp, shapes: DataShapes) -> int:
    found = math.prod(shapes.image_shape) if shapes.image_shape else None
    if found is None and model.input_dim is None:
        raise ShoalError("an mlp needs images: data.source gives none; choose a source of images, or set model.input_dim")
    if found is not None and model.input_dim not in (None, found):
        shape = " × ".join(map(str, shapes.image_shape or ()))
        raise misfit("model.input_dim", model.input_dim, f"an image of data.source has {shape} = {found} numbers", str(found))
    return model.input_dim or found or 0


def _output_dim(model: schema.Mlp, shapes: DataShapes) -> int:
    if shapes.num_classes is None and model.output_dim is None:
        raise ShoalError("an mlp needs labels: data.source gives none; choose a source with labels, or set model.output_dim")
    if shapes.num_classes is not None and model.output_dim is not None and model.output_dim < shapes.num_classes:
        classes = shapes.num_classes
        raise misfit("model.output_dim", model.output_dim, f"data.source has {classes} classes", f"{classes} or more")
    return model.output_dim or shapes.num_classes or 0
