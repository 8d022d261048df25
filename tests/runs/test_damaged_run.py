"""A whole run with real workers: audited while it goes on, damaged, refused, repaired, resumed to its end, and audited again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import train
from shoal.cli.main import main
from shoal.coordinator.durable.journal import journals, path_of
from shoal.coordinator.durable.records import JournalReader
from shoal.errors import ShoalError
from shoal.runs.monitoring.recorder import Recorder, Reporter

CONFIG: dict[str, Any] = {
    "training": {"epochs": 2, "batch_size": 8, "device": "cpu"},
    "strategy": {"kind": "async", "contributions_per_update": 2},
    "logging": {"every_steps": 1},
    "checkpoint": {"strategy": "never"},
}


def points() -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(7)
    return [(point, int(point.sum() > 0)) for point in torch.randn(160, 4, generator=generator)]


class Watching(Reporter):
    """Audits the run while it goes on, and keeps what a `kill -9` would have left of it."""

    def __init__(self, copy: Path) -> None:
        self.copy, self.code = copy, -1

    def step(self, recorder: Recorder) -> None:
        if recorder.step == 12:
            self.code = main(["audit", str(recorder.directory.path)])
            shutil.copytree(recorder.directory.path, self.copy)


def test_a_run_is_audited_live_damaged_repaired_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed, watching = tmp_path / "killed", Watching(tmp_path / "killed")
    given: dict[str, Any] = {"model": nn.Linear(4, 2), "data": points(), "workers": 2, "progress": False}
    train(CONFIG, run_dir=tmp_path / "run", reporters=[watching], **given)
    assert watching.code == 0
    assert "running: so far nothing is missing" in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "run")]) == 0
    assert "\nnothing is missing, nothing is counted twice" in capsys.readouterr().out
    sealed = [json.loads(line) for path in (tmp_path / "run" / "workers").glob("*.jsonl") for line in path.read_text().splitlines()]
    assert all(len(line) == 6 for line in sealed if line[2] == "accepted"), "every confirmation bears the coordinator's seal"

    journal = path_of(killed / "coordinator", max(journals(killed / "coordinator")))
    reading = JournalReader(journal)
    ends = [reading.end.length for _ in reading]
    content = bytearray(journal.read_bytes())
    content[ends[9] - 20] ^= 1  # in the update of the tenth record
    journal.write_bytes(content)
    with pytest.raises(ShoalError, match=r"record 10 does not match its checksum .* `shoal repair"):
        train(CONFIG, run_dir=killed, resume=True, **given)
    assert main(["repair", str(killed)]) == 0
    assert "lost: contributions" in capsys.readouterr().out
    assert main(["audit", str(killed)]) == 0, "before it is resumed, too"
    result = train(CONFIG, run_dir=killed, resume=True, **given)
    assert result.status == "completed"
    assert main(["audit", str(killed)]) == 0
    assert "a repair gave up contributions" in capsys.readouterr().out


def test_a_second_coordinator_is_kept_out_of_a_folder(tmp_path: Path) -> None:
    class Second(Reporter):
        problem = ""

        def step(self, recorder: Recorder) -> None:
            if recorder.step == 2:
                with pytest.raises(ShoalError) as caught:
                    train(CONFIG, model=nn.Linear(4, 2), data=points(), workers=2, progress=False, run_dir=tmp_path / "run", resume=True)
                self.problem = str(caught.value)

    second = Second()
    train(CONFIG, model=nn.Linear(4, 2), data=points(), workers=2, progress=False, run_dir=tmp_path / "run", reporters=[second])
    assert "another coordinator is at work" in second.problem
