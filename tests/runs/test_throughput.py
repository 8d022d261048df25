"""How fast a run learns, as its records say: against operations that torch counts, and moments that the test gives."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import shoal
from shoal.cli.main import main
from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines import StepResult
from shoal.engines.phase_times import PhaseTimes
from shoal.models import build
from shoal.runs.monitoring.throughput import Throughput, WorkerReports, operations_per_token
from tests.support.small_runs import TEXT

GPT = {"kind": "gpt", "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_seq_len": 32}


@pytest.mark.parametrize("tied", [True, False])
def test_operations_of_a_token_are_those_that_torch_counts(tied: bool) -> None:
    run = resolve_data(
        {"model": GPT | {"tied_embeddings": tied}, "data": {"sequence_length": 32}}, name="t", dialect="shoal", environ={}
    ).run
    model: Any = build(run, DataShapes(vocab_size=96))["model"]
    ids = torch.randint(96, (3, 32))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(ids).sum().backward()
    assert operations_per_token(run, model) == pytest.approx(counter.get_total_flops() / ids.numel(), rel=0.03)


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    run = resolve_data({"model": GPT, "data": {"sequence_length": 32}}, name="t", dialect="shoal", environ={}).run
    model: Any = build(run, DataShapes(vocab_size=96))["model"]
    whole = operations_per_token(run, model)
    weight = next(one for name, one in model.named_parameters() if name.startswith("blocks.0.") and one.ndim == 2)
    weight.requires_grad_(False)
    assert whole - operations_per_token(run, model) == 2 * weight.numel()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    monkeypatch.setattr(time, "monotonic", made)
    return made


def test_every_moment_belongs_to_one_phase(clock: Clock) -> None:
    phases = PhaseTimes(torch.device("cpu"))
    phases.enabled = True
    with phases.on_host("data"):
        clock.now += 1
    for phase, seconds in (("forward_backward", 2), ("optimizer", 4), ("forward_backward", 8), ("", 16)):
        phases.mark(phase)
        clock.now += seconds
    phases.mark("optimizer")
    assert phases.take() == {"data": 1, "forward_backward": 10, "optimizer": 4}
    assert phases.take() == {}


def test_rates_leave_out_evaluations_and_checkpoints(clock: Clock) -> None:
    run = resolve_data({"logging": {"peak_tflops": 0.001}}, name="t", dialect="shoal", environ={}).run
    phases = PhaseTimes(torch.device("cpu"))
    phases.enabled = True
    weight = torch.nn.Linear(1000, 1000, bias=False)
    task = SimpleNamespace(counts_tokens=True, players={"model": weight})
    engine: Any = SimpleNamespace(phases=phases, task=task, device=torch.device("cpu"), size=10**6, worker_world=SimpleNamespace(size=2))
    found = Throughput(run, engine)
    for _ in range(4):
        with phases.on_host("data"):
            clock.now += 0.5
        clock.now += 2
        found.count(StepResult({}, 250, 10))
    with phases.on_host("evaluation"):
        clock.now += 7
    figures = found.take()
    assert figures.pop("memory_bytes") > 1 << 20
    assert figures == {
        "samples_per_s": 4.0,
        "tokens_per_s": 100.0,
        "mfu": pytest.approx(100 * 6e6 / 2e9),  # two processes with 1 GFLOP/s each
        "seconds/data": 0.5,
        "seconds/evaluation": 1.75,
    }
    clock.now += 1
    assert found.take()["samples_per_s"] == 0


def test_records_tell_how_fast_and_runs_are_compared_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    Path("config.yaml").write_text(TEXT + "logging: {every_steps: 2, peak_tflops: 0.1}\ntraining: {device: cpu}\n")
    for name in ("one", "two"):
        assert main(["train", "config.yaml", "--run-dir", name, "--max_steps", "6"]) == 0
    records = [json.loads(line) for line in Path("one/metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["split"] == "train"]
    assert len(train) == 3
    for record in train:
        assert record["tokens_per_s"] > record["samples_per_s"] > 0
        assert 0 < record["mfu"] < 1
        assert record["memory_bytes"] > 1 << 20
        assert all(record[f"seconds/{phase}"] > 0 for phase in ("data", "forward_backward", "optimizer"))
    assert train[-1]["seconds/checkpoint"] > 0
    capsys.readouterr()
    assert main(["runs", "compare", "one", "two"]) == 0
    told = capsys.readouterr().out
    assert "tokens/s" in told
    assert "forward+backward ms" in told
    assert told.count("GiB") == 2


def test_workers_reports_are_added_up_from_record_to_record(clock: Clock) -> None:
    reports: dict[str, dict[str, Any]] = {
        "ada": {"data_s": 1.0, "idle_s": 2.0},
        "eve": {"data_s": -5.0, "idle_s": "much", "memory_bytes": 7},
    }
    found = WorkerReports(lambda: reports, threads=False)
    clock.now += 100
    assert found.take_seconds() == {"data": 1, "waiting": 2}
    reports["ada"] = {"data_s": 4.0, "idle_s": 2.0, "memory_bytes": 5, "peak_tflops": 2.0}
    assert found.take_seconds() == {"data": 3, "waiting": 0}
    assert found.memory_bytes == 12
    assert found.peak is None, "eve does not know hers"
    reports["ada"], reports["eve"] = {"data_s": 0.5}, {"data_s": 1e30}
    assert found.take_seconds() == {"data": 100.5}, "ada has joined again; no worker can have spent more than there was"


class UntilReported(shoal.Reporter):
    """Ends a run when a record has what workers report."""

    found: dict[str, Any] | None = None

    def start(self, recorder: Any) -> None:
        self.recorder = recorder

    def record(self, record: dict[str, Any]) -> None:
        if record.get("seconds/forward_backward", 0) > 0 and "mfu" in record and record["step"] > 50:
            self.found, self.recorder.stopping = record, "stopped early"


def test_a_run_with_workers_records_their_phases(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "config.yaml").write_text(TEXT.replace("text.txt", str(tmp_path / "text.txt")))
    reporter = UntilReported()
    settings = ["training.device=cpu", "training.max_steps=1000000", "logging.every_steps=1", "logging.peak_tflops=0.1"]
    more = ["coordinator.heartbeat_interval_s=0.2", "transport.kind=in-process", "checkpoint.strategy=never", "evaluation.strategy=never"]
    shoal.train(
        tmp_path / "config.yaml", workers=2, overrides=[*settings, *more], run_dir=tmp_path / "run", progress=False, reporters=[reporter]
    )
    assert reporter.found is not None
    assert 0 < reporter.found["mfu"] < 1
    assert {"seconds/data", "seconds/sending", "seconds/waiting"} <= set(reporter.found)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert "malformed" not in status["refused"], "every heartbeat is taken, whatever it reports"
    assert any({"tokens_per_s", "mfu", "forward_backward_s"} <= set(row) for row in status["members"] + status["gone"])


def test_a_run_on_an_unknown_device_has_no_utilisation(tmp_path: Path) -> None:
    run = resolve_data({}, name="t", dialect="shoal", environ={}).run
    device = torch.device("cpu")
    engine: Any = SimpleNamespace(device=device, phases=PhaseTimes(device), task=SimpleNamespace(counts_tokens=True))
    found = Throughput(run, engine)
    found.count(StepResult({}, 5, 5))
    assert "mfu" not in found.take()
