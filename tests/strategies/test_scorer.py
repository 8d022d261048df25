"""`updates.scorer` in runs with real workers: what is measured is in the ledger, and can be measured again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.cli.main import main
from shoal.runs.folder.measured_rounds import kept_rounds
from shoal.runs.worker_run import JoinedWorker
from tests.strategies.test_every_setting import SMALL, STRATEGIES

SCORED = {"updates": {"scorer": {"enabled": True, "share": 0.5, "kept": 3}}, "evaluation": {"strategy": "epoch"}}
SPARSE = {"updates": {"codec": {"kind": "topk", "ratio": 0.1, "chunk": 256, "values": "2-bit"}}}


def idle(joined: JoinedWorker) -> None:
    """The worker named w2 sends zeros."""
    if joined.worker.protocol.name == "w2":
        limit = joined.worker.encoder.limit

        def zeros(vector: torch.Tensor) -> bool:
            vector.zero_()
            return limit(vector)

        joined.worker.encoder.limit = zeros  # type: ignore[method-assign]


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "coordinator" / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["syncps", "diloco"])
def test_an_idle_worker_does_not_count_and_the_audit_measures_it_again(
    cluster: Callable[..., Any], strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = cluster(SMALL, STRATEGIES[strategy], SCORED, SPARSE if strategy == "diloco" else {}, workers=3, change=idle)
    folder = outcome.loop.directory.path
    lines = [line for line in ledger_of(folder) if "version" in line]
    assert "scores" in lines[0]
    assert all(line["factors"]["w2"] == 0 for line in lines)
    assert len(kept_rounds(folder)) <= 3
    assert main(["audit", str(folder), "--scores"]) == 0
    said = capsys.readouterr().out
    assert "what counted less counted as the losses say: " in said
    assert "measured again" in said


def test_an_audit_finds_scores_that_were_never_measured(cluster: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    outcome = cluster(SMALL, STRATEGIES["syncps"], SCORED, workers=3, change=idle)
    folder = outcome.loop.directory.path
    path = max((folder / "measured").iterdir())
    tensors = load_file(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        records = json.loads(file.read(length))["__metadata__"]
    tensors["weights"] = -tensors["weights"]
    save_file(tensors, path, records)
    assert main(["audit", str(folder), "--scores"]) == 1
    output = capsys.readouterr()
    assert "and the ledger says" in output.out + output.err
    path.write_bytes(b"not a file of tensors")
    assert main(["audit", str(folder), "--scores"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_run_without_measured_rounds_has_none_to_repeat(cluster: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    outcome = cluster(SMALL, STRATEGIES["edp"], {"training": {"max_steps": 2}}, workers=1)
    assert main(["audit", str(outcome.loop.directory.path), "--scores"]) == 2
    assert "keeps no measured rounds" in capsys.readouterr().err
