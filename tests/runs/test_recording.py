"""What is recorded of a run: counts that belong to the step they stand beside, and that go on over restarts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal.cli.output import contributions
from shoal.config.load import resolve_data
from shoal.engines import StepResult
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.monitoring.recorder import Recorder, Reporter, SharedDataProgress
from shoal.runs.monitoring.status import added
from shoal.runs.training import loop


def recorder_in(folder: Path, *, total_steps: int = 10) -> Recorder:
    run = resolve_data({}, name="test", dialect="shoal", environ={}).run
    task, world = SimpleNamespace(headline="loss", higher_is_better=False), SimpleNamespace(total=lambda figures: figures)
    engine: Any = SimpleNamespace(step_count=0, total_steps=total_steps, task=task, world=world)
    return Recorder(run, engine, SharedDataProgress(4, tuple), RunDirectory(folder), [])


def take_step(recorder: Recorder) -> None:
    recorder.engine.step_count += 1
    recorder.count(StepResult({}, 1, 16), 1)


def test_a_judgement_that_comes_late_tells_the_samples_of_the_weights_it_is_about(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    for _ in range(2):
        take_step(recorder)
    recorder.begin_evaluation()
    for _ in range(3):
        take_step(recorder)
    recorder.record_evaluation({"loss": 1.0}, 2)
    recorder.record_evaluation({"loss": 0.5}, 5)
    first, second = recorder.directory.metrics()
    assert (first["step"], first["samples"], first["epoch"]) == (2, 32, 0.5)
    assert (second["step"], second["samples"], second["epoch"]) == (5, 80, 1.25)


def test_a_run_that_ends_by_its_data_never_shows_more_than_all_of_it(tmp_path: Path) -> None:
    """Rounds with fewer contributions than planned make more steps: 6 of 4 would help nobody."""
    recorder = recorder_in(tmp_path, total_steps=4)
    recorder.total_batches = 8
    for _ in range(6):
        take_step(recorder)
    assert recorder.at(6) == "step 6 (75%)"
    assert recorder.at(2) == "step 2 (25%)", "an evaluation that took its time tells where its weights were"
    assert recorder.completed == 3


def test_a_step_of_many_steps_of_each_worker_is_called_a_round(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    assert recorder.at(2) == "step 2/10"
    recorder.step_name = "round"
    assert recorder.at(2) == "round 2/10"


def test_contributions_are_listed_by_what_became_of_them() -> None:
    assert contributions({"accepted": 9, "stale": 2}) == "9 accepted, 2 stale"
    assert contributions({"accepted": 9}) == "9 accepted"


def test_counts_of_several_keepers_are_added() -> None:
    assert added({"malformed": 1}, {}, {"malformed": 2, "too-fast": 1}) == {"malformed": 3, "too-fast": 1}


class StopsAt(Reporter):
    """Ends a run after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, recorder: Recorder) -> None:
        if recorder.step >= self.at:
            recorder.stopping = "interrupted"


def test_bytes_and_time_are_counted_over_restarts(tmp_path: Path) -> None:
    settings = {
        "model": {"kind": "mlp", "hidden_sizes": [4]},
        "training": {"batch_size": 16, "max_steps": 20, "device": "cpu"},
        "strategy": {"kind": "diloco", "inner_steps": 5},
        "transport": {"kind": "in-process"},
        "evaluation": {"strategy": "never"},
    }
    folder = tmp_path / "run"
    first = shoal.train(settings, workers=1, run_dir=folder, reporters=[StopsAt(3)], progress=False)
    settings["training"] = settings["training"] | {"max_steps": 25}  # type: ignore[operator]
    second = shoal.train(settings, workers=1, run_dir=folder, resume=True, progress=False)
    before, after = first.summary, second.summary
    assert (before["steps"], after["steps"]) == (3, 5), "a run that goes on may be longer"
    assert after["contributions"]["accepted"] == 5
    each = before["received_bytes"] / 3
    assert after["received_bytes"] == pytest.approx(5 * each, rel=0.2), "two contributions more"
    assert after["sent_bytes"] > before["sent_bytes"]
    assert after["wall_s"] > before["wall_s"]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["received_bytes"] for record in records] == sorted(record["received_bytes"] for record in records)


class Listening(Reporter):
    def __init__(self) -> None:
        self.told: list[str] = []

    def message(self, text: str) -> None:
        self.told.append(text)


def test_an_evaluation_that_takes_long_says_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_TOLD_EVERY_S", 0.0)
    settings = {
        "model": {"kind": "mlp", "hidden_sizes": [4]},
        "training": {"max_steps": 1, "device": "cpu"},
        "evaluation": {"batches": 3, "batch_size": 8},
    }
    reporter = Listening()
    shoal.train(settings, run_dir=tmp_path / "run", reporters=[reporter], progress=False)
    told = [text.split(" in ")[0] for text in reporter.told if text.startswith("evaluating")]
    assert told == ["evaluating: 0 batches", "evaluating: 1 batches", "evaluating: 2 batches"]


def test_a_run_that_is_to_end_does_not_finish_its_evaluation(tmp_path: Path) -> None:
    seen: list[Recorder] = []
    judged = 0

    class Watches(StopsAt):
        def step(self, recorder: Recorder) -> None:
            seen.append(recorder)

    def ends_the_run(model: Any, batch: Any) -> float:
        nonlocal judged
        judged += 1
        seen[-1].stopping = "interrupted"
        return 0.0

    settings = {
        "model": {"kind": "mlp", "hidden_sizes": [4]},
        "training": {"batch_size": 16, "max_steps": 20, "device": "cpu"},
        "evaluation": {"every_steps": 2, "batch_size": 4},
    }
    summary = shoal.train(
        settings, run_dir=tmp_path / "run", reporters=[Watches(0)], metrics={"mine": ends_the_run}, progress=False
    ).summary
    assert (summary["status"], summary["steps"], judged) == ("interrupted", 2, 1)
    assert not [record for record in RunDirectory(tmp_path / "run").metrics() if record.get("split") == "eval"]
