"""Answers whose step is recorded and replayed are those that a model writes step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.generation import batch_sampling as sampling
from shoal.models.generation import rollout_decoding as paged
from shoal.models.generation.batch_sampling import SampledAnswers, sample
from shoal.models.generation.decoding import group_draws
from shoal.models.generation.paged_decoding import PagedDecoder
from shoal.models.gpt import Gpt
from shoal.models.huggingface.frozen_weights import store_frozen
from shoal.models.layers.value_head import add_value_head
from tests.serve.test_batching import hugging_face

VOCABULARY, LONGEST = 50, 64
PROMPTS = [[5, 6, 7, 8], [9], [3, 4], [1, 2, 3]]


def gpt(value: bool = False, device: str = "cpu", **sizes: Any) -> Gpt:
    """In double precision on the CPU, so that hardly ever two tokens are equally likely, and with weights that make some likely. The
    kernels of a GPU take no double precision."""
    torch.manual_seed(2)
    settings = schema.Gpt(hidden_size=64, num_layers=2, num_heads=4, max_seq_len=LONGEST, dropout=0.2, **sizes)
    model = Gpt(settings, VOCABULARY).to(device, torch.float64 if device == "cpu" else torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    if value:
        add_value_head(model, "head")
        torch.nn.init.normal_(model.value_head.weight)
        model.value_head.to(model.token_embedding.weight)
    return model


def answers(model: Gpt, prompts: list[list[int]] = PROMPTS, tokens: int = 40, eos_id: int | None = None) -> SampledAnswers:
    draws = group_draws(3, 0, prompts, 1)
    return sample(model, prompts, max_new_tokens=tokens, temperature=0.9, draws=draws, eos_id=eos_id, pad_id=0)


def same(one: SampledAnswers, other: SampledAnswers) -> None:
    assert torch.equal(one.answer_BT, other.answer_BT)
    assert torch.equal(one.real_BT, other.real_BT)
    assert torch.equal(one.stopped_B, other.stopped_B)
    assert torch.allclose(one.log_probs_BT, other.log_probs_BT, atol=1e-4)
    assert (one.values_BT is None) == (other.values_BT is None)
    if one.values_BT is not None and other.values_BT is not None:
        assert torch.allclose(one.values_BT, other.values_BT, rtol=1e-4, atol=1e-3)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """On the CPU the same steps are computed without recording."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return str(request.param)


def decoder(model: Any, rows: int, prompt: int, answer: int) -> paged.RolloutDecoder:
    """As `decoder_for`, on any device."""
    dtype = next(model.parameters()).dtype
    twin = paged.twin_of(model, dtype)
    assert twin is not None
    return paged.RolloutDecoder(model, twin, dtype, rows, prompt + answer)


def both(model: Any, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> tuple[SampledAnswers, SampledAnswers]:
    """The same answers, step by step and with paged caches."""
    monkeypatch.setattr(sampling, "decoder_for", lambda *_: None)
    plain = answers(model, **asked)
    monkeypatch.setattr(sampling, "decoder_for", decoder)
    return plain, answers(model, **asked)


@pytest.mark.parametrize("sizes", [{"positions": "learned"}, {"positions": "rotary", "norm": "rms", "num_kv_heads": 2}])
@pytest.mark.parametrize("prompts", [PROMPTS, [[1, 2, 3], [4, 5, 6]]], ids=["padded", "of one length"])
def test_memory_of_a_fixed_width_gives_what_a_cache_that_grows_gives(
    device: str, sizes: dict[str, Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt(True, device, **sizes)
    plain, again = both(model, monkeypatch, prompts=prompts)
    same(plain, again)
    assert len(again.answer_BT.unique()) > 10, "the model says many things"
    assert model.training, "the model is given back as it was"


def test_answers_that_end_by_themselves_end_where_they_would(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt(device=device)
    endless = answers(model)
    often = int(endless.answer_BT.flatten().mode().values)
    plain, again = both(model, monkeypatch, eos_id=often)
    same(plain, again)
    assert again.stopped_B.any()
    assert again.values_BT is None


def test_a_model_may_be_filled_to_its_end(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same(*both(gpt(device=device), monkeypatch, tokens=LONGEST - max(map(len, PROMPTS))))


def test_when_all_answers_have_ended_nothing_more_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = gpt(), list[int]()
    usual = PagedDecoder.step
    monkeypatch.setattr(PagedDecoder, "step", lambda self, slots, *given: rows.append(len(slots)) or usual(self, slots, *given))
    monkeypatch.setattr(sampling, "decoder_for", decoder)
    monkeypatch.setattr(paged, "_LOOK_EVERY", 4)
    endless = answers(model, [PROMPTS[1]]).answer_BT[0].tolist()
    ends = endless.index(endless[5])
    rows.clear()
    assert answers(model, [PROMPTS[1]], eos_id=endless[ends]).real_BT.sum() == ends + 1
    assert ends <= len(rows) <= ends + 4
    rows.clear()
    found = answers(model, PROMPTS, eos_id=endless[ends])
    assert rows[0] == len(PROMPTS)
    assert found.stopped_B.sum() >= 2
    assert rows[-1] <= 2, "answers that have ended leave the step"


def adapt(model: Any, modules: list[str]) -> None:
    """Give a model of Hugging Face LoRA matrices that change what it computes."""
    peft = pytest.importorskip("peft")
    model.inner = peft.get_peft_model(
        model.inner, peft.LoraConfig(r=2, target_modules=modules, init_lora_weights=False, fan_in_fan_out=modules[0] == "c_attn")
    )


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_of_hugging_face_writes_what_it_writes_step_by_step(kind: str, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = hugging_face(kind)
    if lora:
        adapt(model, ["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "down_proj"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    model = model.double().eval()
    prompts = [[token % 40 for token in prompt] for prompt in PROMPTS]
    plain, again = both(model, monkeypatch, prompts=prompts)
    same(plain, again)
    with torch.no_grad():
        [*model.parameters()][-1].add_(0.5)
    same(*both(model, monkeypatch, prompts=prompts))


def test_adapters_over_weights_in_few_bits_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("gpt2", "llama"):
        model: Any = hugging_face(kind).eval()
        store_frozen(model.inner, "int8")
        adapt(model, ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"])
        prompts = [[token % 40 for token in prompt] for prompt in PROMPTS]
        monkeypatch.setattr(sampling, "decoder_for", lambda *_: None)
        plain = answers(model, prompts, tokens=20)
        monkeypatch.setattr(sampling, "decoder_for", decoder_of_float32)
        same(plain, answers(model, prompts, tokens=20))


def decoder_of_float32(model: Any, rows: int, prompt: int, answer: int) -> paged.RolloutDecoder:
    twin = paged.twin_of(model, torch.float32)
    assert twin is not None
    return paged.RolloutDecoder(model, twin, torch.float32, rows, prompt + answer)


def test_a_copy_in_another_type_is_refreshed_with_every_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt(value=True).float()
    twin = paged.twin_of(model, torch.bfloat16)
    assert twin is not None
    assert twin.model is not model
    assert {one.dtype for name, one in twin.model.named_parameters() if "value_head" not in name} == {torch.bfloat16}
    assert twin.model.value_head.weight.dtype == torch.float32
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    twin.refresh()
    for ours, theirs in zip(twin.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))


def test_damaged_weights_are_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt(device=device)
    monkeypatch.setattr(sampling, "decoder_for", decoder)
    with torch.no_grad():
        model.token_embedding.weight[int(answers(model).answer_BT[0, 5])] = torch.nan
    with pytest.raises(ShoalError, match="not finite"):
        answers(model)


def test_only_models_on_a_gpu_are_recorded() -> None:
    assert paged.decoder_for(gpt(), 4, 10, 100) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_on_a_gpu_steps_are_recorded_once_and_give_the_probabilities_of_training(
    precision: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    settings = schema.Gpt(hidden_size=64, num_layers=2, num_heads=4, max_seq_len=LONGEST, dropout=0.2, positions="rotary")
    model, recorded = Gpt(settings, VOCABULARY).cuda(), list[tuple[Any, ...]]()
    usual = PagedDecoder.record
    monkeypatch.setattr(PagedDecoder, "record", lambda self, *given: recorded.append(given) or usual(self, *given))
    for turn in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
        with torch.autocast("cuda", dtype=precision, enabled=precision is not None):
            found = answers(model)
        text = torch.cat([found.prompt_BP, found.answer_BT], 1)
        mask = torch.cat([found.prompt_mask_BP, torch.ones_like(found.answer_BT, dtype=torch.bool)], 1)
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=precision, enabled=precision is not None):
            scores = model(text[:, :-1], attention_mask=mask[:, :-1])[:, 3:].float() / 0.9
        model.train()
        expected = scores.log_softmax(-1).gather(2, found.answer_BT[..., None]).squeeze(2)
        assert torch.allclose(found.log_probs_BT, expected, atol=1e-3 if precision is None else 0.1), turn
    assert len(recorded) == 2, "as it is, and compiled"
