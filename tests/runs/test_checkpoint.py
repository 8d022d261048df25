"""Checkpoints appear whole or not at all, and what cannot be read is stepped over."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.errors import ShoalError
from shoal.runs.folder import checkpoint as module
from shoal.runs.folder.checkpoint import Checkpoints, find_checkpoint, read_checkpoint, save_weights
from shoal.updates.state_packing import packed, unpacked
from tests.support.processes import Command
from tests.support.small_runs import DIGITS

STATE: dict[str, Any] = {"a": torch.arange(3), "b": {0: (1, [torch.ones(2), None]), "x": "y"}, "c": 0.5}


def saved(tmp_path: Path, *steps: int, keep: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep)
    for step in steps:
        checkpoints.save(step, {"model.w": torch.full((2,), float(step))}, STATE)
    return checkpoints


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5)
    found = read_checkpoint(checkpoints.all()[0])
    assert found.step == 5
    assert torch.equal(found.weights["model.w"], torch.tensor([5.0, 5.0]))
    assert torch.equal(found.state["a"], STATE["a"])
    assert found.state["b"][0][0] == 1
    assert isinstance(found.state["b"][0], tuple)
    assert torch.equal(found.state["b"][0][1][0], torch.ones(2))
    assert (found.state["b"]["x"], found.state["c"]) == ("y", 0.5)


@pytest.mark.parametrize(("folder", "file"), [(0o700, 0o600), (0o750, 0o640), (0o755, 0o644), (0o777, 0o644)])
def test_weights_may_be_read_by_those_who_may_read_their_folder(tmp_path: Path, folder: int, file: int) -> None:
    tmp_path.chmod(folder)
    save_weights(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == file


def test_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    whole, checkpoints = torch.arange(6.0), Checkpoints(tmp_path / "checkpoints", 9)
    state = {"tail": whole[4:], "whole": whole, "again": whole, "middle": whole[1:3], "every second": whole[::2]}
    checkpoints.save(1, {"model.w": torch.ones(2)}, state)
    found = read_checkpoint(checkpoints.all()[0]).state
    assert {name: value.tolist() for name, value in found.items()} == {name: value.tolist() for name, value in state.items()}


def test_a_copied_checkpoint_holds_what_there_was_whenever_it_is_written(tmp_path: Path) -> None:
    checkpoints, weights, counts = Checkpoints(tmp_path / "checkpoints", 9), torch.ones(2), {"x": 1}
    moment = torch.ones(2)
    write = checkpoints.copied(7, {"model.w": weights}, {"moment": moment, "counts": counts})
    weights.zero_()
    moment.zero_()
    counts["x"] = 2
    assert checkpoints.all() == []
    found = read_checkpoint(write())
    assert torch.equal(found.weights["model.w"], torch.ones(2))
    assert torch.equal(found.state["moment"], torch.ones(2))
    assert found.state["counts"] == {"x": 1}


TRAINS = """\
import os, sys, threading
import shoal
from shoal.runs.folder import checkpoint
from shoal.runs.monitoring import recorder

recorder.may_save_behind = lambda engine: True
checkpoint.HostCopies.reserve = lambda copies, size: None
write = checkpoint._save


def write_half(path, values, *more):
    if "step-00000004" in str(path) and path.name.startswith("state"):
        path.write_bytes(b"half")
        os.write(1, b"writing\\n")
        threading.Event().wait()
    write(path, values, *more)


checkpoint._save = write_half
shoal.train(sys.argv[1], run_dir=sys.argv[2], progress=False)
"""


def test_a_kill_while_a_thread_writes_leaves_the_last_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(f"{DIGITS}training: {{max_steps: 6, device: cpu}}\ncheckpoint: {{strategy: steps, every_steps: 2}}\n")
    Path("trains.py").write_text(TRAINS)
    process = Command(["trains.py", "config.yaml", "run"])
    try:
        assert process.stdout.readline() == "writing\n"
    finally:
        process.close()
    assert {path.name for path in Path("run/checkpoints").iterdir()} == {"latest", "step-00000002", ".partial-step-00000004"}
    resumed = shoal.train("config.yaml", run_dir="run", resume=True, progress=False)
    assert str(resumed.summary["resumed_from"]).endswith("step-00000002")
    whole = shoal.train("config.yaml", run_dir="whole", progress=False)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_full_disk_behind_a_run_is_reported_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shoal.runs.monitoring.recorder.may_save_behind", lambda engine: True)
    monkeypatch.setattr(module.HostCopies, "reserve", lambda copies, size: None)  # there is no page-locked memory here
    write = module._save

    def refuse(path: Path, *more: Any) -> None:
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, *more)

    monkeypatch.setattr(module, "_save", refuse)
    Path("config.yaml").write_text(f"{DIGITS}training: {{max_steps: 6, device: cpu}}\ncheckpoint: {{strategy: steps, every_steps: 2}}\n")
    result = shoal.train("config.yaml", run_dir="run")
    assert result.status == "completed"
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert sorted(path.name for path in Path("run/checkpoints").glob("step-*")) == ["step-00000002", "step-00000006"]


def test_a_thread_writes_the_values_of_the_moment_one_checkpoint_at_a_time(tmp_path: Path) -> None:
    checkpoints, weights = Checkpoints(tmp_path / "checkpoints", 9), torch.ones(2)
    for step in (1, 2, 3):
        checkpoints.save_behind(step, {"model.w": weights}, {"moment": 10 * weights})
        weights.add_(1)
    checkpoints.wait()
    found = [read_checkpoint(path) for path in checkpoints.all()]
    assert [one.weights["model.w"].tolist() for one in found] == [[1, 1], [2, 2], [3, 3]]
    assert [one.state["moment"].tolist() for one in found] == [[10, 10], [20, 20], [30, 30]]


def test_what_a_thread_could_not_write_is_told_by_the_next_call(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 9)
    (tmp_path / "checkpoints").touch()
    checkpoints.save_behind(1, {"model.w": torch.ones(1)}, {})
    with pytest.raises(ShoalError, match="cannot save a checkpoint"):
        checkpoints.save_behind(2, {"model.w": torch.ones(1)}, {})
    checkpoints.wait()
    assert checkpoints.all() == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3) | st.tuples(inner),
    max_leaves=8,
)


@settings(max_examples=100)
@given(VALUES)
def test_any_plain_state_survives(value: Any) -> None:
    import json

    tensors: dict[str, torch.Tensor] = {}
    assert unpacked(json.loads(json.dumps(packed(value, "", tensors))), tensors) == value


def test_only_the_last_are_kept_and_latest_names_the_newest(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3, 4, keep=2)
    assert [path.name for path in checkpoints.all()] == ["step-00000003", "step-00000004"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000004"


@pytest.mark.parametrize("damage", ["truncate", "flip", "missing", "json", "empty"])
def test_a_damaged_checkpoint_is_stepped_over_and_told(tmp_path: Path, damage: str) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    newest = checkpoints.all()[-1]
    weights = newest / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "truncate":
        weights.write_bytes(content[:-3])
    elif damage == "flip":
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "missing":
        weights.unlink()
    elif damage == "json":
        (newest / "state.json").write_text("{")
    else:
        (newest / "state.json").write_text("")
    warnings: list[str] = []
    found = checkpoints.newest(warnings.append)
    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert str(newest) in warnings[0]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, 1)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(ShoalError, match="No space left on device; the older ones are untouched"):
        checkpoints.save(2, {"model.w": torch.ones(2)}, STATE)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["latest", "step-00000001"]
    found = checkpoints.newest(lambda text: None)
    assert found is not None
    assert found.step == 1


def test_find_takes_a_run_or_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    assert find_checkpoint(str(tmp_path), lambda text: None).step == 2
    assert find_checkpoint(str(checkpoints.all()[0]), lambda text: None).step == 1
    with pytest.raises(ShoalError, match="no checkpoint"):
        find_checkpoint(str(tmp_path / "nowhere"), lambda text: None)
