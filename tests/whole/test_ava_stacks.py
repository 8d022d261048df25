"""Every preset of ava's and every stack of them that its document names starts, made small, on a CPU, and learns."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.config.schema.engine import DeepSpeed
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.folder.run_reader import read_summary
from tests.support.ava_stacks import expect_learning, sets, smaller, write_texts

PRESETS = (
    "gpu/tiny",
    "gpu/small",
    "gpu/base",
    "gpu/large",
    "hardware/a100_80gb",
    "hardware/h100_80gb",
    "distributed/deepspeed_zero1",
    "distributed/deepspeed_zero2",
    "distributed/deepspeed_zero3",
    "research/quantization_nvfp4",
    "research/rag_enabled",
)
"""All but rlhf/test_cpu, which is another way to learn."""
STACKS = (
    "gpu/base hardware/a100_80gb",
    "gpu/base hardware/h100_80gb",
    "gpu/large hardware/h100_80gb",
    "gpu/base hardware/a100_80gb distributed/deepspeed_zero1",
    "gpu/base hardware/a100_80gb distributed/deepspeed_zero2",
    "gpu/base hardware/a100_80gb distributed/deepspeed_zero3",
    "gpu/base hardware/h100_80gb distributed/deepspeed_zero2",
    "gpu/base hardware/h100_80gb distributed/deepspeed_zero3",
    "gpu/large hardware/h100_80gb distributed/deepspeed_zero3",
    "gpu/large hardware/h100_80gb distributed/deepspeed_zero3 research/quantization_nvfp4",
    "gpu/large research/rag_enabled",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    return tmp_path


OTHER_STAGES = ("distributed/deepspeed_zero1", "distributed/deepspeed_zero2")
"""In one process they train what the third stage trains."""


def as_parameter(stack: str) -> Any:
    return pytest.param(stack, marks=pytest.mark.long) if stack.endswith(OTHER_STAGES) else stack


@pytest.mark.whole
@pytest.mark.parametrize("stack", [as_parameter(stack) for stack in (*PRESETS, *STACKS)])
def test_a_stack_starts_and_learns(stack: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = stack.split()
    code = main(["train", *files, "--run-dir", "run", *smaller(files)])
    assert code == 0, capsys.readouterr().err
    expect_learning(folder / "run")


@pytest.mark.long  # test_zero.py trains with DeepSpeed
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed (shoal[deepspeed])")
def test_a_stack_starts_with_the_engine_that_it_names(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = ["gpu/base", "hardware/h100_80gb", "distributed/deepspeed_zero3"]
    code = main(["train", *files, "--run-dir", "run", *smaller(files, {"launch.devices_per_node": "1"})])
    told = capfd.readouterr()
    assert code == 0, told.err
    assert "on 1 × cpu (deepspeed)" in told.err + told.out
    engine = RunDirectory(folder / "run").config().engine
    assert isinstance(engine, DeepSpeed)
    assert engine.zero_stage == 3
    expect_learning(folder / "run")


FEEDBACK = {"model.max_seq_len": "32", "rlhf.ppo.steps": "1", "training.max_steps": "2"}


@pytest.mark.parametrize("algorithm", ["ppo", *(pytest.param(name, marks=pytest.mark.long) for name in ("rloo", "grpo", "online-dpo"))])
def test_the_documents_mixture_learns_from_feedback(algorithm: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its activations are computed again, and its texts come from a stream."""
    pytest.importorskip("vaderSentiment")
    settings = FEEDBACK | {"rlhf.algorithm": algorithm, "rlhf.group_size": "4"}
    command = ["train", "gpu/base", "--rlhf_config", "rlhf/test_cpu", "--run-dir", "run", *smaller(["gpu/base"]), *sets(settings)]
    assert main(command) == 0, capsys.readouterr().err
    base, policy = (RunDirectory(folder / "run" / name).config() for name in ("base", "policy"))
    for run in (base, policy):
        assert run.training.gradient_checkpointing
        assert run.data.streaming
    summary = read_summary(folder / "run" / "policy")
    assert summary["status"] == "completed"
    assert all(map(math.isfinite, summary["metrics"]["train"].values()))


@pytest.mark.parametrize("task", ["dpo", pytest.param("reward", marks=pytest.mark.long)])
def test_the_documents_mixture_learns_from_pairs(task: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pairs.jsonl").write_text('{"prompt": "Who?", "chosen": " A fox.", "rejected": " A cat."}\n' * 40)
    settings = {"task": task, "data.source.kind": "preferences", "data.source.path": "pairs.jsonl", "data.streaming": "false"}
    assert main(["train", "gpu/base", "--run-dir", "run", *smaller(["gpu/base"]), *sets(settings)]) == 0, capsys.readouterr().err
    assert RunDirectory(folder / "run").config().training.gradient_checkpointing
    expect_learning(folder / "run")


def test_fp8_is_refused_where_no_gpu_has_it_and_the_check_says_what_it_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "hardware/h100_80gb"]) == 0
    assert "fp8 needs a GPU of the Hopper generation (H100, H200) wherever this run trains" in capsys.readouterr().err
    assert main(["train", "gpu/tiny", "--set", "training.precision.kind=fp8", "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert "this run would train on cpu" in told
    assert "--allow-emulation (training.allow_emulation: true) rounds as fp8 does and computes in fp32, slower than bf16" in told
    assert main(["config", "check", "--allow-emulation", "hardware/h100_80gb"]) == 0
    assert "fp8 is emulated, unless a GPU has it" in capsys.readouterr().err


def test_nvfp4_is_emulated_and_says_so_and_the_bare_switch_is_for_fp8(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack = ["gpu/tiny", "research/quantization_nvfp4"]
    assert main(["config", "check", *stack]) == 0
    assert "nvfp4 is emulated" in capsys.readouterr().err
    for switch in (["--allow-emulation"], ["--allow_emulation"], ["--allow-emulation", "true"]):
        assert main(["config", "check", *switch, "hardware/h100_80gb"]) == 0
        assert "fp8 is emulated, unless a GPU has it" in capsys.readouterr().err
    assert main(["config", "check", "hardware/h100_80gb", "--allow-emulation", "false"]) == 0
    assert "fp8 needs a GPU" in capsys.readouterr().err
    assert main(["config", "check", *stack, "--batch_size"]) == 2, "other settings need a value"
