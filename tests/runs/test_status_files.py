"""What a coordinator leaves in its folder for those who look: status, history and events of a run; and `shoal status` of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from shoal import train
from shoal.cli.main import main
from shoal.cli.top import drawn
from shoal.config.schema.updates import Bulyan, Krum, Mean, MultiKrum, NoMixing
from shoal.coordinator.durable.lock import FolderLock
from shoal.reporters.class_table import units_of
from shoal.reporters.text_status import counted
from shoal.runs.folder.run_reader import RunFolder, Tail, clean, newest_run
from shoal.runs.monitoring.history import History
from shoal.updates.rules import aggregation


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers, as threads of this process."""
    folder = tmp_path_factory.mktemp("status") / "runs" / "first"
    overrides = ["data.source.name=digits", "training.epochs=1", "training.batch_size=64", "logging.every_steps=1"]
    train("starter", workers=2, overrides=overrides, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), run_dir=folder)
    return folder


def status(folder: Path, **changes: Any) -> Path:
    """A run's folder with a status of our own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("dialect: shoal\n")
    (folder / "provenance.json").write_text('{"format": 1, "settings": {}}')
    row = {"worker": "ann", "state": "computing", "rate": 1.5, "lag": 2, "accepted": 3, "rejected": 1, "bytes": 1500, "why": {"stale": 1}}
    known = {"schema": 2, "at": time.time(), "version": 7, "of": 9, "strategy": "x", "members": [row], "wall_s": 5.0, "pid": os.getpid()}
    (folder / "status.json").write_text(json.dumps(known | changes))
    return folder


def test_a_run_with_workers_says_who_was_here_and_what_became_of_what_they_sent(finished: Path) -> None:
    written = json.loads((finished / "status.json").read_text())
    rows = {row["worker"]: row for row in written["members"] + written["gone"]}
    assert set(rows) == {"w1", "w2"}
    assert written["schema"] == 2
    assert (written["progress"], written["of"]) == (1.0, None), "the batches of an epoch decide how many steps there are"
    assert sum(row["accepted"] for row in rows.values()) == written["contributions"]["accepted"]
    assert all(row["since"] <= written["at"] for row in rows.values())
    told = [json.loads(line)["text"] for line in (finished / "events.jsonl").read_text().splitlines()]
    assert any(text.startswith("w1 joined") for text in told)
    assert json.loads((finished / "history.jsonl").read_text().splitlines()[0])["workers"].keys() <= {"w1", "w2"}


def test_the_command_shows_it_to_people_and_to_programs(finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(finished.parents[1])
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "completed" in shown
    assert "w1" in shown
    assert "w1 joined" in shown
    assert main(["status", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "completed"


def test_a_run_of_one_process_has_a_status_too(finished: Path, tmp_path: Path, capsys: Any) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.yaml", "provenance.json", "metrics.jsonl", "summary.json"):
        (alone / name).write_bytes((finished / name).read_bytes())
    assert main(["status", str(alone)]) == 0
    shown = capsys.readouterr().out
    assert "one process" in shown
    assert "loss" in shown


def test_a_coordinator_that_was_killed_is_missed(tmp_path: Path, capsys: Any) -> None:
    folder = status(tmp_path / "run", pid=2**22 + 1)
    os.utime(folder / "status.json", (time.time() - 60, time.time() - 60))
    assert main(["status", str(folder)]) == 0
    assert "the coordinator is not here" in capsys.readouterr().out


def test_a_run_that_has_ended_shows_what_came_after_its_last_status(tmp_path: Path) -> None:
    path = status(tmp_path / "run", figures={"train": {"loss": 2.0}, "eval": {}})
    (path / "events.jsonl").write_text(json.dumps({"at": 1.0, "text": "ann left"}) + "\n")
    metrics = {"train": {"loss": 1.5}, "eval": {"accuracy": 0.8}}
    (path / "summary.json").write_text(json.dumps({"format": 1, "status": "completed", "metrics": metrics}))
    seen = RunFolder(path).status()
    assert seen["figures"] == {"train": {"loss": 1.5}, "eval": {"accuracy": 0.8}}
    assert [event["text"] for event in seen["events"]] == ["ann left"]


def test_where_there_is_no_run_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 2
    assert "there are no runs in runs" in capsys.readouterr().err


def test_who_is_rejected_why_and_how_the_time_divides(tmp_path: Path, capsys: Any) -> None:
    row = {
        "worker": "bo",
        "state": "waiting",
        "rate": None,
        "lag": 0,
        "accepted": 0,
        "rejected": 4,
        "bytes": 0,
        "why": {"stale": 3, "ahead": 1},
    }
    folder = status(tmp_path / "run", members=[row | {"computing_s": 1.0, "waiting_s": 2.0, "sending_s": 1.0, "memory_bytes": 2e9}])
    assert main(["status", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "4 (3 stale, 1 ahead)" in shown
    assert "25/50/25 %" in shown
    assert "2.0 GB" in shown


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", "\x1b[2J\x1b]0;owned\x07", "\u202egnp.exe", "a\nb", "x" * 5000])
def test_what_strangers_wrote_steers_nothing(tmp_path: Path, hostile: str) -> None:
    folder = status(tmp_path / "run", run=hostile, events=[{"at": 1.0, "text": hostile}], figures={"train": {hostile: 1.0}, "eval": {}})
    seen = json.dumps(RunFolder(folder).status(), ensure_ascii=False)
    assert not any(character in seen for character in "\x1b\u202e\x07\n")
    assert len(max(RunFolder(folder).status()["run"].split(), key=len)) <= 1000
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(drawn(RunFolder(folder).status()))
    assert "\x1b[2J" not in console.export_text()


def test_a_teacher_reads_what_came_of_the_work_and_not_how_units_are_kept() -> None:
    units = {"issued": 6000, "pending": 60, "claimed": 2, "completed": 95, "failed": 0, "cancelled": 5894, "dropped": 5}
    assert units_of(units) == "95 handed in and used, 5 too late and not used (5 % of what was handed in); 2 being computed now"
    assert units_of({}) == "0 handed in and used, 0 too late and not used; 0 being computed now"
    assert "1 given up after too many failures" in units_of({"failed": 1})
    assert counted({"accepted": 9, "late": 2, "stale": 1, "cancelled": 3}) == "9 accepted, 5 too late, 1 stale"


def test_absurd_values_are_bounded() -> None:
    deep: Any = []
    for _ in range(50):
        deep = [deep]
    found = clean({"nan": float("nan"), "list": list(range(10_000)), "deep": deep, "object": {"a": object()}})
    assert found["nan"] is None
    assert len(found["list"]) == 5000
    assert found["object"]["a"] is None
    json.dumps(found, allow_nan=False)


def test_top_fits_a_crowd_into_the_terminal(tmp_path: Path) -> None:
    row = {"state": "computing", "rate": 1.0, "lag": 0, "accepted": 1, "rejected": 0, "bytes": 0}
    folder = status(tmp_path / "run", members=[row | {"worker": f"worker-{number:03}"} for number in range(300)])
    console = Console(record=True, width=160, height=40, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(drawn(RunFolder(folder).status(), 40))
    shown = console.export_text()
    assert len(shown.splitlines()) <= 42
    assert "more workers" in shown


def test_top_needs_a_terminal_and_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["top"]) == 2
    assert main(["top", str(status(tmp_path / "run"))]) == 2
    assert "needs a terminal" in capsys.readouterr().err


def test_the_newest_run_is_meant_where_none_is_named(tmp_path: Path) -> None:
    old, new = status(tmp_path / "a"), status(tmp_path / "b")
    for name in ("status.json", "provenance.json"):
        os.utime(old / name, (1.0, 1.0))
    assert newest_run(tmp_path).path == new


def test_a_tail_gives_whole_lines_once_and_begins_again_with_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert list(tail.new_lines()) == []
    path.write_bytes(b'{"a":1}\n{"b"')
    assert list(tail.new_lines()) == [b'{"a":1}']
    with path.open("ab") as file:
        file.write(b":2}\nnonsense\n")
    assert list(tail.values()) == [{"b": 2}]
    began = tail.began
    path.write_bytes(b'{"c":3}\n')
    assert list(tail.values()) == [{"c": 3}]
    assert tail.began == began + 1


def test_a_history_stays_within_its_bounds_and_covers_the_whole_run(tmp_path: Path) -> None:
    history = History(tmp_path, most_bytes=2000)
    members = [{"worker": "ann", "state": "computing", "computing_s": 1.234567}]
    for second in range(0, 4000, 2):
        counts = {"contributions": {"accepted": second}, "members_left_out": 1}
        history.append({"wall_s": float(second), "at": float(second), "version": second, "members": members, **counts}, float(second))
    moments = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert all((one["contributions"], one["members_left_out"]) == ({"accepted": one["version"]}, 1) for one in moments)
    assert (tmp_path / "history.jsonl").stat().st_size <= 2000
    assert moments[0]["wall_s"] < 100
    assert moments[-1]["wall_s"] > 3500
    assert moments[0]["workers"]["ann"][:2] == ["computing", 1.23]


@pytest.mark.parametrize("rule", [Krum(byzantine=1), MultiKrum(byzantine=1), Bulyan(byzantine=1)])
def test_rules_that_choose_say_whom_they_left_out(rule: Any) -> None:
    stack = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    stack[4] += 100.0
    dropped: set[int] = set()
    aggregation.combine(rule, NoMixing(), stack, torch.ones(9), None, 0, dropped)
    assert 4 in dropped
    assert dropped != set(range(9))


def test_a_mean_leaves_out_nobody() -> None:
    dropped: set[int] = set()
    aggregation.combine(Mean(), NoMixing(), torch.randn(4, 5), torch.ones(4), None, 0, dropped)
    assert dropped == set()


def test_a_run_whose_coordinator_has_just_opened_is_starting(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.yaml").write_text("dialect: shoal\n")
    (tmp_path / "provenance.json").write_text(json.dumps({"format": 1, "settings": {"strategy.kind": {"value": "syncps"}}}))
    (tmp_path / "owner.json").write_text("{}")
    assert main(["status", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "syncps" in told
    assert "starting" in told


def test_a_coordinator_that_failed_before_it_began_is_not_starting(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.yaml").write_text("dialect: shoal\n")
    (tmp_path / "owner.json").write_text("{}")
    lock = FolderLock(tmp_path)
    lock.take()
    assert main(["status", str(tmp_path)]) == 0
    assert "starting" in capsys.readouterr().out
    lock.release()
    assert main(["status", str(tmp_path)]) == 0
    assert "ended before it began" in capsys.readouterr().out


def test_a_folder_that_is_missing_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status", "nosuch"]) == 2
    assert "`shoal runs`" in capsys.readouterr().err


def test_what_came_when_the_run_had_finished_came_after_the_end() -> None:
    assert counted({"accepted": 84, "finished": 5}) == "84 accepted, 5 after the end"
