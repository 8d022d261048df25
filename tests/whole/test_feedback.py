"""`shoal train` with an rlhf layer: phases, each with a folder of its own, resumed and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.config.schema.rlhf import SentimentReward, TrainedReward
from shoal.runs.rlhf.rewards.interface import Answer
from shoal.runs.trained_model import open_run
from tests.support.processes import processes_in

pytest.importorskip("vaderSentiment")
SMALL = [
    *("--set", "model.hidden_size=16", "--set", "model.num_layers=1", "--set", "model.num_attention_heads=2"),
    *(
        "--set",
        "model.intermediate_size=16",
        "--set",
        "data.max_samples=60",
        "--set",
        "training.max_steps=3",
        "--set",
        "data.max_length=32",
    ),
]


def train(*more: str) -> int:
    return int(main(["train", "gpu/tiny", "--rlhf_config", "rlhf/test_cpu", *SMALL, *more]))


def test_the_documented_command_trains_a_base_and_then_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("--run-dir", "run") == 0
    told = capsys.readouterr().err
    assert "phase 1, base: rlhf.policy is not given, and the model is small: its base is trained first" in told
    assert "phase 2, policy" in told
    assert 'what changed: shoal generate --compare run/base run/policy --prompt "…"' in told
    base, policy = (json.loads(Path("run", name, "summary.json").read_text()) for name in ("base", "policy"))
    assert (base["steps"], policy["steps"]) == (3, 5 * 2 * 8 // 4), "the policy's length is rlhf.ppo.steps"
    run = open_run("run/base", print).run
    assert run.rlhf is None
    assert run.training.optimizer.learning_rate == 0.001, "the base is trained with the layers below rlhf"
    assert open_run("run/policy", print).run.training.optimizer.learning_rate == 1e-5
    assert Path("run/policy/start.safetensors").exists()
    assert main(["generate", "--compare", "run/base", "run/policy", "--prompt", "def ", "--max-new-tokens", "8"]) == 0
    shown = capsys.readouterr().out
    assert "run/base" in shown
    assert "│" in shown
    assert train("--run-dir", "run", "--resume") == 0
    assert "phase 2, policy: done already" in capsys.readouterr().err
    assert train("--run-dir", "run") == 2
    assert "add --resume" in capsys.readouterr().err


def test_a_reward_model_is_trained_first_where_pairs_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Q{i}: ", "chosen": "yes", "rejected": "no, never"} for i in range(60)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"kind": "trained", "preferences": "pairs.jsonl", "epochs": "8", "learning_rate": "0.01"}
    settings = [word for name, value in more.items() for word in ("--set", f"rlhf.reward.{name}={value}")]
    assert train("--run-dir", "run", *settings, "--set", "rlhf.ppo.steps=1") == 0
    assert [Path("run", name, "summary.json").exists() for name in ("base", "reward", "policy")] == [True] * 3
    reward = json.loads(Path("run/reward/summary.json").read_text())
    assert reward["metrics"]["eval"]["accuracy"] == 1.0
    run = open_run("run/policy", print).run
    assert run.rlhf is not None
    good, bad = run.rlhf.reward.builder()(run.rlhf.reward, run)([Answer("Q7: ", "yes"), Answer("Q7: ", "no, never")])
    assert good > bad
    Path("pairs.jsonl").unlink()
    Path("run/policy/summary.json").unlink()
    assert train("--run-dir", "run", *settings, "--set", "rlhf.ppo.steps=1", "--resume") == 0, "a phase that is done needs no file"
    assert Path("run/policy/summary.json").exists()


def test_a_reward_model_within_a_sum_is_trained_first_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Q{i}: ", "chosen": "yes", "rejected": "no, never"} for i in range(60)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = {"kind": "trained", "preferences": "pairs.jsonl", "epochs": 8, "learning_rate": 0.01}
    parts = [{"reward": "sentiment", "weight": 0.5}, {"reward": {"kind": "sum", "parts": [{"reward": trained, "weight": 2.0}]}}]
    settings = ("--set", "rlhf.reward.kind=sum", "--set", f"rlhf.reward.parts={json.dumps(parts)}")
    assert train("--run-dir", "run", *settings, "--set", "rlhf.ppo.steps=1") == 0
    run = open_run("run/policy", print).run
    assert run.rlhf is not None
    answers = [Answer("Q7: ", "yes"), Answer("Q7: ", "no, never")]
    scores = run.rlhf.reward.builder()(run.rlhf.reward, run)(answers)
    alone = [one.builder()(one, run)(answers) for one in (SentimentReward(), TrainedReward(run="run/reward"))]
    assert alone[1][0] > alone[1][1]
    assert scores == pytest.approx([0.5 * feeling + 2 * learned for feeling, learned in zip(*alone, strict=True)])


def test_chosen_answers_are_learned_first_where_the_settings_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has TRL's conversational columns."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i}?"}],
            "chosen": [{"role": "assistant", "content": "yes"}],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for i in range(60)
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tuned = (
        "--set",
        "data.chat_template=plain",
        "--set",
        "rlhf.fine_tune.preferences=pairs.jsonl",
        "--set",
        "rlhf.fine_tune.learning_rate=0.03",
        "--set",
        "rlhf.fine_tune.epochs=4",
    )
    assert train("--run-dir", "run", *tuned, "--set", "rlhf.ppo.steps=1") == 0
    assert "phase 2, answers: the policy learns the chosen answers of the pairs" in capsys.readouterr().err
    metrics = [json.loads(line) for line in Path("run/answers/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["loss"] < 3, "in 7 steps it has learned to say yes; at first any of 257 bytes is as good"
    run = open_run("run/policy", print).run
    assert run.rlhf is not None
    assert run.rlhf.policy == "run/answers"
    assert run.chosen_task.kind == "ppo"


def test_a_large_model_without_a_base_is_refused_with_the_command_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "gpu/base", "--rlhf_config", "rlhf/test_cpu"]) == 2
    told = capsys.readouterr().err
    assert "Train it first: shoal train gpu/base --run-dir base; then add --set rlhf.policy=base" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_two_processes_train_every_phase_and_one_goes_on_with_what_they_left(tmp_path: Path) -> None:
    two = ("--set", "engine.kind=ddp", "--set", "launch.devices_per_node=2", "--set", "training.device=cpu")
    command = ("train", "gpu/tiny", "--rlhf_config", "rlhf/test_cpu", *SMALL, "--set", "rlhf.ppo.steps=2", *two, "--run-dir", "run")
    with processes_in(tmp_path) as processes:
        code, told = processes.run(*command)
        assert code == 0, told
        assert told.count("phase 1, base") == told.count("phase 2, policy") == told.count("what changed") == 1
        code, told = processes.run(*command, "--phase", "reward")
        assert code == 2
        assert "there is no `reward` in this training; there are base, policy" in told
    summary = json.loads((tmp_path / "run" / "policy" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", 2 * 2 * 8 // 4, 2 * 2 * 8)
    assert {"score", "kl", "entropy"} <= set(summary["metrics"]["train"])


def test_what_a_later_phase_lacks_is_reported_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    reward = ["--set", "rlhf.reward.kind=trained", "--set", "rlhf.reward.preferences=pairs.jsonl"]
    tuned = ["--set", "rlhf.fine_tune.preferences=answers.jsonl"]
    for lacks, file in ((reward, "pairs.jsonl"), (tuned, "answers.jsonl")):
        assert train("--run-dir", "run", *lacks) == 2
        assert f"there is nothing at {file} on this machine" in capsys.readouterr().err
    assert main(["config", "check", "gpu/tiny", "--rlhf_config", "rlhf/test_cpu", *reward, *tuned]) == 0
    told = capsys.readouterr().err
    assert told.count("there is nothing at pairs.jsonl on this machine") == 1
    assert told.count("there is nothing at answers.jsonl on this machine") == 1
    assert main(["config", "check", "gpu/tiny", "--rlhf_config", "rlhf/test_cpu", "--set", "rlhf.policy=nowhere"]) == 0
    assert "there is nothing at nowhere on this machine" in capsys.readouterr().err
    assert main(["config", "check", "gpu/base", "--rlhf_config", "rlhf/test_cpu"]) == 0
    assert "Train it first: shoal train gpu/base --run-dir base" in capsys.readouterr().err
    assert train("--run-dir", "run", "--set", "rlhf.prompts=prompts.txt") == 2
    assert "there is nothing at prompts.txt on this machine" in capsys.readouterr().err
    assert not Path("run").exists()


def test_pairs_that_make_no_batch_are_refused_before_the_base_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 3)
    reward = ("--set", "rlhf.reward={kind: trained, preferences: pairs.jsonl}")
    tuned = ("--set", "rlhf.fine_tune.preferences=pairs.jsonl")
    assert train("--run-dir", "run", *tuned) == 2
    assert "error: phase answers: pairs.jsonl: chosen answers: the text to learn from has 6 tokens" in capsys.readouterr().err
    assert train("--run-dir", "run", *reward) == 2
    assert "error: phase reward: 2 samples over 1 shard do not make one batch of 8: take more data" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_file_that_names_its_task_trains_its_base_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("--run-dir", "run", "--set", "task=ppo", "--set", "rlhf.ppo.steps=1") == 0
    assert open_run("run/base", print).run.chosen_task.kind == "language-modelling"
    assert open_run("run/policy", print).run.chosen_task.kind == "ppo"
