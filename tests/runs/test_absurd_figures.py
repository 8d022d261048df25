"""A worker that tells figures like 1e308 breaks neither records, nor the picture, nor the end of a run that is really coordinated."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from shoal.cli.main import main
from shoal.config.load import resolve_data
from shoal.config.schema.cluster import Zmq
from shoal.protocol.messages import Contribute
from shoal.reporters.sinks import LossCurve
from shoal.runs.connections import JoinOptions
from shoal.runs.coordinator_setup import prepare
from shoal.runs.worker_run import JoinedWorker

SETTINGS: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden_sizes": [4]},
    "training": {"batch_size": 16, "max_steps": 12, "device": "cpu"},
    "strategy": {"kind": "async"},
    "logging": {"every_steps": 1},
    "coordinator": {"heartbeat_interval_s": 1.0},
}
HANG_S = 600.0
"""Whoever takes longer hangs. A busy machine takes many times as long as a quiet one."""
ABSURD = {"loss": 1e308, "accuracy": -1e308, "beyond": math.inf, "nothing": math.nan, "large": 9.9e11}


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def test_a_metric_of_1e308_breaks_neither_records_nor_the_picture_nor_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    loaded = resolve_data(SETTINGS, name="test", dialect="shoal", environ={})
    run = tmp_path / "run"
    transport = Zmq(host="127.0.0.1", port=0)
    coordinating = prepare(loaded, run_dir=str(run), resume=False, reporters=[LossCurve()], workers=1, transport=transport)
    training = threading.Thread(target=coordinating.loop.train, daemon=True)
    training.start()
    worker = JoinedWorker(JoinOptions(*coordinating.invitation, name="eve", state=tmp_path / "eve"), lambda text: None)
    worker.prepare()
    honest, sent = worker.protocol.contribute, []

    def contribute(made: Contribute, frames: Any, pulls: bool) -> None:
        sent.append(made)
        honest(made._replace(metrics=ABSURD if len(sent) % 2 else made.metrics), frames, pulls)

    worker.protocol.contribute = contribute  # type: ignore[method-assign]
    worker.work()
    training.join(HANG_S)
    assert not training.is_alive()
    coordinating.loop.server.close()
    assert len(sent) >= 12
    assert strict((run / "summary.json").read_text())["status"] == "completed"
    records = [strict(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["split"] == "train" and record.get("loss") is not None]
    assert losses, "what the honest half told is there"
    assert max(losses) < 100
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert main(["audit", str(run)]) == 0
    assert "e+308" not in capsys.readouterr().out
    assert [str(one.message) for one in recwarn if issubclass(one.category, RuntimeWarning)] == []
