"""The recurrent model against a numpy LSTM, and its padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shoal.config.schema import model as schema
from shoal.models.lstm import Lstm


def make(**settings: object) -> Lstm:
    torch.manual_seed(0)
    return Lstm(schema.Lstm(**{"hidden_size": 12, "num_layers": 2} | settings), 31).eval()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def layer(x_LD: np.ndarray, weights: dict[str, np.ndarray], i: int) -> np.ndarray:
    """One recurrent layer, step by step from the equations."""
    hidden = cell = np.zeros(x_LD.shape[1])
    outputs = []
    for x in x_LD:
        gates = weights[f"weight_ih_l{i}"] @ x + weights[f"bias_ih_l{i}"] + weights[f"weight_hh_l{i}"] @ hidden + weights[f"bias_hh_l{i}"]
        into, forget, new, out = np.split(gates, 4)
        cell = sigmoid(forget) * cell + sigmoid(into) * np.tanh(new)
        hidden = sigmoid(out) * np.tanh(cell)
        outputs.append(hidden)
    return np.stack(outputs)


def test_logits_equal_the_equations():
    model = make().double()
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    weights = {name: parameter.detach().numpy() for name, parameter in model.recurrent.named_parameters()}
    x = model.token_embedding.weight.detach().numpy()[tokens]
    expected = layer(layer(x, weights, 0), weights, 1) @ model.output_weight.detach().numpy().T
    np.testing.assert_allclose(model(tokens[None])[0].detach().numpy(), expected, atol=1e-12)
    np.testing.assert_array_equal((model.hidden(tokens[None]) @ model.output_weight.T).detach(), model(tokens[None]).detach())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    model, rows = make(), [torch.arange(5), torch.arange(9) + 7]
    sides = [(9 - len(row), 0) if side == "left" else (0, 9 - len(row)) for row in rows]
    tokens = torch.stack([F.pad(row, pad, value=30) for row, pad in zip(rows, sides, strict=True)])
    mask = torch.stack([F.pad(torch.ones_like(row), pad) for row, pad in zip(rows, sides, strict=True)])
    padded = model(tokens, attention_mask=mask)
    for i, row in enumerate(rows):
        torch.testing.assert_close(padded[i][mask[i].bool()], model(row[None])[0], atol=1e-6, rtol=0)


def test_padding_does_not_enter_a_state():
    with pytest.raises(ValueError, match=r"not both"):
        make()(torch.ones(1, 2, dtype=torch.long), cache=make().new_cache(4), attention_mask=torch.ones(1, 2))


@pytest.mark.parametrize("num_layers", [1, 3])
def test_dropout_works_with_any_number_of_layers(num_layers):
    model, tokens = make(num_layers=num_layers, dropout=0.5), torch.arange(10)[None]
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_a_pass_in_fp16_works_on_a_cpu_and_agrees_with_fp32() -> None:
    """torch has no recurrent kernel in fp16 there."""
    model = Lstm(schema.Lstm(hidden_size=8), 11)
    ids_BL = torch.arange(12).view(2, 6) % 11
    with torch.autocast("cpu", torch.float16):
        logits = model(ids_BL)
    logits.float().sum().backward()
    torch.testing.assert_close(logits.float(), model(ids_BL), rtol=1e-2, atol=1e-2)
