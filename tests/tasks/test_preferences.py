"""Learning from pairs of answers: scores and direct preference optimization, against their definitions."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.config.load import resolve_data
from shoal.config.schema import model as schema
from shoal.config.schema.task import Dpo as DpoSettings
from shoal.engines.single import SingleEngine
from shoal.models.gpt import Gpt
from shoal.models.layers.value_head import ScoreModel
from shoal.models.moe import Moe
from shoal.models.packed.layers import PackedLayer, byte_count, packing
from shoal.runs.export.folder import export
from shoal.runs.trained_model import open_run
from shoal.runs.training.train_alone import prepare
from shoal.tasks.answer_logprobs import PromptAnswers, Reference, as_used, log_probs
from shoal.tasks.dpo import Dpo
from shoal.tasks.reward import RewardModelTask

SIZES: dict[str, Any] = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 24}
IGNORED = -100


def gpt(dropout: float = 0.0, **more: Any) -> Gpt:
    torch.manual_seed(0)
    return Gpt(schema.Gpt(**SIZES, dropout=dropout, **more), 11).double()


def pairs(width: int = 9, left: bool = False) -> dict[str, Tensor]:
    """Two pairs with prompts of 3 and 2 tokens and answers of several lengths, padded to a width."""
    torch.manual_seed(1)
    batch: dict[str, Tensor] = {}
    for side, lengths in (("chosen", (7, 4)), ("rejected", (5, 6))):
        ids, labels = torch.full((2, width), 9), torch.full((2, width), IGNORED)
        mask = torch.zeros(2, width, dtype=torch.bool)
        for row, (length, prompt) in enumerate(zip(lengths, (3, 2), strict=True)):
            tokens = torch.randint(9, (length + 1,), generator=torch.Generator().manual_seed(10 * row + length))
            start = width - length if left else 0
            ids[row, start : start + length], mask[row, start : start + length] = tokens[:-1], True
            labels[row, start + prompt - 1 : start + length] = tokens[prompt:]
        batch |= {f"{side}_input_ids": ids, f"{side}_labels": labels, f"{side}_attention_mask": mask}
    return batch


def sequence_log_prob(model: Gpt, batch: dict[str, Tensor], side: str, row: int) -> Tensor:
    """From the definition: token after token, without padding."""
    real = batch[f"{side}_attention_mask"][row]
    ids, labels = batch[f"{side}_input_ids"][row][real], batch[f"{side}_labels"][row][real]
    log_p = model(ids[None])[0].log_softmax(-1)
    return sum((log_p[t, labels[t]] for t in range(len(ids)) if labels[t] != IGNORED), torch.zeros((), dtype=torch.float64))


def gradients(task: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    (loss,) = task.losses(batch)
    return list(torch.autograd.grad(loss.value, [p for p in task.players["model"].parameters() if p.requires_grad], allow_unused=True))


def test_a_reward_model_starts_with_equal_scores_and_follows_bradley_and_terry() -> None:
    task, batch = RewardModelTask({"model": ScoreModel(gpt()).double()}), pairs()
    (loss,) = task.losses(batch)
    assert float(loss.value.detach()) == pytest.approx(math.log(2))
    assert float(loss.metrics["accuracy"]) == 0.5
    torch.nn.init.normal_(task.players["model"].head.weight)
    scores = []
    for side in ("chosen", "rejected"):
        for row in range(2):
            ids = batch[f"{side}_input_ids"][row][batch[f"{side}_attention_mask"][row]]
            scores.append(task.players["model"].trunk.hidden(ids[None])[0, -1] @ task.players["model"].head.weight[0])
    expected = -sum(float(F.logsigmoid(scores[row] - scores[2 + row]).detach()) for row in range(2)) / 2
    (loss,) = task.losses(batch)
    assert float(loss.value.detach()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["gpt", "moe"])
def test_padding_on_either_side_changes_no_score(kind: str) -> None:
    torch.manual_seed(0)
    network = gpt() if kind == "gpt" else Moe(schema.Moe(**SIZES, experts=schema.Experts(count=2, per_token=1)), 11).double()
    model = ScoreModel(network).double()
    torch.nn.init.normal_(model.head.weight)
    task = RewardModelTask({"model": model})
    with as_used(model):
        scores = [
            task.score(PromptAnswers.of(pairs(width, left), "chosen_")) for width, left in ((9, False), (14, False), (9, True), (13, True))
        ]
    for other in scores[1:]:
        assert torch.allclose(scores[0], other, rtol=1e-9, atol=1e-12)


def test_head_only_leaves_the_network_below_as_it_is() -> None:
    model = ScoreModel(gpt(), head_only=True)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["head.weight"]


def test_dpo_has_the_loss_and_the_gradient_of_its_definition() -> None:
    model, batch, beta, smoothing = gpt(), pairs(), 0.3, 0.1
    task = Dpo({"model": model}, DpoSettings(beta=beta, label_smoothing=smoothing))
    start = copy.deepcopy(model)
    (loss,) = task.losses(batch)
    assert float(loss.value.detach()) == pytest.approx(math.log(2)), "it is its own reference"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    direct = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        gains = [
            sequence_log_prob(model, batch, side, row) - sequence_log_prob(start, batch, side, row).detach()
            for side in ("chosen", "rejected")
        ]
        margin = beta * (gains[0] - gains[1])
        direct = direct - ((1 - smoothing) * F.logsigmoid(margin) + smoothing * F.logsigmoid(-margin)) / 2
    expected = torch.autograd.grad(direct, list(model.parameters()), allow_unused=True)
    (loss,) = task.losses(batch)
    assert float(loss.value.detach()) == pytest.approx(float(direct.detach()), rel=1e-12)
    for own, wanted in zip(gradients(task, batch), expected, strict=True):
        assert (own is None) == (wanted is None)
        assert own is None or torch.allclose(own, wanted, rtol=1e-8, atol=1e-12)


def test_what_is_padded_and_what_is_dropped_changes_nothing() -> None:
    torch.manual_seed(0)
    plain, padded = pairs(), pairs(12)
    for side in ("chosen", "rejected"):
        outside = ~padded[f"{side}_attention_mask"]
        padded[f"{side}_input_ids"][outside] = torch.randint(9, (int(outside.sum()),))
    one, other = (Dpo({"model": gpt(dropout)}, DpoSettings()) for dropout in (0.0, 0.5))
    for own, wanted in zip(gradients(other, padded), gradients(one, plain), strict=True):
        assert own is None or torch.allclose(own, wanted, rtol=1e-9, atol=1e-13)
    assert other.players["model"].training, "what belongs to the caller is given back as it was"


def test_lora_is_switched_off_for_the_reference_and_on_again_after_an_exception() -> None:
    class Adapted(torch.nn.Module):
        has_adapters, on = True, True

        def without_adapters(self) -> Any:
            import contextlib

            @contextlib.contextmanager
            def off() -> Any:
                self.on = False
                try:
                    yield
                finally:
                    self.on = True

            return off()

        def forward(self, *given: Any, **more: Any) -> Tensor:
            assert not self.on
            raise RuntimeError("out of memory")

    model = Adapted()
    with pytest.raises(RuntimeError, match="out of memory"):
        Reference(model).log_probs(PromptAnswers.of(pairs(), "chosen_"))
    assert model.on


def test_the_reference_is_packed_as_the_settings_say_and_the_policy_is_not() -> None:
    model, text = gpt(), PromptAnswers.of(pairs(), "chosen_")
    wanted = Reference(model).log_probs(text)
    packed = Reference(model).held(packing(lambda network: network, "int8"), model)
    found = packed.log_probs(text)
    assert 0 < float((found - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())
    assert not any(isinstance(one, PackedLayer) for one in model.modules())
    assert packed._copy is not None
    assert byte_count(packed._copy) < 0.6 * byte_count(model)


def test_log_probs_at_a_temperature_are_those_of_scaled_logits() -> None:
    model, text = gpt(), PromptAnswers.of(pairs(), "chosen_")
    full = (model(text.input_ids_BL) / 0.7).log_softmax(-1)
    wanted = full.gather(-1, text.labels_BL.clamp(min=0)[..., None])[..., 0] * (text.labels_BL != IGNORED)
    assert torch.allclose(log_probs(model, text, 0.7), wanted, rtol=1e-12)


# --- whole runs ---------------------------------------------------------------------------------------------------------


def settings(tmp_path: Path, task: str, **more: Any) -> Any:
    rows = [{"prompt": f"Q{i}: ", "chosen": f"yes {i}", "rejected": f"no, {i} is"} for i in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "task": {"kind": "reward"} if task == "reward" else {"kind": "dpo", "loss": task},
        "model": {"kind": "gpt", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 32},
        "data": {"source": {"kind": "preferences", "path": str(tmp_path / "pairs.jsonl")}},
        "training": {"batch_size": 6, "epochs": 4, "device": "cpu", "optimizer": {"learning_rate": 0.01}},
        "checkpoint": {"every_steps": 5},
        "output_dir": str(tmp_path),
    }
    return resolve_data(tree | more, name="test", dialect="shoal", environ={})


@pytest.mark.whole
@pytest.mark.parametrize("task", ["reward", "sigmoid", "kto", pytest.param("orpo", marks=pytest.mark.long)])
def test_a_run_learns_from_pairs_and_resumes_to_the_same_numbers(task: str, tmp_path: Path) -> None:
    whole = prepare(settings(tmp_path, task), run_dir=str(tmp_path / "whole"), resume=False, reporters=[])
    summary = whole.train()
    figures = summary["metrics"]["eval"]
    assert figures["chosen_reward"] > figures["rejected_reward"] + 1 if task == "kto" else figures["accuracy"] == 1.0
    half = prepare(settings(tmp_path, task), run_dir=str(tmp_path / "half"), resume=False, reporters=[])
    assert isinstance(half.engine, SingleEngine)
    step = half.engine.step

    def until_seven(batches: Any) -> Any:
        half.interrupt() if half.step == 6 else None
        return step(batches)

    half.engine.step = until_seven  # type: ignore[method-assign]
    half.train()
    again = prepare(settings(tmp_path, task), run_dir=str(tmp_path / "half"), resume=True, reporters=[])
    again.train()
    for name, value in whole.engine.weights().items():
        assert torch.equal(value, again.engine.weights()[name]), name
    export(str(tmp_path / "whole"), tmp_path / "exported", lambda text: None)
    assert open_run(str(tmp_path / "exported"), lambda text: None).task.headline == whole.engine.task.headline


def test_a_task_that_compares_refuses_data_without_pairs() -> None:
    tree = {"task": {"kind": "dpo"}, "model": {"kind": "gpt"}}
    problems = resolve_data(tree, name="test", dialect="shoal", environ={}).problems
    assert any("learns from pairs of answers" in problem.message for problem in problems)
