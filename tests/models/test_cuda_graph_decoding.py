"""Answers whose step is recorded and replayed are those that a model writes step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.generation import batch_sampling as sampling
from shoal.models.generation import cuda_graph_decoding as recorded
from shoal.models.generation.batch_sampling import SampledAnswers, sample
from shoal.models.generation.decoding import group_draws
from shoal.models.gpt import Gpt
from shoal.models.layers.value_head import add_value_head

VOCABULARY, LONGEST = 50, 64
PROMPTS = [[5, 6, 7, 8], [9], [3, 4], [1, 2, 3]]


def gpt(value: bool = False, **sizes: Any) -> Gpt:
    """In double precision, so that hardly ever two tokens are equally likely, and with weights that make some of them likely."""
    torch.manual_seed(2)
    settings = schema.Gpt(hidden_size=16, num_layers=2, num_heads=4, max_seq_len=LONGEST, dropout=0.2, **sizes)
    model = Gpt(settings, VOCABULARY).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    if value:
        add_value_head(model, "head")
        torch.nn.init.normal_(model.value_head.weight)
        model.value_head.double()
    return model


def answers(model: Gpt, prompts: list[list[int]] = PROMPTS, tokens: int = 40, eos_id: int | None = None) -> SampledAnswers:
    draws = group_draws(3, 0, prompts, 1)
    return sample(model, prompts, max_new_tokens=tokens, temperature=0.9, draws=draws, eos_id=eos_id, pad_id=0)


def same(one: SampledAnswers, other: SampledAnswers) -> None:
    assert torch.equal(one.answer_BT, other.answer_BT)
    assert torch.equal(one.real_BT, other.real_BT)
    assert torch.equal(one.stopped_B, other.stopped_B)
    assert torch.allclose(one.log_probs_BT, other.log_probs_BT, atol=1e-5)
    assert (one.values_BT is None) == (other.values_BT is None)
    if one.values_BT is not None and other.values_BT is not None:
        assert torch.allclose(one.values_BT, other.values_BT, atol=1e-5)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On the CPU the same steps are taken in memory of a fixed width, and not recorded."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    monkeypatch.setattr(recorded, "_WIDTH", 24)
    return str(request.param)


def both(model: Gpt, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> tuple[SampledAnswers, SampledAnswers]:
    """The same answers, from a cache that grows and from one of a fixed width."""
    monkeypatch.setattr(sampling, "can_record", lambda *_: False)
    plain = answers(model, **asked)
    monkeypatch.setattr(sampling, "can_record", lambda *_: True)
    return plain, answers(model, **asked)


@pytest.mark.parametrize("sizes", [{"positions": "learned"}, {"positions": "rotary", "norm": "rms", "num_kv_heads": 2}])
@pytest.mark.parametrize("prompts", [PROMPTS, [[1, 2, 3], [4, 5, 6]]], ids=["padded", "of one length"])
def test_memory_of_a_fixed_width_gives_what_a_cache_that_grows_gives(
    device: str, sizes: dict[str, Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt(value=True, **sizes).to(device)
    plain, again = both(model, monkeypatch, prompts=prompts)
    same(plain, again)
    assert len(again.answer_BT.unique()) > 10, "the model says many things"
    assert model.training, "the model is given back as it was"


def test_answers_that_end_by_themselves_end_where_they_would(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt().to(device)
    endless = answers(model)
    often = int(endless.answer_BT.flatten().mode().values)
    plain, again = both(model, monkeypatch, eos_id=often)
    same(plain, again)
    assert again.stopped_B.any()
    assert again.values_BT is None


def test_a_model_may_be_filled_to_its_end(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same(*both(gpt().to(device), monkeypatch, tokens=LONGEST - max(map(len, PROMPTS))))


def test_when_all_answers_have_ended_nothing_more_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = gpt(), list[int]()
    usual = model.next_logits
    monkeypatch.setattr(model, "next_logits", lambda ids, *given, **more: steps.append(1) or usual(ids, *given, **more))
    monkeypatch.setattr(sampling, "can_record", lambda *_: True)
    monkeypatch.setattr(recorded, "_LOOK_EVERY", 4)
    endless = answers(model, [PROMPTS[1]]).answer_BT[0].tolist()
    ends = endless.index(endless[5])
    steps.clear()
    assert answers(model, [PROMPTS[1]], eos_id=endless[ends]).real_BT.sum() == ends + 1
    assert ends + 1 <= len(steps) <= ends + 1 + 4


def test_damaged_weights_are_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt().to(device)
    monkeypatch.setattr(sampling, "can_record", lambda *_: True)
    with torch.no_grad():
        model.token_embedding.weight[int(answers(model).answer_BT[0, 5])] = torch.nan
    with pytest.raises(ShoalError, match="not finite"):
        answers(model)


def test_only_a_whole_gpt_on_a_gpu_is_recorded() -> None:
    assert not recorded.can_record(gpt(), 100)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_on_a_gpu_a_step_is_asked_for_once(precision: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = gpt().float().cuda(), list[int]()
    usual = model.next_logits
    monkeypatch.setattr(model, "next_logits", lambda ids, *given, **more: steps.append(1) or usual(ids, *given, **more))
    with torch.autocast("cuda", dtype=precision, enabled=precision is not None):
        found = answers(model)
    assert len(steps) == 3, "the prompts, the first step, and its recording"
    text = torch.cat([found.prompt_BP, found.answer_BT], 1)
    mask = torch.cat([found.prompt_mask_BP, torch.ones_like(found.answer_BT, dtype=torch.bool)], 1)
    with torch.no_grad(), torch.autocast("cuda", dtype=precision, enabled=precision is not None):
        scores = model.eval()(text[:, :-1], attention_mask=mask[:, :-1])[:, 3:].float() / 0.9
    expected = scores.log_softmax(-1).gather(2, found.answer_BT[..., None]).squeeze(2)
    assert torch.allclose(found.log_probs_BT, expected, atol=1e-3 if precision is None else 0.3)
