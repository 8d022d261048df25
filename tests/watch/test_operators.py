"""What operators use: a doctor, completion, comparisons, logs for programs, and a dashboard beside a run."""

from __future__ import annotations

import io
import json
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.completion import words
from shoal.cli.main import COMMANDS, main
from shoal.launch import doctor as examining
from shoal.launch.side_processes import dashboard
from shoal.reporters.progress import JsonLines, progress_for
from shoal.runs.monitoring.members import Members
from tests.support.processes import HANG_S

pytestmark = pytest.mark.whole


def write_run(path: Path, loss: float, seed: int) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("dialect: shoal\ntask: classification\n")
    settings = {"seed": {"value": seed, "origin": "default"}, "name": {"value": "x", "origin": "y"}}
    (path / "provenance.json").write_text(json.dumps({"format": 1, "settings": settings}))
    records = [{"step": step, "split": "train", "loss": loss / step, "wall_s": float(step), "samples": step} for step in range(1, 9)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_runs_are_compared_by_settings_and_results_with_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", 2.0, 1)
    write_run(tmp_path / "b", 3.0, 2)
    assert main(["runs", "compare", "a", "b", "--by", "time"]) == 0
    said = capsys.readouterr().out
    assert "seed" in said
    assert "name" not in said.split("settings that differ")[1]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert main(["runs", "compare", "a", "b", "--figure", "beauty"]) == 2
    assert "there are loss" in capsys.readouterr().err


def test_the_doctor_tells_what_works_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "gpu", "disk", "clock", "network", "database", "port 65432"} <= found.keys() | {"gpu"}
    monkeypatch.setattr(examining, "_clock", lambda: iter([examining.Finding("clock", examining.BAD, "1970", "set the clock")]))
    monkeypatch.setattr(examining, "_torch", lambda: 1 / 0)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "set the clock" in said
    assert "ZeroDivisionError" in said
    assert "2 of these must be fixed" in said


@pytest.mark.parametrize(
    ("typed", "some"),
    [
        ([""], "train"),
        (["st"], "status"),
        (["train", "--w"], "--watch"),
        (["config", "ch"], "check"),
        (["completion", "z"], "zsh"),
        (["no", ""], None),
    ],
)
def test_shells_complete_what_there_is(typed: list[str], some: str | None) -> None:
    found = words(typed)
    assert (some in found) if some else not found
    assert all(word.startswith(typed[-1]) for word in found)


def test_completion_knows_every_command_and_bash_can_read_it(capsys: Any) -> None:
    assert set(COMMANDS) <= set(words([""]))
    assert main(["completion", "bash"]) == 0
    subprocess.run(["bash", "-n"], input=capsys.readouterr().out, text=True, check=True)


def test_logs_for_programs_are_objects_as_many_as_the_level_asks_for() -> None:
    def said(level: str) -> list[dict[str, Any]]:
        stream = io.StringIO()
        log = progress_for(stream, level, form="json")
        assert isinstance(log, JsonLines)
        log.message("warning: it is hot")
        log.message("w1 joined")
        for step in range(3):
            log.record({"step": step, "split": "train", "loss": float("nan")})
        log.close({"status": "completed"})
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    assert [(one["level"], one.get("message")) for one in said("INFO")[:2]] == [("warning", "it is hot"), ("info", "w1 joined")]
    assert [one["event"] for one in said("INFO")[2:]] == ["record", "summary"]
    assert len(said("DEBUG")) == 6
    assert [one["message"] for one in said("WARNING")] == ["it is hot"]
    assert said("ERROR") == []


@pytest.mark.parametrize("cluster", [False, True])
def test_a_terminal_shows_a_bar_and_the_workers_of_a_run_that_has_some(cluster: bool) -> None:
    stream: Any = io.StringIO()
    stream.isatty = lambda: True
    shown = progress_for(stream, "INFO", cluster)
    progress_for(stream, "INFO", cluster).close({"status": "failed"})  # a run that failed before its first step
    row = {"worker": "ann", "state": "computing", "rate": 1.5, "lag": 0, "accepted": 3, "rejected": 0, "bytes": 1e6}
    recorder: Any = SimpleNamespace(
        step=0,
        completed=0,
        engine=SimpleNamespace(total_steps=4),
        at=lambda step: f"step {step} (50%)",
        members=lambda: Members([row], False),
    )
    shown.start(recorder)
    recorder.step = recorder.completed = 2
    shown.step(recorder)
    shown.record({"step": 2, "split": "train", "loss": 0.5, "samples_per_s": 9.0})
    shown.close({"status": "completed"})
    assert "step 2 (50%)" in stream.getvalue()
    assert "loss 0.5" in stream.getvalue()
    assert ("ann" in stream.getvalue()) is cluster


def test_a_dashboard_beside_a_run_is_a_process_that_ends_with_it(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the dashboard needs fastapi: pip install 'shoal[serve]'")
    run = write_run(tmp_path / "run", 1.0, 1)
    with dashboard(run) as told:
        metrics = urllib.parse.urljoin(told.split(" at ")[1], "/metrics")  # the address itself also has the owner's secret
        with urllib.request.urlopen(metrics, timeout=HANG_S) as answer:
            assert b'shoal_version{run="run"} 8' in answer.read()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(metrics, timeout=HANG_S)
