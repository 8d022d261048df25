"""What only GPUs show: the fused loss in a real step, exact resume, precisions, NCCL; with several of them, several processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.models import build
from shoal.runs.folder.checkpoint import Checkpoints, read_checkpoint
from shoal.tasks.language import LanguageModelling
from tests.support import rank_processes
from tests.support.processes import Processes, processes_in
from tests.support.rank_processes import DDP, FSDP, KEPT, MIXTURE, OFFLOADED, ZERO, needs_deepspeed, sharing

pytestmark = [pytest.mark.whole, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def engine(device: str, **training: object) -> SingleEngine:
    model = {"kind": "gpt", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}
    run = resolve_data({"model": model, "training": training}, name="test", dialect="shoal", environ={}).run
    return SingleEngine(run, LanguageModelling(build(run, DataShapes(vocab_size=257))), torch.device(device), 100)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(257, (count, 4, 33), generator=generator)
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:].contiguous()} for row in ids]


def test_a_gpu_follows_the_cpu() -> None:
    cpu, gpu = engine("cpu"), engine("cuda")
    for batch in batches(10):
        expected, found = cpu.step([batch]), gpu.step([batch])
        assert float(found.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=2e-3)


def test_a_checkpoint_is_copied_to_page_locked_memory(tmp_path: Path) -> None:
    checkpoints, weights = Checkpoints(tmp_path, 9), {"w": torch.arange(5.0, device="cuda"), "b": torch.ones(3, device="cuda").half()}
    checkpoints.prepare(64)
    checkpoints.save_behind(1, weights, {"count": torch.tensor(7), "moment": weights["w"][1:4]})
    for value in weights.values():
        value.zero_()
    checkpoints.wait()
    found = read_checkpoint(checkpoints.all()[0])
    assert found.weights["w"].tolist() == [0, 1, 2, 3, 4]
    assert found.weights["b"].dtype == torch.float16
    assert found.state["moment"].tolist() == [1, 2, 3]
    assert int(found.state["count"]) == 7


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_half_precision_learns_the_same(kind: str, compiled: bool) -> None:
    exact, half = engine("cuda"), engine("cuda", precision={"kind": kind}, compile=compiled)
    for batch in batches(1) * 20:
        expected, found = exact.step([batch]), half.step([batch])
    assert float(found.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=0.05)


# --- engines of several processes: one on each GPU ------------------------------------------------------

GPUS = torch.cuda.device_count()
IN_MEMORY = json.dumps({"kind": "fsdp", "cpu_offload": True})


def alone(**training: object) -> list[float]:
    return rank_processes.losses_of(rank_processes.engine_of(device="cuda", **training))


def test_ddp_and_fsdp_over_nccl_follow_one_gpu_step_by_step() -> None:
    expected = alone()
    for found in rank_processes.together("agreement", GPUS, DDP, FSDP, KEPT, IN_MEMORY, device="cuda"):
        for name, losses in found.items():
            assert losses == pytest.approx(expected, rel=1e-4), name


@needs_deepspeed
def test_zero_over_nccl_follows_one_gpu_step_by_step() -> None:
    expected = alone()
    for found in rank_processes.together("agreement", GPUS, *ZERO, *OFFLOADED, device="cuda"):
        for name, losses in found.items():
            assert losses == pytest.approx(expected, rel=1e-4), name


def test_halves_over_nccl_learn_the_same() -> None:
    expected = alone(precision={"kind": "bf16"})
    for found in rank_processes.together("half_agreement", GPUS, DDP, FSDP, IN_MEMORY, device="cuda"):
        for name, losses in found.items():
            assert losses == pytest.approx(expected, rel=0.02), name


@needs_deepspeed
def test_halves_of_zero_learn_the_same() -> None:
    expected = alone(precision={"kind": "bf16"})
    for found in rank_processes.together("half_agreement", GPUS, *ZERO, OFFLOADED[-1], device="cuda"):
        for name, losses in found.items():
            assert losses == pytest.approx(expected, rel=0.02), name


def test_rows_of_experts_go_through_nccl_and_come_back() -> None:
    """With one GPU the only rank sends them to itself."""
    (found,) = rank_processes.together("exchanged_alone", 1, device="cuda")
    own, plain = map(torch.tensor, found)
    torch.testing.assert_close(own, plain, rtol=0.02, atol=1e-3)


@pytest.mark.skipif(GPUS not in (2, 4, 8), reason="needs 2, 4 or 8 GPUs")
def test_gpus_that_share_experts_learn_what_one_gpu_learns() -> None:
    question = json.dumps(["steps_of", sharing(GPUS), MIXTURE, {}])
    expected = rank_processes.steps_of(None, {"kind": "single"}, MIXTURE, {"device": "cuda"})
    for (found,) in rank_processes.together("answers", GPUS, question, device="cuda"):
        torch.testing.assert_close(torch.tensor(found["gradient"]), torch.tensor(expected["gradient"]), rtol=1e-6, atol=1e-9)


# --- as a user starts them ------------------------------------------------------------------------------

CONFIG = """\
dialect: shoal
model: {kind: gpt, hidden_size: 64, num_layers: 2, num_heads: 2, max_seq_len: 32, dropout: 0.0}
data: {source: {kind: text, path: text.txt}, tokenizer: characters}
training: {max_steps: 24, batch_size: 8, device: cuda, clipping: {max_norm: 1.0}, precision: {kind: bf16}}
evaluation: {strategy: steps, every_steps: 24}
checkpoint: {strategy: steps, every_steps: 8, keep_last: 9}
transport: {port: 0}
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    with processes_in(tmp_path) as made:
        yield made


def loss_of(processes: Processes, run: str, *settings: str) -> float:
    """The loss at the end of a run."""
    chosen = [word for setting in settings for word in (("--set", setting) if "=" in setting else (setting,))]
    code, output = processes.run("train", "config.yaml", "--run-dir", run, *chosen)
    assert code == 0, output
    found: float = json.loads((processes.folder / run / "summary.json").read_text())["metrics"]["eval"]["loss"]
    return found


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_a_checkpoint_goes_on_under_another_engine(processes: Processes, engine: str) -> None:
    settings = [f"engine.kind={engine}", *(["engine.zero_stage=3"] if engine == "deepspeed" else [])]
    whole = loss_of(processes, "whole", *settings)
    loss_of(processes, "part", *settings, "training.max_steps=16", "training.schedule.kind=constant")
    rows = f"training.batch_size={8 * GPUS}"
    assert loss_of(processes, "rest", "engine.kind=single", rows, "checkpoint.resume_from=part") == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("engine", ["single", "collectives"])
def test_diloco_with_a_replica_on_each_gpu(processes: Processes, engine: str) -> None:
    workers = "1" if engine == "collectives" else str(max(2, GPUS))
    diloco = ["strategy.kind=diloco", "strategy.inner_steps=8", f"engine.kind={engine}"]
    assert loss_of(processes, "run", *diloco, "--workers", workers) < 2.5
    code, output = processes.run("audit", "run")
    assert code == 0, output
