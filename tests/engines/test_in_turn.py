"""Gradients that others step along are taken network after network, as in a process alone."""

from __future__ import annotations

import pytest
import torch

from shoal.config import load
from shoal.engines import SingleEngine
from shoal.models.dcgan import Discriminator, Generator
from shoal.tasks.gan import Gan

ADAM = ("training.optimizer.name=Adam", "training.optimizer.learning_rate=0.01")


def engine(*settings: str) -> SingleEngine:
    run = load("starter", overrides=[*ADAM, *settings], environ={})
    torch.manual_seed(0)
    players = {"generator": Generator(4, 4, 1, 8), "discriminator": Discriminator(4, 1, 8)}
    return SingleEngine(run, Gan(players, 4, 0), torch.device("cpu"), 10)


def images(number: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(100 + number)  # and so is the noise that is drawn next
    return [{"image": torch.rand(6, 1, 8, 8)}]


def test_who_expects_the_right_step_takes_the_gradients_of_a_process_alone() -> None:
    alone, coordinator, worker = engine(), engine(), engine()
    for number in range(5):
        alone.step(images(number))
        worker.vector.copy_(coordinator.vector)
        worker.load_buffers(coordinator.buffers)
        worker.expect(alone.vector - coordinator.vector)
        worker.gradients(images(number))
        assert torch.equal(worker.vector, coordinator.vector)  # where it looked ahead to it does not stay
        coordinator.follow_report(worker.take_report())
        coordinator.apply(worker.gradient, number)
        assert torch.allclose(coordinator.vector, alone.vector, atol=1e-5)
        assert torch.allclose(coordinator.buffers, alone.buffers, atol=1e-5)


def test_the_first_network_has_the_gradient_it_always_has_and_the_next_another() -> None:
    plain, ahead = engine(), engine()
    plain.gradients(images(0))
    ahead.expect(torch.full_like(ahead.vector, 0.1))
    ahead.gradients(images(0))
    assert torch.equal(plain.networks["discriminator"].gradient, ahead.networks["discriminator"].gradient)
    assert not torch.equal(plain.networks["generator"].gradient, ahead.networks["generator"].gradient)


def test_it_comes_back_where_memory_is_too_small_for_the_next_network() -> None:
    worker = engine()
    worker.expect(torch.full_like(worker.vector, 0.1))
    before, judged = worker.vector.clone(), worker.task.players["discriminator"].forward
    calls = iter([judged, judged])  # real and drawn images; the third time is for the generator

    def forward(images: torch.Tensor) -> torch.Tensor:
        if (judge := next(calls, None)) is None:
            raise torch.OutOfMemoryError("out of memory")
        return judge(images)

    worker.task.players["discriminator"].forward = forward  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        worker.gradients(images(0))
    assert torch.equal(worker.vector, before)
