"""What a run survives and what it refuses when it is continued, and what it leaves on a full disk."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.main import main
from shoal.config.load import ConfigFile, parse_override, resolve
from shoal.engines.health import HealthMonitor
from shoal.runs.folder.checkpoint import Checkpoints
from shoal.tasks.language import LanguageModelling
from tests.support.processes import Command, run_python

TEXT = """\
dialect: shoal
model: {kind: gpt, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 16}
data: {source: {kind: text, path: text.txt}, tokenizer: characters}
training: {max_steps: 6, batch_size: 4}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.yaml").write_text(TEXT)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return tmp_path


def train(*arguments: str) -> int:
    return main(["train", *arguments])


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_resume_before_the_first_checkpoint_starts_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("starter", "--epochs", "1", "--run-dir", "run") == 0
    before = [(record["step"], record["split"]) for record in records(folder / "run")]
    for path in (folder / "run" / "checkpoints").glob("step-*"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    with (folder / "run" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4')
    assert train("--run-dir", "run", "--resume") == 0
    assert "starts over" in capsys.readouterr().err
    assert [(record["step"], record["split"]) for record in records(folder / "run")] == before


def test_a_completed_run_is_left_as_it_is(folder: Path) -> None:
    assert train("starter", "--epochs", "1", "--run-dir", "run", "--set", "evaluation.every_steps=1000") == 0
    before = records(folder / "run")
    for _ in range(2):
        assert train("--run-dir", "run", "--resume") == 0
    assert records(folder / "run") == before


HOLDER = """
from pathlib import Path
from shoal.coordinator.durable.lock import FolderLock
lock = FolderLock(Path("run"))
lock.take()
print("held", flush=True)
input()
"""


def test_a_run_that_another_process_is_at_work_in_is_left_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("starter", "--epochs", "1", "--run-dir", "run") == 0
    monkeypatch.setattr("shoal.runs.folder.run_directory._ENDING_S", 0.0)
    (folder / "holder.py").write_text(HOLDER)
    with contextlib.closing(Command(["holder.py"], folder)) as holder:
        assert holder.stdout.readline() == "held\n"
        capsys.readouterr()
        assert train("--run-dir", "run", "--resume") == 2
        assert "another process is at work in run: end it first" in capsys.readouterr().err
    assert train("--run-dir", "run", "--resume") == 0


def test_a_run_that_stopped_early_stays_stopped(folder: Path) -> None:
    settings = ["--set", "training.early_stopping.patience=1", "--set", "training.early_stopping.threshold=10.0"]
    assert train("starter", "--run-dir", "run", *settings) == 0
    assert train("--run-dir", "run", "--resume") == 0
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 88


def test_the_runs_own_tokenizer_is_kept_though_the_text_has_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("text.yaml", "--run-dir", "run") == 0
    tokenizer = {file.name: file.read_bytes() for file in (folder / "run" / "tokenizer").iterdir()}
    text = (folder / "text.txt").read_text()
    (folder / "text.txt").write_text(text.replace("quick", "!!!!!"))
    capsys.readouterr()
    main(["eval", "run"])
    train("--run-dir", "run", "--resume")
    assert {file.name: file.read_bytes() for file in (folder / "run" / "tokenizer").iterdir()} == tokenizer


def test_resume_from_with_other_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("starter", "--epochs", "1", "--run-dir", "base") == 0
    again = ["starter", "--epochs", "2", "--set", "checkpoint.resume_from=base"]
    assert train(*again, "--run-dir", "sgd", "--set", "training.optimizer.name=SGD") == 2
    assert train(*again, "--run-dir", "half", "--set", "training.precision.kind=fp16") == 2
    assert train(*again, "--run-dir", "none", "--max_steps", "20") == 2
    assert "nothing is left to train" in capsys.readouterr().err
    assert train(*again, "--run-dir", "decay", "--set", "training.optimizer.weight_decay=0.5") == 0
    state = next((folder / "decay" / "checkpoints").glob("step-*/state.json")).read_text()
    assert '["weight_decay", 0.5]' in state
    assert train("starter", "--run-dir", "gone", "--set", "checkpoint.resume_from=nowhere") == 2
    assert not (folder / "gone").exists(), "a run that cannot start leaves no folder in the way"


def test_damaged_checkpoints_do_not_crowd_out_good_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (100, 200, 300):
        Checkpoints(tmp_path, 9).save(step, {"model.w": torch.ones(2)}, {})
    for step in (200, 300):
        (tmp_path / f"step-{step:08d}" / "weights.safetensors").write_bytes(b"nonsense")
    found = checkpoints.newest(lambda text: None)
    assert found is not None
    assert found.step == 100
    checkpoints.forget_after(100)
    checkpoints.save(150, {"model.w": torch.ones(2)}, {})
    assert (tmp_path / "step-00000150").exists()
    assert [path.name for path in checkpoints.all()] == ["step-00000100", "step-00000150"]


def test_a_really_full_disk(folder: Path) -> None:
    """No file may grow beyond 40 kB: checkpoints cannot be written, and that is said."""

    (folder / "limited.py").write_text(
        "import resource, signal, sys\nsys.dont_write_bytecode = True  # Python would keep half of what it compiles\n"
        "from shoal.cli.main import main\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\nraise SystemExit(main())\n"
    )
    result = run_python(["limited.py", "train", "starter", "--epochs", "2", "--run-dir", "run"], folder)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "cannot save a checkpoint" in result.stderr
    assert not list((folder / "run" / "checkpoints").glob(".partial*"))
    assert json.loads((folder / "run" / "summary.json").read_text())["status"] == "failed"


def test_secrets_are_not_kept_and_not_invented(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.runs.trained_model import open_run

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert train("starter", "--epochs", "1", "--run-dir", "run") == 0
    assert all("hf_secret" not in path.read_text() for path in (folder / "run").glob("*.*") if path.suffix in (".yaml", ".json", ".jsonl"))
    token = open_run("run", lambda text: None).run.hub.token
    assert token is not None
    assert token.reveal() == "hf_secret"
    monkeypatch.delenv("HF_TOKEN")
    assert open_run("run", lambda text: None).run.hub.token is None


def test_text_that_looks_like_a_variable_survives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("starter", "--epochs", "1", "--run-dir", "run", "--set", "name=a$${HOME}b", "--set", "evaluation.batches=2") == 0
    capsys.readouterr()
    assert main(["eval", "run"]) == 0
    assert "step-00000044 on 64 held-out samples (of the run's data, digits: 1,437 training images" in capsys.readouterr().out


def test_a_run_that_is_not_there_is_not_resumed_and_one_that_is_there_says_how(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run-dir", "new", "--resume") == 2
    assert "--resume: there is no run in new; `shoal runs .` lists the runs here." in capsys.readouterr().err
    assert not (folder / "new").exists()
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("dialect: shoal\n")
    assert train("--run-dir", "run") == 2
    assert "run holds a run already: add --resume to continue it, or choose another --run-dir" in capsys.readouterr().err
    (folder / "phased" / "base").mkdir(parents=True)
    (folder / "phased" / "base" / "config.yaml").write_text("dialect: shoal\n")
    assert train("--run-dir", "phased", "--resume") == 2
    assert "phased holds a run in phases; name its settings again" in capsys.readouterr().err


def test_half_written_runs_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    assert main(["eval", "typo"]) == 2
    assert main(["generate", "typo"]) == 2
    assert train("starter", "--epochs", "1", "--run-dir", "run") == 0
    (folder / "run" / "data.json").write_text("{")
    assert main(["eval", "run"]) == 2
    assert "data.json is not as manifest.json beside it says" in capsys.readouterr().err
    (folder / "run" / "summary.json").write_text("[]")
    assert main(["runs", "."]) == 0
    assert "running or killed" in capsys.readouterr().out
    assert main(["runs", "nowhere"]) == 2


def test_a_stream_is_judged_and_saved_at_the_end_of_each_pass(folder: Path) -> None:
    settings = ["--set", "data.streaming=true", "--set", "data.max_train_samples=40", "--set", "data.shuffle_buffer=10"]
    settings += ["--set", "data.tokenizer=bytes"]
    assert train("text.yaml", "--run-dir", "run", "--max_steps", "25", *settings) == 0
    judged = [record["step"] for record in records(folder / "run") if record["split"] == "eval"]
    assert judged == [10, 20, 25]


def test_only_what_counts_is_counted_in_packed_batches() -> None:
    class Fixed(torch.nn.Module):
        vocab_size = 5

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(ids, 5).float() * 3

    task = LanguageModelling({"model": Fixed()})
    ids = torch.arange(16).view(2, 8) % 5
    labels = ids.clone()
    labels[0, 1:] = -100
    labels[1] = (ids[1] + 1) % 5
    apart = [{"input_ids": ids[i : i + 1], "labels": labels[i : i + 1]} for i in range(2)]
    together = task.evaluate([{"input_ids": ids, "labels": labels}])["loss"]
    assert task.evaluate(apart)["loss"] == pytest.approx(together)


def test_an_early_end_is_counted_from_the_documents_start() -> None:
    task = LanguageModelling({"model": torch.nn.Identity()}, eos_id=9)
    ids = torch.tensor([[1, 2, 9, 3, 4], [0, 0, 5, 6, 7]])
    mask = torch.tensor([[True] * 5, [False, False, True, True, True]])
    assert task.places({"input_ids": ids, "attention_mask": mask}).tolist()[0] == [0, 1, 2, 0, 1]
    assert task.places({"input_ids": ids, "attention_mask": mask}).tolist()[1][2:] == [0, 1, 2]


def test_null_for_a_section_that_must_be_there_changes_nothing() -> None:
    run = resolve([ConfigFile("demo-gpt")], [parse_override("model=null")], environ={}).run
    assert (run.model.kind, run.chosen_task.kind) == ("gpt", "language-modelling")


def test_settings_between_config_and_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--log-level", "DEBUG", "explain", "log_level", "starter"]) == 0
    assert capsys.readouterr().out.startswith('log_level = "DEBUG"')
    assert main(["--nonsense"]) == 2


def test_a_tokenizer_of_the_hub_without_a_network_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    assert train("text.yaml", "--set", "data.tokenizer=nobody/nothing") == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert "nobody/nothing" in told


def test_health_counts_are_kept() -> None:
    from shoal.config.schema.training import GradientHealth

    monitor = HealthMonitor(GradientHealth(enabled=True))
    monitor.observe(float("inf"))
    other = HealthMonitor(GradientHealth(enabled=True))
    other.load_state_dict(monitor.state_dict())
    assert other.metrics() == monitor.metrics()


def test_the_batch_must_fit_the_global_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("starter", "--set", "training.global_batch_size=320") == 2
    assert "global_batch_size" in capsys.readouterr().err
    assert train("starter", "--set", "training.gradient_accumulation_steps=1000", "--epochs", "1") == 2
