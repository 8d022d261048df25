"""Every pair of settings that `shoal config check` accepts is in a row, and the check refuses every other pair.

The rows of one process train here; those of several processes, and of compiled models, are `long`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli.main import main
from shoal.runs.folder.checkpoint import find_checkpoint, load_weights
from shoal.runs.folder.run_reader import read_summary
from shoal.runs.monitoring.best_weights import find_weights
from tests.combinations.array import ROWS, all_pairs, objection
from tests.combinations.factors import DEFAULTS, Row, pairs_of, settings_of
from tests.combinations.inputs import placed, write_inputs
from tests.support.processes import processes_in

FOUND = json.loads(ROWS.read_text())
ARRAY: list[Row] = [DEFAULTS | row for row in FOUND["rows"]]
REFUSED = [tuple(pair) for pair in FOUND["refused"]]


def name_of(row: Row) -> str:
    return "-".join(f"{factor}={value}" for factor, value in row.items() if value != DEFAULTS[factor]) or "defaults"


def runs_here(row: Row) -> bool:
    """Whether the row trains in one process, quickly."""
    return row["strategy"] == "local" and row["engine"] == "single" and row["compile"] == "off"


def as_parameters(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, id=name_of(row)) for row in rows]


def test_every_pair_of_values_is_in_a_row_or_refused() -> None:
    held = {pair for row in ARRAY for pair in pairs_of(row)}
    assert not set(REFUSED) & held
    assert set(all_pairs()) == held | set(REFUSED), "compute the rows anew: python -m tests.combinations.array"


@pytest.mark.parametrize("row", as_parameters(ARRAY))
def test_the_check_accepts_every_row(row: Row) -> None:
    assert objection(row) is None


def test_the_check_refuses_every_pair_that_is_in_no_row() -> None:
    for one, value, other, another in REFUSED:
        assert objection({**DEFAULTS, one: value, other: another}), (one, value, other, another)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("inputs") / "data"
    write_inputs(folder)
    return folder


def file_of(row: Row, inputs: Path, folder: Path) -> Path:
    file = folder / "row.yaml"
    file.write_text(yaml.safe_dump(placed(settings_of(row), inputs)))
    return file


def check_run(folder: Path) -> None:
    """The run, or each of its phases, was completed with finite figures and weights, and a policy began with the weights of its base."""
    for phase in [folder / name for name in ("base", "policy") if (folder / name).is_dir()] or [folder]:
        summary = read_summary(phase)
        assert summary["status"] == "completed"
        assert summary["steps"] > 0
        assert all(math.isfinite(value) for value in summary["metrics"]["train"].values())
        assert all(value.isfinite().all() for value in find_checkpoint(str(phase), print).weights.values() if value.is_floating_point())
    if (folder / "base").is_dir():
        began = load_weights(folder / "policy" / "start.safetensors")
        base = find_weights(str(folder / "base"), print).weights_to_use
        assert all(value.equal(base[name]) for name, value in began.items())


@pytest.mark.parametrize("row", as_parameters([row for row in ARRAY if runs_here(row)]))
def test_rows_of_one_process_train(row: Row, inputs: Path, tmp_path: Path) -> None:
    assert main(["train", str(file_of(row, inputs, tmp_path)), "--run-dir", str(tmp_path / "run")]) == 0
    check_run(tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("row", as_parameters([row for row in ARRAY if not runs_here(row)]))
def test_rows_of_several_processes_train(row: Row, inputs: Path, tmp_path: Path) -> None:
    with processes_in(tmp_path) as processes:
        code, told = processes.run("train", str(file_of(row, inputs, tmp_path)), "--run-dir", "run")
    assert code == 0, told
    check_run(tmp_path / "run")
