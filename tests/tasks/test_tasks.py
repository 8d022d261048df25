"""Losses, penalties and evaluations against plain references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.engines.single import SingleEngine
from shoal.tasks.classification import Classification
from shoal.tasks.gan import Gan
from shoal.tasks.images import as_text, grid
from shoal.tasks.language import LanguageModelling, cross_entropy


class Fixed(nn.Module):
    """A "model" that gives the logits it holds."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.vocab_size = logits.shape[-1]

    def forward(self, inputs: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.logits[: len(inputs)]


def test_classification_means_over_all_samples_whatever_the_batches() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(10, 3), torch.randint(3, (10,))
    task = Classification({"model": nn.Identity()})
    batches = [{"image": logits[:7], "label": labels[:7]}, {"image": logits[7:], "label": labels[7:]}]
    metrics = task.evaluate(batches)
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))


def test_padding_and_prompt_do_not_count() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 5)
    labels = torch.tensor([[1, 2, -100, -100], [-100, 3, 4, 0]])
    expected = -sum(float(logits[b, t].log_softmax(-1)[labels[b, t]]) for b in range(2) for t in range(4) if labels[b, t] >= 0) / 5
    assert float(cross_entropy(logits, labels)) == pytest.approx(expected, rel=1e-5)
    task = LanguageModelling({"model": Fixed(logits)})
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "labels": labels, "attention_mask": labels >= 0}
    assert task.count(batch) == 5
    changed = logits.clone()
    changed[0, 2:] += torch.randn(2, 5) * 100
    assert float(cross_entropy(changed, labels)) == pytest.approx(expected, rel=1e-5)


def test_a_batch_in_which_nothing_counts_has_no_loss() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((1, 3), -100))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


class Tiny(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)).tanh().view(len(x), *((1, 2, 2) if self.layer.out_features == 4 else ()))


def test_each_network_of_a_gan_gets_the_gradient_of_its_own_loss_only() -> None:
    """The known trap: the generator's backward pass must leave nothing in the discriminator's gradient."""
    from shoal.config import load

    torch.manual_seed(0)
    players = {"generator": Tiny(3, 4), "discriminator": Tiny(4, 1)}
    batch = {"image": torch.rand(5, 1, 2, 2)}
    run = load("starter", overrides=["training.max_steps=1"], environ={})
    engine = SingleEngine(run, Gan(players, 3, seed=0), torch.device("cpu"), 1)
    torch.manual_seed(1)
    engine.gradients([batch])
    ours = {name: network.gradient.clone() for name, network in engine.networks.items()}

    torch.manual_seed(1)
    noise = torch.randn(5, 3)
    real, discriminator, generator = batch["image"] * 2 - 1, players["discriminator"], players["generator"]
    fake = generator(noise)
    d_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
    g_loss = F.softplus(-discriminator(fake)).mean()
    for name, loss in (("discriminator", d_loss), ("generator", g_loss)):
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(players[name].parameters()), retain_graph=True)])
        assert torch.allclose(ours[name], expected, atol=1e-7), name


def test_grids_and_text_pictures() -> None:
    images = torch.rand(5, 3, 4, 4)
    sheet = grid(images, columns=3)
    assert sheet.shape == (3, 10, 16)
    assert torch.equal(sheet[:, 6:10, 6:10], images[4])
    assert as_text(torch.tensor([[0.0, 1.0]])) == ["  @@"]
