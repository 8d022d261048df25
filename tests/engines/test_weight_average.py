"""The moving average of the weights against torch's own, through evaluation, checkpoints and exports, and with workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal.cli.main import main
from shoal.config.schema.training import Ema
from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.runs.folder.checkpoint import Checkpoints, load_weights
from shoal.updates.state_packing import Checkpoint
from tests.engines.test_single import batches, engine_for, network, run_with
from tests.support.small_runs import DIGITS

AVERAGED = ["--set", "training.ema.decay=0.7", "--set", "training.device=cpu", "--set", "logging.every_steps=1"]


def averaging(settings: Ema) -> SingleEngine:
    engine = engine_for(run_with("training.optimizer.name=SGD", "training.optimizer.learning_rate=0.5"))
    engine.keep_average(settings)
    return engine


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_the_average_is_that_of_torch() -> None:
    engine, model = averaging(Ema(decay=0.7, warmup=False)), network()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches(5):
        engine.step([batch])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
        optimizer.step()
        theirs.update_parameters(model)
    stepped = engine.vector.clone()
    with engine.averaged():
        torch.testing.assert_close(engine.vector, flat(theirs))
        assert not torch.equal(engine.vector, stepped)
    assert torch.equal(engine.vector, stepped), "training goes on with the weights, bit for bit"


def test_the_decay_rises_with_the_warm_up() -> None:
    engine = averaging(Ema(decay=0.25))
    expected: list[torch.Tensor] = []
    for number, batch in enumerate(batches(4)):
        engine.step([batch])
        decay = min(0.25, (1 + number) / (10 + number))
        expected.append(engine.vector.clone() if not expected else decay * expected[-1] + (1 - decay) * engine.vector)
    with engine.averaged():
        torch.testing.assert_close(engine.vector, expected[-1])


def test_a_saved_average_is_updated_further() -> None:
    whole, first, second = (averaging(Ema(decay=0.9)) for _ in range(3))
    data = batches(4)
    for batch in data:
        whole.step([batch])
    for batch in data[:2]:
        first.step([batch])
    second.load_weights(first.weights())
    second.load_state_dict(first.state_dict())
    for batch in data[2:]:
        second.step([batch])
    assert whole.average is not None
    assert second.average is not None
    assert torch.equal(whole.average.values[0], second.average.values[0])


def newest(folder: Path) -> Checkpoint:
    found = Checkpoints(folder / "checkpoints", 1).newest(print)
    assert found is not None
    return found


def test_a_run_is_resumed_with_its_average_and_exports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(DIGITS)
    assert main(["train", "config.yaml", "--run-dir", "whole", "--max_steps", "6", *AVERAGED]) == 0
    assert main(["train", "config.yaml", "--run-dir", "parts", "--max_steps", "3", *AVERAGED]) == 0
    assert main(["train", "config.yaml", "--run-dir", "parts", "--max_steps", "6", *AVERAGED, "--resume"]) == 0
    whole, parts = newest(Path("whole")), newest(Path("parts"))
    assert whole.step == parts.step == 6
    for name, value in whole.weights_to_use.items():
        assert torch.equal(value, parts.weights_to_use[name])
        assert not torch.equal(value, whole.weights[name])
    assert main(["export", "parts", "exported"]) == 0
    exported = load_weights(Path("exported/model.safetensors"))
    assert all(torch.equal(value, exported[name]) for name, value in whole.weights_to_use.items())


def test_the_coordinator_averages_the_weights_of_a_run_with_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(DIGITS)
    together = ["--workers", "1", "--set", "strategy.kind=syncps", "--set", "transport.kind=in-process"]
    assert main(["train", "config.yaml", "--run-dir", "alone", "--max_steps", "4", *AVERAGED]) == 0
    assert main(["train", "config.yaml", "--run-dir", "together", "--max_steps", "4", *AVERAGED, *together]) == 0
    alone, coordinated = (newest(Path(name)).weights_to_use for name in ("alone", "together"))
    for name, value in alone.items():
        torch.testing.assert_close(coordinated[name], value, rtol=1e-4, atol=1e-6)
    evaluated = {
        name: [line for line in (Path(name) / "metrics.jsonl").read_text().splitlines() if '"eval"' in line]
        for name in ("alone", "together")
    }
    assert all(len(lines) == 1 for lines in evaluated.values())


def test_an_engine_that_keeps_its_weights_to_itself_is_refused() -> None:
    class Closed(SingleEngine):
        _stepped = SingleEngine.__mro__[1]._stepped  # type: ignore[attr-defined]

    engine = Closed(run_with(), engine_for(run_with()).task, torch.device("cpu"), 1)
    with pytest.raises(ShoalError, match=r"training.ema.decay: the engine Closed"):
        engine.keep_average(Ema(decay=0.5))
