"""A run whose loss has not moved says so at its end, with what to try."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.config.schema.training import Training
from shoal.runs.monitoring.loss_progress import LossProgress


def after(**losses: list[float]) -> str:
    progress, resumed = LossProgress(), LossProgress()
    for split, values in losses.items():
        for value in values:
            progress.note(split, {"loss": value, "accuracy": 0.5})
    resumed.load_state_dict(progress.state_dict())
    assert resumed.warning(Training()) == progress.warning(Training())
    return progress.warning(Training())


@pytest.mark.parametrize(
    "losses",
    [
        {"train": [5.556, 5.551], "eval": [5.556, 5.551]},
        {"train": [5.556, 5.55, 5.56]},
        {"step": [5.556], "train": [5.4]},  # one figure, and the first batch alone is noisy
    ],
)
def test_a_loss_that_has_not_moved_is_reported_with_what_to_try(losses: dict[str, list[float]]) -> None:
    said = after(**losses)
    assert said.startswith("warning: the loss has hardly moved: 5.556 at first, ")
    for what in ("training.optimizer.learning_rate", "training.epochs", "training.batch_size"):
        assert what in said


def test_a_phase_before_the_policys_names_its_own_settings() -> None:
    progress = LossProgress()
    for loss in (5.556, 5.551):
        progress.note("eval", {"loss": loss})
    said = progress.warning(Training(), "rlhf.fine_tune")
    for what in ("rlhf.fine_tune.learning_rate", "rlhf.fine_tune.epochs", "rlhf.fine_tune.batch_size"):
        assert what in said
    assert "training." not in said


def test_a_loss_that_has_risen_is_reported_with_a_smaller_rate() -> None:
    assert "has risen: 2.3 at first, 9 at the end. Try a smaller training.optimizer.learning_rate" in after(train=[2.3, 9.0])


@pytest.mark.parametrize(
    "losses",
    [
        {},
        {"train": [5.0]},
        {"train": [5.0, 4.5]},
        {"step": [2.3], "train": [1.5]},
        {"step": [2.3], "train": [0.06, 0.06], "eval": [0.06, 0.06]},  # it had learned before the first evaluation
        {"train": [-3.0, -3.0]},
    ],
)
def test_a_loss_that_fell_or_cannot_be_judged_is_not(losses: dict[str, list[float]]) -> None:
    assert not after(**losses)


@pytest.mark.parametrize("strategy", ["local", "edp", "diloco, inner_steps: 5", "syncps"])
def test_every_strategy_reports_a_loss_that_stood_still(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        "dialect": "shoal",
        "model": "{kind: mlp, hidden_sizes: [4]}",
        "training": "{epochs: 2, batch_size: 48, optimizer: {name: SGD, learning_rate: 1e-9}}",
        "strategy": f"{{kind: {strategy}}}",
        "transport": "{kind: in-process}",
        "cluster": "{num_workers: 2}",
    }
    (tmp_path / "config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    assert main(["train", "config.yaml", "--run-dir", "run"]) == 0
    said = capfd.readouterr()
    assert "warning: the loss has hardly moved: " in said.err
    assert "(the loss has hardly moved: see the warning above)" in said.out


def test_the_first_loss_of_several_processes_is_that_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("model: {kind: mlp, hidden_sizes: [4]}\ntraining: {max_steps: 3, batch_size: 48}\n")
    still = ["--set", "training.optimizer.name=SGD", "--set", "training.optimizer.learning_rate=1e-9"]
    assert main(["train", "config.yaml", "--run-dir", "run", "--set", "engine.kind=ddp", "--devices_per_node", "2", *still]) == 0
    assert "warning: the loss has hardly moved: " in capfd.readouterr().err
