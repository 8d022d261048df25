"""Runs that an earlier version of Shoal left behind, killed in the middle: this one goes on with them, and audits them.

`old_runs.tar.gz` holds four folders as they were after `kill -9`, and in `expected.json` what the version that wrote them made of them.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.main import main
from shoal.config.load import ConfigFile, LoadedConfig, resolve
from shoal.coordinator.durable.journal import journals, path_of
from shoal.coordinator.durable.records import JournalReader, head_of
from shoal.runs.coordinator_setup import prepare
from shoal.runs.monitoring.recorder import Reporter
from shoal.runs.training import train_alone

ARCHIVE = Path(__file__).parent / "old_runs.tar.gz"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def loaded(folder: Path) -> LoadedConfig:
    return resolve([ConfigFile(str(folder / "config.yaml"))], [], dialect="shoal", resolved=True)


@pytest.mark.parametrize("kind", ["async", "syncps", "diloco"])
def test_a_coordinator_comes_back_with_the_weights_that_it_had(old: Path, kind: str) -> None:
    expected: dict[str, Any] = json.loads((old / "expected.json").read_text())[kind]
    settings = loaded(old / kind)
    near = settings.run.transport.replace(host=None, port=0)
    made = prepare(settings, run_dir=str(old / kind), resume=True, reporters=[], hosts=("127.0.0.1",), transport=near)
    try:
        coordinator = made.loop.coordinator
        assert (coordinator.state.version, coordinator.state.samples) == (expected["version"], expected["samples"])
        assert torch.allclose(coordinator.learner.vector, torch.tensor(expected["weights"]), atol=1e-5)
    finally:
        made.loop.driver.close()
        made.loop.server.close()


def test_its_journal_is_called_unchecked_and_followed_by_one_that_is_not(old: Path) -> None:
    told: list[str] = []

    class Listening(Reporter):
        def message(self, text: str) -> None:
            told.append(text)

    settings = loaded(old / "async")
    near = settings.run.transport.replace(host=None, port=0)
    made = prepare(settings, run_dir=str(old / "async"), resume=True, reporters=[Listening()], hosts=("127.0.0.1",), transport=near)
    try:
        assert any("written by an earlier version of Shoal: only headers are checked" in text for text in told)
        made.loop.driver.open()
    finally:
        made.loop.driver.close()
        made.loop.server.close()
    folder = old / "async" / "coordinator"
    head = head_of(path_of(folder, max(journals(folder))))
    assert head is not None
    assert head.checked


def test_its_journal_may_be_damaged_and_repaired(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = old / "async" / "coordinator"
    path = path_of(folder, max(journals(folder)))
    reading = JournalReader(path)
    ends = [reading.end.length for _ in reading]
    content = bytearray(path.read_bytes())
    content[ends[len(ends) // 2] + 20] ^= 1  # in a header: there are checksums of those
    path.write_bytes(content)
    assert main(["audit", str(old / "async")]) == 1
    assert main(["repair", str(old / "async")]) == 0
    assert f"{path.name} is damaged after {len(ends) // 2 + 1} records" in capsys.readouterr().out
    settings = loaded(old / "async")
    near = settings.run.transport.replace(host=None, port=0)
    made = prepare(settings, run_dir=str(old / "async"), resume=True, reporters=[], hosts=("127.0.0.1",), transport=near)
    made.loop.driver.close()
    made.loop.server.close()


@pytest.mark.parametrize("kind", ["async", "syncps", "diloco"])
def test_it_is_audited(old: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(old / kind)]) == 0
    assert "nothing is missing, nothing is counted twice" in capsys.readouterr().out


def test_a_run_alone_goes_on(old: Path) -> None:
    folder = old / "alone"
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    step = int(checkpoint.name.partition("-")[2])
    loop = train_alone.prepare(loaded(folder), run_dir=str(folder), resume=True, reporters=[])
    assert loop.step == step
    loop.engine.total_steps = step + 5  # it would take long to the end
    summary = loop.train()
    assert (summary["steps"], summary["resumed_from"]) == (step + 5, str(checkpoint))
    assert [record["step"] for record in loop.directory.metrics()] == [*range(20, step + 1, 20), step + 5]
