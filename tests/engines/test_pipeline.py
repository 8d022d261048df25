"""A pipeline learns what one process learns from the same micro-batches, in however many stages."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines import World
from shoal.models import build as build_models
from shoal.models.huggingface.model import HuggingFace
from shoal.models.partial_model import PartialModel, partial_model
from tests.support import rank_processes

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What pipelines of two and of three stages learned; the second goes on where the first stopped, too."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return {stages: rank_processes.together("pipelines", stages, folder) for stages in (2, 3)} | {0: [{"folder": folder}]}


@pytest.mark.parametrize("stages", [2, 3])
def test_figures_gradients_weights_and_judgements_are_those_of_one_process(found: dict[int, list[dict[str, Any]]], stages: int) -> None:
    for name, model in {"gpt": rank_processes.DEEP, "mixture": rank_processes.DEEP_MIXTURE}.items():
        wanted = rank_processes.learned(rank_processes.pipeline_engine(None, model, {"kind": "single"}), rank_processes.cut_in_two)
        for rank in found[stages]:
            seen = rank[name]
            for vector in ("gradient", "vector"):
                torch.testing.assert_close(torch.tensor(seen[vector]), torch.tensor(wanted[vector]), rtol=0, atol=1e-6)
            assert seen["buffers"] == wanted["buffers"], "routers moved alike"
            assert seen["written"] == wanted["written"]
            assert seen["judged"] == pytest.approx(wanted["judged"], rel=1e-6)
            torch.testing.assert_close(
                torch.tensor(seen["average"]["vector"]), torch.tensor(wanted["average"]["vector"]), rtol=0, atol=1e-6
            )
            assert seen["average"]["judged"] == pytest.approx(wanted["average"]["judged"], rel=1e-6)
            for step, figures in enumerate(wanted["figures"]):
                assert seen["figures"][step] == pytest.approx(figures, rel=1e-5, abs=1e-6)


def test_both_schedules_add_up_to_the_very_same_gradient(found: dict[int, list[dict[str, Any]]]) -> None:
    for stages in (2, 3):
        for rank in found[stages]:
            assert rank["gpipe"] == rank["gpt"], "bit for bit"


def test_what_is_dropped_does_not_depend_on_the_number_of_stages(found: dict[int, list[dict[str, Any]]]) -> None:
    alone = torch.tensor(rank_processes.dropped(World()))
    for stages in (2, 3):
        for rank in found[stages]:
            torch.testing.assert_close(torch.tensor(rank["dropped"]), alone, rtol=0, atol=1e-6)


def test_gradients_are_those_of_torchs_own_pipeline(found: dict[int, list[dict[str, Any]]]) -> None:
    ours = found[2][0]["untied"]
    oracle = {name: value for rank in found[2] for name, value in rank["oracle"].items()}
    assert ours.keys() == oracle.keys()
    for name, value in oracle.items():
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(value), rtol=0, atol=1e-7)


def test_a_checkpoint_goes_on_in_any_number_of_stages_and_under_any_engine(found: dict[int, list[dict[str, Any]]]) -> None:
    single = rank_processes.with_moments(None, '{"kind": "single"}')
    wanted = [*rank_processes.losses_together(single, 0, 4)[2:], rank_processes.loss_of_average(single)]
    assert rank_processes.gone_on(rank_processes.with_moments(None, '{"kind": "single"}'), found[0][0]["folder"]) == pytest.approx(
        wanted, rel=1e-5
    )
    for stages in (2, 3):
        for rank in found[stages]:
            assert rank["gone on"] == pytest.approx(wanted, rel=1e-5)


# --- models of Hugging Face, in one process ----------------------------------------------------------------


def test_a_model_of_hugging_face_in_stages_has_the_gradients_of_the_whole() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=3, n_head=2, vocab_size=40, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    whole = HuggingFace(transformers.GPT2LMHeadModel(config)).train()
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    models = [partial_model(copy.deepcopy(whole), first, last, 3) for first, last in ((0, 1), (1, 3))]
    first, last = models
    x = first.through(ids)
    received = x.detach().requires_grad_()
    last.travel.receive = returning(received)
    logits = last(ids)
    logits.square().mean().backward()
    x.backward(received.grad)
    expected = whole(ids)
    assert torch.equal(logits, expected)
    expected.square().mean().backward()
    check_slopes(whole, models)


def returning(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: value


def check_slopes(whole: torch.nn.Module, models: list[PartialModel]) -> None:
    """Every parameter belongs to one stage, and a tied one's gradients add up."""
    first, last = models
    assert first.tied is not None
    assert last.tied is not None
    assert first.tied.grad is not None
    assert last.tied.grad is not None
    first.tied.grad += last.tied.grad
    slopes = {name: one.grad for model in models for name, one in model.named_parameters()}
    assert list(slopes) == [name for name, _ in whole.named_parameters()]
    for name, one in whole.named_parameters():
        torch.testing.assert_close(slopes[name], one.grad, rtol=0, atol=1e-7)


def test_a_stage_keeps_nothing_of_the_layers_that_others_have() -> None:
    run = rank_processes.run_of({"kind": "single"})
    run = run.replace(model=resolve_data({"model": rank_processes.DEEP_MIXTURE}, name="test", dialect="shoal", environ={}).run.model)
    whole = build_models(run, DataShapes(vocab_size=61))["model"]
    others = [weakref.ref(one) for one in whole.get_submodule("blocks.2").parameters()]
    part = partial_model(whole, 1, 2, 3)
    del whole
    gc.collect()
    assert [name for name, _ in part.named_parameters() if not name.startswith("blocks.1.")] == []
    assert not any(one() is not None for one in others)
