"""What a run that goes on may change: how long it is and how it is run, and nothing that shapes its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Run
from shoal.config.load import resolve_data
from shoal.errors import ShoalError
from shoal.runs.folder.resume_rules import changed_settings, forbidden_changes, settings_of
from shoal.runs.folder.run_directory import settings_text
from shoal.runs.invitation import CoordinatorSecrets
from shoal.runs.storage import FolderStorage
from shoal.transports.keys import new_keys


def run_of(settings: Mapping[str, Any]) -> Run:
    made = resolve_data(settings, name="test", dialect="shoal", environ={"HF_TOKEN": "secret"} if settings.get("hub") else {})
    assert made.ok, made.problems
    return made.run


@pytest.mark.parametrize(
    "now",
    [
        {"training": {"max_steps": 9}},
        {"training": {"early_stopping": {"patience": 3}}},
        {"strategy": {"kind": "diloco", "round_timeout_s": 5.0, "grace_s": 1.0, "rounds": 7}},
        {"coordinator": {"heartbeat_interval_s": 1.0}},
        {"coordinator": {"joins_per_minute": 6, "failures_per_worker": 2, "workers_at_once": 9, "devices_per_worker": 1}},
        {"coordinator": {"state_path": "elsewhere", "checkpoint_path": "weights.safetensors"}},
        {"updates": {"below_quorum": "stop"}},
        {"logging": {"every_steps": 3, "sinks": ["wandb"]}},
        {"checkpoint": {"every_steps": 3, "keep_last": 9}},
        {"evaluation": {"every_steps": 3, "batches": 2}},
        {"data": {"loader": {"num_workers": 4}}},
        {"transport": {"port": 7777}, "name": "another", "log_level": "DEBUG"},
    ],
)
def test_operational_settings_may_change(now: Mapping[str, Any]) -> None:
    before = settings_of(run_of({"strategy": {"kind": "diloco"}}))
    assert changed_settings(before, settings_of(run_of({"strategy": {"kind": "diloco"}} | now)))
    assert not forbidden_changes(before, settings_of(run_of({"strategy": {"kind": "diloco"}} | now)))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"training": {"batch_size": 8}}, ["training.batch_size: 32 before, 8 now"]),
        ({"seed": 7}, ["seed: 42 before, 7 now", "data.shuffle_seed: 42 before, 7 now"]),
        ({"strategy": {"kind": "diloco", "inner_steps": 3}}, ["strategy.inner_steps: 500 before, 3 now"]),
        ({"updates": {"clip_norm": 1.0}}, ["updates.clip_norm: null before, 1.0 now"]),
    ],
)
def test_settings_that_shape_the_numbers_are_named_with_both_values(now: Mapping[str, Any], said: list[str]) -> None:
    found = forbidden_changes(
        settings_of(run_of({"strategy": {"kind": "diloco"}})), settings_of(run_of({"strategy": {"kind": "diloco"}} | now))
    )
    assert [str(change) for change in found] == said


def test_settings_of_another_kind_are_not_set_before() -> None:
    found = forbidden_changes(settings_of(run_of({"strategy": {"kind": "edp"}})), settings_of(run_of({"strategy": {"kind": "async"}})))
    assert "strategy.kind: edp before, async now" in map(str, found)
    assert "strategy.max_staleness: not set before, 50 now" in map(str, found)


def test_a_setting_that_a_later_version_has_is_no_change_while_it_is_null() -> None:
    now = settings_of(run_of({}))
    before = {path: value for path, value in now.items() if path not in ("updates.clip_norm", "training.batch_size")}
    assert now["updates.clip_norm"] is None
    assert [str(change) for change in forbidden_changes(before, now)] == ["training.batch_size: not set before, 32 now"]


def test_secrets_are_never_told() -> None:
    told = changed_settings(settings_of(run_of({})), settings_of(run_of({"transport": {"kind": "postgres", "password": "hunter2"}})))
    assert not any("hunter2" in str(change) for change in told)


def test_a_run_whose_state_is_elsewhere_by_now_finds_it_there_and_never_begins_again(tmp_path: Path) -> None:
    before, now = (run_of({"strategy": {"kind": "diloco"}, "coordinator": {"state_path": str(tmp_path / name)}}) for name in ("old", "new"))
    (tmp_path / "config.yaml").write_text(settings_text(before))
    with pytest.raises(ShoalError, match=r"new holds no state of this run, which was kept in .*old"):
        FolderStorage(now, str(tmp_path), True, now.transport, (), print)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "snapshots").mkdir()
    same = now.replace(coordinator=now.coordinator.replace(state_path=str(tmp_path / "new")))
    (tmp_path / "config.yaml").write_text(settings_text(same))
    with pytest.raises(ShoalError, match=r"secrets\.json is missing"):
        FolderStorage(now, str(tmp_path), True, now.transport, (), print)
    CoordinatorSecrets("token", new_keys(), expected=3).save(tmp_path / "new")
    assert FolderStorage(now, str(tmp_path), True, now.transport, (), print).expected == 3
