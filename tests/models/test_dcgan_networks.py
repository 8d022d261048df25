"""Shapes, sizes and beginnings of the two networks of a GAN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.config.schema import Run
from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models import build


def networks(shapes, size: int, channels: int = 3, **settings: object) -> tuple[nn.Module, nn.Module]:
    model = schema.Dcgan(image_size=size, **{"latent_dim": 10, "generator_features": 4, "discriminator_features": 5} | settings)
    players = build(Run(model=model), shapes(image_shape=(channels, size, size)))
    assert list(players) == ["generator", "discriminator"]
    return players["generator"], players["discriminator"]


@pytest.mark.parametrize("size", [8, 14, 16, 28, 32, 56, 64, 128])
@pytest.mark.parametrize("channels", [1, 3])
def test_shapes(shapes, size, channels):
    generator, discriminator = networks(shapes, size, channels)
    images = generator(torch.randn(2, generator.latent_dim))
    assert images.shape == (2, channels, size, size)
    assert images.abs().max() <= 1
    assert discriminator(images).shape == (2,)
    discriminator(images).sum().backward()
    assert all(parameter.grad is not None for parameter in [*generator.parameters(), *discriminator.parameters()])


@pytest.mark.parametrize(
    ("size", "near"),
    [
        (7, "8"),
        (1, "8"),
        (9, "8 and 14"),
        (12, "8 and 14"),
        (30, "28 and 32"),
        (60, "56 and 64"),
        (100, "64 and 112"),
        (250, "224 and 256"),
    ],
)
def test_odd_sizes_are_refused_with_near_ones(shapes, size, near):
    with pytest.raises(ShoalError, match=rf"model.image_size {size} .*: {near}$"):
        networks(shapes, size)


def test_64_pixels_are_the_published_network(shapes):
    """The sizes of the DCGAN that PyTorch's own tutorial has: 3,576,704 and 2,765,568 weights."""
    generator, discriminator = networks(shapes, 64, latent_dim=100, generator_features=64, discriminator_features=64)
    assert sum(parameter.numel() for parameter in generator.parameters()) == 3_576_704
    assert sum(parameter.numel() for parameter in discriminator.parameters()) == 2_765_568


def test_normalisation_in_the_usual_places(shapes):
    generator, discriminator = networks(shapes, 64)
    for network, expected in ((generator, 4), (discriminator, 3)):
        kinds = [type(layer) for layer in network.layers]
        assert kinds.count(nn.BatchNorm2d) == expected
    assert not isinstance(discriminator.layers[1], nn.BatchNorm2d)
    assert isinstance(generator.layers[-1], nn.Tanh)


def test_initial_weights(shapes):
    for network in networks(shapes, 64, generator_features=32, discriminator_features=32):
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                assert module.weight.mean().item() == pytest.approx(0, abs=2e-3)
                assert module.weight.std().item() == pytest.approx(0.02, rel=0.1)
            elif isinstance(module, nn.BatchNorm2d):
                assert module.weight.mean().item() == pytest.approx(1, abs=0.02)
                assert 0.01 < module.weight.std().item() < 0.03
                assert (module.bias == 0).all()


def test_images_that_do_not_fit_are_refused(shapes):
    with pytest.raises(ShoalError, match=r"model.image_size is 64, but the images of data.source have 28 × 28"):
        build(Run(model=schema.Dcgan(image_size=64)), shapes(image_shape=(1, 28, 28)))
    with pytest.raises(ShoalError, match=r"model.channels is 3, but the images of data.source have 1"):
        build(Run(model=schema.Dcgan(image_size=28, channels=3)), shapes(image_shape=(1, 28, 28)))
    with pytest.raises(ShoalError, match=r"a dcgan needs images.*model.channels"):
        build(Run(model=schema.Dcgan(image_size=28)), shapes(vocab_size=5))


def test_channels_may_be_set_without_data(shapes):
    generator = build(Run(model=schema.Dcgan(image_size=28, channels=2, generator_features=4)), shapes())["generator"]
    assert generator(torch.zeros(2, 100)).shape == (2, 2, 28, 28)
