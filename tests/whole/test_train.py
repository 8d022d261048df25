"""`shoal train` as a user runs it: killed, interrupted, resumed, fed with nonsense."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.cli.output import stopping_on_signals
from shoal.errors import ShoalError
from tests.support.processes import HANG_S, Command

GPT = ["--set", "model.hidden_size=16", "--set", "model.num_layers=1", "--set", "model.num_heads=2", "--set", "model.max_seq_len=16"]
CASES = {
    "digits": ["starter", "--max_steps", "40"],
    "gan": ["gan.yaml"],
    "mixture": ["mixture.yaml", *GPT],
}
GAN = """\
dialect: shoal
model: {kind: dcgan, image_size: 16, latent_dim: 8, generator_features: 4, discriminator_features: 4}
training: {max_steps: 24, batch_size: 16, optimizer: {name: Adam, beta1: 0.5}, players: {generator: {learning_rate: 0.0005}}}
evaluation: {batches: 2}
"""
MIXTURE = """\
dialect: shoal
model: {kind: gpt, dropout: 0.1}
data:
  source:
    kind: mixture
    parts:
      - {source: {kind: text, path: one.txt}, weight: 2.0}
      - {source: {kind: text, path: two.txt}, weight: 1.0}
  mixing: {enabled: true, temperature: 2.0}
training: {max_steps: 24, batch_size: 4, gradient_accumulation_steps: 2, schedule: {kind: cosine, warmup_steps: 5}}
evaluation: {batches: 2}
"""
DIES = """\
import os, signal
from shoal.cli.main import main
from shoal.engines import SingleEngine
before = SingleEngine.step
def step(self, batches):
    if self.step_count == 18:
        os.kill(os.getpid(), signal.SIGKILL)
    return before(self, batches)
SingleEngine.step = step
raise SystemExit(main())
"""
"""A whole run takes a second: whoever kills it from outside may come when it is over."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dies.py").write_text(DIES)
    (tmp_path / "gan.yaml").write_text(GAN)
    (tmp_path / "mixture.yaml").write_text(MIXTURE)
    (tmp_path / "one.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "two.txt").write_text("pack my box with five dozen liquor jugs; " * 100)
    return tmp_path


def shoal(*arguments: str) -> int:
    return main(["train", *arguments])


def start(folder: Path, *arguments: str, program: Sequence[str] = ("-m", "shoal")) -> Command:
    return Command([*program, "train", *arguments], folder, errors=True)


def end(process: Command) -> int:
    """Wait for a process; its exit code."""
    process.communicate(timeout=HANG_S)
    return process.wait()


def records(run: Path) -> list[dict[str, Any]]:
    """What was recorded, without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name not in ("wall_s", "memory_bytes") and "per_s" not in name and "seconds" not in name
        }
        for line in lines
    ]


def wait_for_step(process: Command, run: Path, step: int) -> None:
    """Until the run has recorded the step; an end before that is a failure."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and any(record["step"] >= step for record in _whole(run)):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("the run did not get there in time")


def _whole(run: Path) -> list[dict[str, Any]]:
    text = (run / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@pytest.mark.parametrize("case", ["digits", "gan", pytest.param("mixture", marks=pytest.mark.long)])
def test_killed_and_resumed_is_the_same_as_not_killed(folder: Path, case: str) -> None:
    """To the bit, as processes of their own: what else a process has computed may change how the next sum is rounded."""
    arguments = [*CASES[case], "--set", "checkpoint.every_steps=7", "--set", "logging.every_steps=3"]
    assert end(start(folder, *arguments, "--run-dir", "whole")) == 0
    assert end(start(folder, *arguments, "--run-dir", "killed", program=["dies.py"])) == -signal.SIGKILL
    assert records(folder / "killed")[-1]["step"] == 18
    assert not (folder / "killed" / "summary.json").exists()
    assert end(start(folder, "--run-dir", "killed", "--resume")) == 0
    assert records(folder / "killed") == records(folder / "whole")
    summary = json.loads((folder / "killed" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert "step-" in summary["resumed_from"]


def test_ctrl_c_saves_and_ends(folder: Path) -> None:
    process = start(folder, "starter", "--epochs", "2000", "--run-dir", "run")
    wait_for_step(process, folder / "run", 10)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out.startswith("interrupted after")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    (newest,) = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1:]
    assert newest.name == f"step-{summary['steps']:08d}"


def test_a_run_leaves_what_it_promises(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        shoal(
            "starter", "--epochs", "2", "--run-dir", "run", "--set", "logging.sinks=[tensorboard]", "--set", "logging.track_gradients=true"
        )
        == 0
    )
    run = folder / "run"
    summary = json.loads((run / "summary.json").read_text())
    expected = {"format", "checksum", "status", "metrics", "steps", "samples", "loss_fell", "wall_s", "peak_memory_bytes", "resumed_from"}
    assert set(summary) == expected
    assert summary["status"] == "completed"
    assert summary["steps"] == 88
    assert summary["samples"] == 88 * 32
    assert summary["metrics"]["eval"]["accuracy"] > 0.5
    assert summary["peak_memory_bytes"] > 1 << 20
    for name in ("config.yaml", "provenance.json", "metrics.jsonl", "loss.png", "checkpoints/latest"):
        assert (run / name).exists(), name
    assert list((run / "logs").glob("events.*"))
    assert any(name.startswith("gradients/") for name in records(run)[0])
    assert "completed after 88 steps" in capsys.readouterr().out
    assert main(["eval", "run", "--format", "json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["metrics"]["accuracy"] == pytest.approx(summary["metrics"]["eval"]["accuracy"])
    assert main(["runs", "."]) == 0
    assert "completed" in capsys.readouterr().out
    assert main(["generate", "run", "--prompt", "x"]) == 2
    assert shoal("starter", "--run-dir", "run") == 2, "a run is not overwritten"


def test_wandb_works_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    process = start(folder, "starter", "--max_steps", "10", "--run-dir", "run", "--set", "logging.sinks=[wandb]")
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert list((folder / "run" / "wandb").glob("offline-run-*"))


def test_text_and_images_are_generated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("mixture.yaml", *GPT, "--run-dir", "text", "--max_steps", "4") == 0
    assert list((folder / "text" / "samples").glob("*.txt"))
    capsys.readouterr()
    assert main(["generate", "text", "--prompt", "the ", "--max-new-tokens", "20", "--decoding", "greedy"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the ")
    assert main(["generate", "text", "--prompt", "the ", "--max-new-tokens", "20", "--decoding", "greedy"]) == 0
    assert capsys.readouterr().out == first
    assert shoal("gan.yaml", "--run-dir", "images", "--max_steps", "4") == 0
    assert main(["generate", "images", "--grid", "out.png"]) == 0
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "images" / "samples").glob("*.png"))


def test_log_levels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(level: str) -> int:
        assert shoal("starter", "--epochs", "1", "--run-dir", level, "--log-level", level) == 0
        return len(capsys.readouterr().err.splitlines())

    assert lines("DEBUG") > lines("INFO") > lines("WARNING") == 0


def test_early_stopping(folder: Path) -> None:
    settings = ["--set", "training.early_stopping.patience=2", "--set", "training.early_stopping.threshold=1.0"]
    assert shoal("starter", "--run-dir", "run", *settings) == 0
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped early"
    assert summary["steps"] == 3 * 44, "the first evaluation is progress, the next two are not"


def test_resume_steps_over_a_damaged_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["starter", "--epochs", "2", "--run-dir", "run", "--set", "checkpoint.every_steps=20"]
    assert shoal(*arguments) == 0
    before = records(folder / "run")
    newest = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
    (newest / "weights.safetensors").write_bytes(b"nonsense")
    assert shoal(*arguments, "--resume") == 0
    assert "trying the one before it" in capsys.readouterr().err
    assert records(folder / "run") == before


def test_resume_from_starts_a_new_run_with_old_weights(folder: Path) -> None:
    assert shoal("starter", "--epochs", "1", "--run-dir", "first") == 0
    assert shoal("starter", "--epochs", "2", "--run-dir", "second", "--set", "checkpoint.resume_from=first") == 0
    summary = json.loads((folder / "second" / "summary.json").read_text())
    assert (summary["steps"], records(folder / "second")[0]["step"]) == (88, 50)
    assert "first" in summary["resumed_from"]


def test_resume_refuses_other_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("starter", "--epochs", "1", "--run-dir", "run") == 0
    assert shoal("starter", "--epochs", "1", "--run-dir", "run", "--resume", "--batch_size", "8") == 2
    said = capsys.readouterr().err
    assert "other settings" in said
    assert "\n  training.batch_size: 32 before, 8 now\n" in f"{said}\n"
    assert shoal("starter", "--run-dir", "nowhere", "--resume") == 2
    assert shoal("starter", "--epochs", "7", "--resume", "--set", "output_dir=elsewhere") == 2


def test_a_run_goes_on_with_another_length_and_writes_that_down(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("starter", "--epochs", "1", "--run-dir", "run") == 0
    assert shoal("starter", "--epochs", "2", "--run-dir", "run", "--resume", "--set", "evaluation.every_steps=5") == 0
    assert "training.epochs: 1 before, 2 now" in capsys.readouterr().err
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 88
    (line,) = (folder / "run" / "changes.jsonl").read_text().splitlines()
    assert json.loads(line)["changed"]["training.epochs"] == ["1", "2"]
    assert shoal("--run-dir", "run", "--resume") == 0
    assert len((folder / "run" / "changes.jsonl").read_text().splitlines()) == 1, "nothing has changed since"


def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_the_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["starter", "--run-dir", "run", "--set", "checkpoint.every_steps=5", "--set", "logging.every_steps=1"]
    assert shoal(*arguments, "--set", "training.optimizer.name=SGD", "--learning_rate", "1e38") == 2
    assert "the loss is nan" in capsys.readouterr().err
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "the loss is nan" in summary["error"]


def test_a_full_disk_is_told_and_training_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shoal.runs.folder import checkpoint

    real, calls = checkpoint.save_file, []

    def full(tensors: Any, path: Any, metadata: Any) -> None:
        calls.append(path)
        if 5 <= len(calls) <= 6:
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert shoal("starter", "--epochs", "1", "--run-dir", "run", "--set", "checkpoint.every_steps=10") == 0
    assert "No space left on device" in capsys.readouterr().err
    assert len(list((folder / "run" / "checkpoints").glob("step-*"))) == 3


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["model.input_dim=63"], "input_dim"),
        (["model.output_dim=3"], "output_dim"),
        (["training.batch_size=5000"], "do not make one batch"),
        (["training.device=cuda"], "no cuda here"),
        (["data.source.kind=mnist", "data.source.path=nowhere"], "nowhere"),
        (["model.kind=gpt"], "text"),
        (["model.kind=gpt", "data.source.name=python-source", "model.vocab_size=10"], "vocab_size"),
        (["training.players.generator.learning_rate=1"], "generator"),
    ],
)
def test_mistakes_that_only_show_at_the_start_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str], settings: list[str], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert shoal("starter", *arguments, "--run-dir", "run") == 2
    assert word in capsys.readouterr().err


@pytest.mark.long
def test_mnist_reaches_97_5_with_the_schedule_that_its_preset_speaks_of(folder: Path, shared_data: Path) -> None:
    more = ["--set", "training.schedule.kind=cosine", "--set", "logging.sinks=[]"]
    assert shoal("nn_config", "--set", f"data.source.path={shared_data / 'mnist'}", *more, "--run-dir", "run") == 0
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["metrics"]["eval"]["accuracy"] >= 0.975
    assert summary["samples"] == 120_000


def test_errors_are_shoal_errors() -> None:
    from shoal.runs.trained_model import open_run

    with pytest.raises(ShoalError, match="no run at"):
        open_run("nowhere", lambda text: None)


def test_ctrl_c_while_something_is_being_written_writes_by_another_thread() -> None:
    """Python refuses to begin a second write to a stream within the first one of the same thread."""
    wrote: list[int] = []
    told = threading.Event()

    class Talking:
        def interrupt(self) -> bool:
            return False

        def message(self, text: str) -> None:
            wrote.append(threading.get_ident())
            told.set()

    with stopping_on_signals(Talking()):  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)
        assert told.wait(HANG_S)
    assert wrote != [threading.get_ident()]
