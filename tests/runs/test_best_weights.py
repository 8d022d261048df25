"""The best weights of a run: which are kept, who uses them, and that a run which stops in any way leaves its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.cli.main import main
from shoal.config.schema.output import Checkpoint
from shoal.runs.folder.checkpoint import load_weights
from shoal.runs.monitoring.best_weights import find_weights, newest_best
from shoal.updates.state_packing import Checkpoint as Found
from tests.combinations.inputs import write_inputs
from tests.support.small_runs import DIGITS

WILD = ["--set", "training.optimizer.learning_rate=0.3", "--set", "training.device=cpu", "--set", "evaluation.every_steps=1"]
"""Every evaluation is much better or worse than the one before."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(DIGITS)


def train(name: str, *more: str, steps: int = 8) -> int:
    return main(["train", "config.yaml", "--run-dir", name, "--max_steps", str(steps), *WILD, *more])


def evaluations(name: str) -> dict[int, dict[str, float]]:
    lines = map(json.loads, (Path(name) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if line["split"] == "eval"}


def best_of(name: str) -> Found:
    found = newest_best(Path(name), pytest.fail)
    assert found is not None
    return found


@pytest.mark.parametrize(("metric", "choose"), [("accuracy", max), ("loss", min), ("max loss", max)])
def test_the_weights_of_the_best_evaluation_are_kept_evaluated_and_exported(
    metric: str, choose: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "--set", f"checkpoint.best={metric}") == 0
    name, seen, best = metric.split()[-1], evaluations("run"), best_of("run")
    value = choose(one[name] for one in seen.values())
    assert best.step == min(step for step, one in seen.items() if one[name] == value), "the first of equals"
    assert best.state == {"metric": name, "value": value}
    assert json.loads(Path("run/summary.json").read_text())["best"] == {"metric": name, "value": value, "step": best.step}
    assert f"the best weights are those of step {best.step} ({name} {value:.6g})" in capsys.readouterr().err
    assert main(["eval", "run", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == best.step
    assert found["metrics"][name] == pytest.approx(value, rel=1e-6)
    assert main(["export", "run", "exported"]) == 0
    exported = load_weights(Path("exported/model.safetensors"))
    assert all(torch.equal(exported[name], value) for name, value in best.weights.items())
    explicit = find_weights(str(sorted(Path("run/checkpoints").glob("step-*"))[-1]), pytest.fail)
    assert explicit.step == 8, "a checkpoint that is named is taken"


def test_a_resumed_run_keeps_what_was_best_before() -> None:
    assert train("whole", "--set", "checkpoint.best=loss") == 0
    assert train("parts", "--set", "checkpoint.best=loss", steps=4) == 0
    assert train("parts", "--set", "checkpoint.best=loss", "--resume") == 0
    whole, parts = best_of("whole"), best_of("parts")
    assert (whole.step, whole.state) == (parts.step, parts.state)
    assert all(torch.equal(parts.weights[name], value) for name, value in whole.weights.items())


def test_early_stopping_ends_with_the_best_weights() -> None:
    settings = {
        "training": {"max_steps": 40, "device": "cpu", "optimizer": {"learning_rate": 0.3}, "early_stopping": {"patience": 2}},
        "evaluation": {"every_steps": 1},
        "data": {"source": {"kind": "builtin", "name": "digits"}},
        "model": {"kind": "mlp", "hidden_sizes": [16]},
    }
    result = shoal.train(settings, run_dir="run")
    assert result.status == "stopped early"
    best = best_of("run")
    assert best.step == result.steps - 2
    assert result.model is not None
    assert all(torch.equal(best.weights[f"model.{name}"], value) for name, value in result.model.named_parameters())


def test_the_coordinator_keeps_the_best_weights_and_its_average_among_them() -> None:
    together = ["--workers", "1", "--set", "strategy.kind=syncps", "--set", "transport.kind=in-process"]
    assert train("run", "--set", "checkpoint.best=loss", "--set", "training.ema.decay=0.5", *together, steps=4) == 0
    seen, best = evaluations("run"), best_of("run")
    assert best.state["value"] == min(one["loss"] for one in seen.values())
    assert seen[best.step]["loss"] == best.state["value"]


def test_best_weights_are_no_checkpoint_to_go_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--set", "checkpoint.best=loss", steps=2) == 0
    best = next(Path("run/best").glob("step-*"))
    assert train("more", "--set", f"checkpoint.resume_from={best}") == 2
    assert "no state of an optimizer to go on with" in capsys.readouterr().err


def test_what_is_measured_never_or_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("never", "--set", "checkpoint.best=loss", "--set", "evaluation.batches=0") == 2
    assert "there are no evaluations" in capsys.readouterr().err
    assert train("unclear", "--set", "checkpoint.best=beauty") == 2
    assert "write `max beauty` or `min beauty`" in capsys.readouterr().err
    assert train("unknown", "--set", "checkpoint.best=max beauty") == 2
    told = capsys.readouterr().err
    assert "measures loss, accuracy; `beauty` is known only if a program passes it" in told
    assert "the evaluation has no `beauty`; it has loss, accuracy" in told


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ("loss", ("loss", False)),
        ("generator_loss", ("generator_loss", False)),
        ("accuracy", ("accuracy", True)),
        ("min score", ("score", False)),
        ("beauty", ("beauty", None)),
        ("loss_of_accuracy", ("loss_of_accuracy", None)),
    ],
)
def test_a_metrics_name_says_whether_more_is_better(best: str, expected: tuple[str, bool | None]) -> None:
    assert Checkpoint(best=best).best_metric == expected


def test_a_run_that_fails_leaves_the_model_of_its_last_good_weights(capsys: pytest.CaptureFixture[str]) -> None:
    write_inputs(Path("DATA"))
    settings = {
        "model": {"kind": "huggingface", "pretrained": "DATA/gpt2"},
        "data": {"source": {"kind": "text", "path": "DATA/lines.jsonl"}, "tokenizer": "bytes", "sequence_length": 16},
        "training": {
            "max_steps": 9,
            "batch_size": 4,
            "device": "cpu",
            "optimizer": {"learning_rate": 1e30},
            "clipping": {"enabled": False},
        },
        "evaluation": {"strategy": "never"},
    }
    Path("gpt2.yaml").write_text(json.dumps(settings))
    assert main(["train", "gpt2.yaml", "--run-dir", "run"]) == 2
    told = capsys.readouterr().err
    assert "which was not taken" in told
    assert f"The model with the last good weights is in {Path('run/model')}" in told
    assert Path("run/model/model.safetensors").exists()


def test_the_last_evaluation_counts_before_the_best_weights_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """An interval that does not divide the steps leaves the last evaluation to the end of the run."""
    steps = ["--set", "checkpoint.best=loss", "--set", "evaluation.every_steps=7", "--set", "training.optimizer.learning_rate=0.01"]
    assert train("run", *steps) == 0
    assert best_of("run").step == 8
    assert "the best weights are those of step 8 " in capsys.readouterr().err
