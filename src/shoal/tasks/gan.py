"""A generator learns to draw what a discriminator cannot tell from real images (DCGAN, non-saturating loss)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema import task as schema
from shoal.config.schema.model import Dcgan
from shoal.tasks.base import Batch, Loss, MetricMeans, Task


def build(task: schema.Gan, run: Run, players: dict[str, nn.Module], shapes: DataShapes) -> Gan:
    assert isinstance(run.model, Dcgan)
    return Gan(players, run.model.latent_dim, run.seed)


class Gan(Task):
    """The engine takes each loss's gradient for its own network only.

    So the discriminator's gradient holds nothing of the generator's backward pass, wherever the two are stepped. The generator's loss is
    asked for last: a discriminator that was stepped before that judges with its new weights.
    """

    headline = "discriminator_loss"
    draws_images = True

    def __init__(self, players: dict[str, nn.Module], latent_dim: int, seed: int) -> None:
        self.players = players
        self.latent_dim = latent_dim
        self.seed = seed

    def count(self, batch: Batch) -> int:
        return len(batch["image"])

    def losses(self, batch: Batch) -> Iterator[Loss]:
        real = batch["image"] * 2 - 1
        fake = self.players["generator"](torch.randn(len(real), self.latent_dim, device=real.device))
        discriminator = self.players["discriminator"]
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        accuracy = ((on_real > 0).float().mean() + (on_fake < 0).float().mean()) / 2
        yield Loss("discriminator", loss, {"discriminator_loss": loss, "discriminator_accuracy": accuracy})
        loss = F.softplus(-discriminator(fake)).mean()
        yield Loss("generator", loss, {"generator_loss": loss})

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        mean = MetricMeans()
        generator = torch.Generator().manual_seed(self.seed)
        for batch in batches:
            real = batch["image"] * 2 - 1
            noise = torch.randn(len(real), self.latent_dim, generator=generator).to(real.device)
            on_real, on_fake = self.players["discriminator"](real), self.players["discriminator"](self.players["generator"](noise))
            metrics = {
                "discriminator_loss": F.softplus(-on_real).mean() + F.softplus(on_fake).mean(),
                "generator_loss": F.softplus(-on_fake).mean(),
                "discriminator_accuracy": ((on_real > 0).float().mean() + (on_fake < 0).float().mean()) / 2,
            }
            mean.add(metrics, self.count(batch))
        return mean.result()

    @torch.no_grad()
    def images(self, count: int = 64) -> Tensor:
        """Images from noise that is the same at every call, in 0..1."""
        noise = torch.randn(count, self.latent_dim, generator=torch.Generator().manual_seed(self.seed))
        generator = self.players["generator"]
        training = generator.training
        generator.eval()
        drawn: Tensor = generator(noise.to(next(generator.parameters()).device))
        generator.train(training)
        return ((drawn + 1) / 2).clamp(0, 1).float().cpu()
