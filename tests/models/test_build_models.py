"""From settings to networks: the right ones, the same ones each time, and refusals that name the settings."""

from __future__ import annotations

import pytest
import torch

from shoal.config.schema import Run
from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models import build

MODELS = [
    schema.Mlp(),
    schema.Lstm(hidden_size=16),
    schema.Gpt(hidden_size=16, num_layers=2),
    schema.Moe(hidden_size=16, num_layers=2, num_heads=2, max_seq_len=12),
    schema.Dcgan(image_size=8, generator_features=4, discriminator_features=4),
]


@pytest.fixture
def anything(shapes):
    return shapes(image_shape=(1, 8, 8), num_classes=10, vocab_size=40)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.kind)
def test_the_seed_decides_the_weights(anything, model):
    def weights(seed: int) -> list[torch.Tensor]:
        players = build(Run(model=model, seed=seed), anything)
        return [tensor for player in players.values() for tensor in player.state_dict().values()]

    torch.manual_seed(1)
    first, state = weights(7), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())  # nothing was drawn from the global generator
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, weights(7), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, weights(8), strict=True))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.kind)
def test_players_are_named(anything, model):
    assert list(build(Run(model=model), anything)) == (["generator", "discriminator"] if model.kind == "dcgan" else ["model"])


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.kind)
def test_weights_are_made_on_the_cpu(anything, model):
    with torch.device("meta"):
        players = build(Run(model=model), anything)
    assert {tensor.device.type for player in players.values() for tensor in player.state_dict().values()} == {"cpu"}


# --- mlp --------------------------------------------------------------------------------------------------------------


def normalised(x):
    return (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()


def test_mlp_is_its_layers(shapes):
    model = build(Run(model=schema.Mlp(hidden_sizes=(7, 5))), shapes(image_shape=(3, 4, 4), num_classes=6))["model"].double()
    images = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    x = normalised(images.reshape(2, 48))
    weights = iter(parameter.detach() for parameter in model.parameters())
    for _ in range(2):
        x = normalised(x @ next(weights).T + next(weights)) * next(weights) + next(weights)
        x = x.clamp(min=0)
    x = x @ next(weights).T + next(weights)
    torch.testing.assert_close(model(images), x)
    torch.testing.assert_close(model(images.reshape(2, 48)), x)


def test_mlp_with_no_hidden_layer_is_linear(shapes):
    model = build(Run(model=schema.Mlp(hidden_sizes=())), shapes(image_shape=(1, 8, 8), num_classes=10))["model"]
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(10, 64), (10,)]


def test_mlp_sizes_may_be_set(shapes):
    model = build(Run(model=schema.Mlp(input_dim=20, output_dim=3)), shapes())["model"]
    assert model(torch.zeros(2, 20)).shape == (2, 3)
    assert build(Run(model=schema.Mlp(output_dim=12)), shapes(image_shape=(1, 8, 8), num_classes=10))["model"](
        torch.zeros(1, 64)
    ).shape == (1, 12)


@pytest.mark.parametrize(
    ("settings", "data", "message"),
    [
        ({"input_dim": 784}, {}, r"model.input_dim is 784, but an image of data.source has 1 × 8 × 8 = 64 numbers"),
        ({"output_dim": 9}, {}, "model.output_dim is 9, but data.source has 10 classes"),
        ({}, {"image_shape": None}, "an mlp needs images.*data.source.*model.input_dim"),
        ({}, {"num_classes": None}, "an mlp needs labels.*data.source.*model.output_dim"),
    ],
)
def test_mlp_refusals(shapes, settings, data, message):
    with pytest.raises(ShoalError, match=message):
        build(Run(model=schema.Mlp(**settings)), shapes(**{"image_shape": (1, 8, 8), "num_classes": 10} | data))


# --- language models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [schema.Lstm, schema.Gpt])
def test_vocabulary(shapes, section):
    small = {"hidden_size": 16, "num_layers": 1}
    assert build(Run(model=section(**small)), shapes(vocab_size=40))["model"].vocab_size == 40
    assert build(Run(model=section(**small, vocab_size=50)), shapes(vocab_size=40))["model"].vocab_size == 50
    assert build(Run(model=section(**small, vocab_size=50)), shapes())["model"].vocab_size == 50
    with pytest.raises(ShoalError, match=r"model.vocab_size is 30, but the tokenizer \(data.tokenizer\) has 40 tokens"):
        build(Run(model=section(**small, vocab_size=30)), shapes(vocab_size=40))
    with pytest.raises(ShoalError, match=r"needs text.*data.source.*model.vocab_size"):
        build(Run(model=section(**small)), shapes(image_shape=(1, 8, 8)))
