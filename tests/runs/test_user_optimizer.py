"""Optimizers and schedulers that a program passes, against the same training by hand."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.config.load import resolve_data
from shoal.errors import ShoalError
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.live_objects import factory_names, refuse_unknown_functions

POINTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
SAMPLES = [(point, int(point[0] > 0)) for point in POINTS]
SETTINGS: dict[str, Any] = {"training": {"max_steps": 6, "batch_size": 64, "device": "cpu", "clipping": {"enabled": False}}}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    first, last = list(model.children())[::2]
    return torch.optim.SGD([{"params": first.parameters(), "lr": 0.5}, {"params": last.parameters(), "momentum": 0.9}], lr=0.1)


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def by_hand(steps: int = 6) -> torch.Tensor:
    """Whole batches: their order does not matter."""
    model = network()
    optimizer = grouped(model)
    step_by_hand(model, optimizer, halved(optimizer), steps)
    return flat(model)


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = 6) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(POINTS), torch.tensor([label for _, label in SAMPLES])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def train(model: nn.Module, **more: Any) -> Any:
    return shoal.train(more.pop("settings", SETTINGS), model=model, data=SAMPLES, progress=False, **more)


def test_groups_and_scheduler_of_the_program_are_used(tmp_path: Path) -> None:
    model = network()
    result = train(model, optimizer=grouped, scheduler=halved, run_dir=tmp_path / "made")
    torch.testing.assert_close(flat(model), by_hand())
    assert result.metrics["train"]["learning_rate"] == pytest.approx(0.5 * 0.5**3)
    another = network()
    optimizer = grouped(another)
    train(another, optimizer=optimizer, scheduler=halved(optimizer), run_dir=tmp_path / "objects")
    torch.testing.assert_close(flat(another), by_hand())


def test_a_resumed_run_goes_on_with_momentum_and_rates(tmp_path: Path) -> None:
    short = copy.deepcopy(SETTINGS)
    short["training"]["max_steps"] = 3
    train(network(), settings=short, optimizer=grouped, scheduler=halved, run_dir=tmp_path / "run")
    model = network()
    train(model, optimizer=grouped, scheduler=halved, run_dir=tmp_path / "run", resume=True)
    torch.testing.assert_close(flat(model), by_hand())


def test_the_coordinator_steps_with_the_optimizer_of_the_program(tmp_path: Path) -> None:
    model = network()
    train(model, optimizer=grouped, scheduler=halved, workers=1, run_dir=tmp_path / "run")
    torch.testing.assert_close(flat(model), by_hand(), rtol=1e-4, atol=1e-6)


def test_without_a_scheduler_each_group_follows_the_schedule(tmp_path: Path) -> None:
    settings = copy.deepcopy(SETTINGS)
    settings["training"]["schedule"] = {"kind": "linear"}
    model, expected = network(), network()
    train(model, settings=settings, optimizer=grouped, run_dir=tmp_path / "run")
    optimizer = grouped(expected)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)
    step_by_hand(expected, optimizer, scheduler)
    torch.testing.assert_close(flat(model), flat(expected))


def test_functions_that_settings_name_make_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "named_steps", sys.modules[__name__])
    model = network()
    train(model, optimizer="named_steps:grouped", scheduler="named_steps:halved", workers=1, run_dir=tmp_path / "run")
    torch.testing.assert_close(flat(model), by_hand(), rtol=1e-4, atol=1e-6)
    run = RunDirectory(tmp_path / "run").config()
    assert factory_names(run) == ["named_steps:grouped", "named_steps:halved"], "a worker elsewhere has to allow them"
    with pytest.raises(ShoalError, match="join with --factory named_steps:grouped --factory named_steps:halved"):
        refuse_unknown_functions(run, ())


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed", "pipeline"])
def test_engines_that_cut_a_network_refuse_them_before_they_start(engine: str) -> None:
    for part in ("optimizer", "scheduler"):
        settings = {"model": {"kind": "gpt"}, "engine": {"kind": engine}, "training": {part: {"kind": "function", "function": "a:b"}}}
        found = resolve_data(settings, name="config", dialect="shoal").problems
        assert [one.message for one in found if one.severity == "error"] == [
            f"it is made for a whole network, and the engine {engine} gives each process a part"
        ]


def test_a_scheduler_alone_sets_the_rates_of_the_settings_optimizer(tmp_path: Path) -> None:
    settings = copy.deepcopy(SETTINGS)
    settings["training"]["optimizer"] = {"name": "AdamW", "learning_rate": 0.1}
    model, expected = network(), network()
    train(model, settings=settings, scheduler=halved, run_dir=tmp_path / "run")
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1)
    step_by_hand(expected, optimizer, halved(optimizer))
    torch.testing.assert_close(flat(model), flat(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"optimizer": 3}, "optimizer= takes an object of torch.optim"),
        ({"optimizer": lambda model: "Adam"}, "must give an optimizer of torch: it gave str"),
        ({"optimizer": lambda model: torch.optim.SGD(network().parameters(), lr=0.1)}, "not those of the model that is trained"),
        ({"optimizer": lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1)}, "does not step `2.weight`"),
        ({"optimizer": grouped, "scheduler": lambda optimizer: 3}, "must give a scheduler"),
        ({"optimizer": grouped, "overrides": ["training.optimizer.name=SGD"]}, "optimizer= and training.optimizer are both given"),
        (
            {"optimizer": grouped, "scheduler": halved, "overrides": ["training.schedule.kind=linear"]},
            "scheduler= and training.schedule are",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ShoalError, match=told):
        train(network(), run_dir=tmp_path / "run", **arguments)
