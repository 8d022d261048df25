"""A generator and a discriminator of images, made of convolutions (Radford, Metz, Chintala 2015).

Shapes: B batch, Z numbers of noise, C channels, W width and height of an image.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema import model as schema
from shoal.errors import ShoalError

SMALLEST = {4: 8, 7: 14}
"""An image grows by doubling from 4 × 4 or 7 × 7; and the smallest image made so."""


class Generator(nn.Module):
    """Noise [B, Z] to images [B, C, W, W] between -1 and 1."""

    def __init__(self, latent_dim: int, features: int, channels: int, image_size: int) -> None:
        super().__init__()
        self.latent_dim = latent_dim
        base, doublings = _growth(image_size)
        widths = [features * 2**i for i in reversed(range(doublings))]
        layers: list[nn.Module] = [nn.ConvTranspose2d(latent_dim, widths[0], base, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(True)]
        for inputs, outputs in pairwise(widths):
            layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(widths[-1], channels, 4, 2, 1, bias=False), nn.Tanh())
        _initialise(self)

    def forward(self, noise_BZ: Tensor) -> Tensor:
        return self.layers(noise_BZ[:, :, None, None])


class Discriminator(nn.Module):
    """Images [B, C, W, W] to one logit each [B]: above 0 is taken for real."""

    def __init__(self, features: int, channels: int, image_size: int) -> None:
        super().__init__()
        base, halvings = _growth(image_size)
        widths = [features * 2**i for i in range(halvings)]
        layers: list[nn.Module] = [nn.Conv2d(channels, features, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, base, bias=False))
        _initialise(self)

    def forward(self, images_BCWW: Tensor) -> Tensor:
        return self.layers(images_BCWW).flatten()


def players(model: schema.Dcgan, run: Run, shapes: DataShapes) -> dict[str, nn.Module]:
    channels = _channels(model, shapes)
    return {
        "generator": Generator(model.latent_dim, model.generator_features, channels, model.image_size),
        "discriminator": Discriminator(model.discriminator_features, channels, model.image_size),
    }


def _channels(model: schema.Dcgan, shapes: DataShapes) -> int:
    if shapes.image_shape is None and model.channels is None:
        raise ShoalError("a dcgan needs images: data.source gives none; choose a source of images, or set model.channels")
    if shapes.image_shape is None:
        return model.channels or 0
    channels, height, width = shapes.image_shape
    if (height, width) != (model.image_size, model.image_size):
        raise ShoalError(
            f"model.image_size is {model.image_size}, but the images of data.source have {height} × {width}; make them one size"
        )
    if model.channels not in (None, channels):
        raise ShoalError(
            f"model.channels is {model.channels}, but the images of data.source have {channels}; set it to {channels}, or to null"
        )
    return channels


def _growth(image_size: int) -> tuple[int, int]:
    """The size an image grows from, and how often it doubles."""
    for base, smallest in SMALLEST.items():
        quotient = image_size // base
        if image_size >= smallest and image_size % base == 0 and quotient & (quotient - 1) == 0:
            return base, quotient.bit_length() - 1
    raise ShoalError(f"model.image_size {image_size} cannot be made by doubling 4 or 7; near sizes that can: {_near(image_size)}")


def _near(image_size: int) -> str:
    sizes = sorted(smallest << i for smallest in SMALLEST.values() for i in range(image_size.bit_length()))
    below = [size for size in sizes if size < image_size][-1:]
    return " and ".join(map(str, below + [size for size in sizes if size > image_size][:1]))


def _initialise(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
            nn.init.zeros_(module.bias)
