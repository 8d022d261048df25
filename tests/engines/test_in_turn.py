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


@pytest.mark.parametrize(
    "settings", [(), ("training.clipping.enabled=true", "training.clipping.max_norm=0.05"), ("training.schedule.kind=linear",)]
)
def test_a_worker_whose_gradients_alone_make_the_steps_is_a_process_alone(settings: tuple[str, ...]) -> None:
    alone, coordinator, worker = engine(*settings), engine(*settings), engine(*settings)
    for number in range(5):
        alone.step(images(number))
        worker.vector.copy_(coordinator.vector)
        worker.load_buffers(coordinator.buffers)
        worker.gradients_in_turn(images(number), number)
        assert torch.equal(worker.vector, coordinator.vector)  # the step that was looked ahead to is undone
        coordinator.load_buffers(worker.buffers)
        coordinator.apply(worker.gradient, number)
        assert torch.equal(coordinator.vector, alone.vector)
        assert torch.equal(coordinator.buffers, alone.buffers)


def test_the_first_network_has_the_gradient_it_always_has_and_the_next_another() -> None:
    plain, ahead = engine(), engine("training.clipping.enabled=true", "training.clipping.max_norm=0.001")
    plain.gradients(images(0))
    ahead.gradients_in_turn(images(0), 0)
    assert torch.equal(plain.networks["discriminator"].gradient, ahead.networks["discriminator"].gradient)
    assert not torch.equal(plain.networks["generator"].gradient, ahead.networks["generator"].gradient)


def test_a_gradient_that_is_not_finite_is_forgotten() -> None:
    worker, other = engine(), engine()
    worker.gradients_in_turn([{"image": torch.full((6, 1, 8, 8), torch.nan)}], 0)
    worker.load_buffers(other.buffers)
    for one in (worker, other):
        one.gradients_in_turn(images(1), 0)
    assert torch.equal(worker.gradient, other.gradient)
    assert torch.isfinite(worker.gradient).all()


def test_the_step_is_undone_where_memory_is_too_small_for_the_next_network() -> None:
    worker = engine()
    before, judged = worker.vector.clone(), worker.task.players["discriminator"].forward
    calls = iter([judged, judged])  # real and drawn images; the third time is for the generator

    def forward(images: torch.Tensor) -> torch.Tensor:
        if (judge := next(calls, None)) is None:
            raise torch.OutOfMemoryError("out of memory")
        return judge(images)

    worker.task.players["discriminator"].forward = forward  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        worker.gradients_in_turn(images(0), 0)
    assert torch.equal(worker.vector, before)
