"""Models of transformers from local folders: the same numbers, the same generation, and plain words for what is missing."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal.config.load import resolve_data
from shoal.config.schema import Run
from shoal.config.schema import model as schema
from shoal.config.schema.data import Data
from shoal.config.schema.serving import Decoding
from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.models import build, generate
from shoal.models.generation.batch_sampling import sample
from shoal.models.generation.decoding import group_draws
from shoal.models.huggingface.model import HuggingFace as HuggingFaceModel
from shoal.models.layers.value_head import ScoreModel
from shoal.runs.rlhf.rollouts import RolloutFeed, RolloutPrompt
from shoal.tasks import build as build_task
from shoal.tasks.answer_logprobs import as_text, as_used, log_probs
from shoal.untrusted import huggingface

transformers = pytest.importorskip("transformers")
GREEDY = Decoding(active="greedy")


@pytest.fixture(scope="module", autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def make(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    else:
        config = transformers.LlamaConfig(
            eos_token_id=None,
            vocab_size=40,
            max_position_embeddings=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("one")
    make("gpt2").save_pretrained(path)
    return path


def built(shapes, folder: Path, seed: int = 42, sequence_length: int = 32, vocab_size: int = 40, **settings: object) -> torch.nn.Module:
    settings = {"layers": "original"} | settings
    run = Run(model=schema.HuggingFace(pretrained=str(folder), **settings), data=Data(sequence_length=sequence_length), seed=seed)
    return build(run, shapes(vocab_size=vocab_size))["model"]


def prompt(rows: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(3))


def check_recomputed(model: torch.nn.Module, steps: int) -> None:
    """Each token is what the model says with no cache, of all it may see."""
    seen = prompt()
    for token in generate(model, seen, max_new_tokens=steps, decoding=GREEDY):
        with torch.no_grad():
            assert torch.equal(model(seen)[:, -1].argmax(-1), token)
        if seen.shape[1] == model.max_seq_len:
            seen = seen[:, 1 - model.max_seq_len // 2 :]
        seen = torch.cat([seen, token[:, None]], dim=1)


def test_logits_are_the_models_own(shapes, folder):
    model = built(shapes, folder).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model.inner) is type(theirs)
    assert torch.equal(model(prompt()), theirs(prompt()).logits)
    assert (model.vocab_size, model.max_seq_len) == (40, 32)


def test_generation_equals_transformers_and_costs_one_token_each(shapes, folder):
    model = built(shapes, folder).eval()
    counts: list[int] = []
    model.inner.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].shape[1]))
    found = torch.stack(list(generate(model, prompt(), max_new_tokens=20, decoding=GREEDY)), dim=1)
    assert counts == [6] + [1] * 19
    theirs = transformers.GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = model.inner.generate(prompt(), attention_mask=torch.ones_like(prompt()), generation_config=theirs)
    assert torch.equal(found, expected[:, 6:])


def test_generation_slides_past_the_longest_sequence(shapes, folder):
    check_recomputed(built(shapes, folder).eval(), steps=50)


def test_state_space_models_generate_too():
    from shoal.models.huggingface.model import HuggingFace

    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4)
    check_recomputed(HuggingFace(transformers.MambaForCausalLM(config)).eval(), steps=12)


def test_a_cache_forgets_its_last_tokens(shapes, folder):
    model, ids = built(shapes, folder), prompt(1, 9)
    cache = model.new_cache(0)
    with torch.no_grad():
        model.next_logits(ids[:, :6], cache)
        first = model.next_logits(ids[:, 6:], cache)
        cache.crop(6)
        again = model.next_logits(ids[:, 6:], cache)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_left_padding_changes_nothing(shapes, folder):
    model = built(shapes, folder).eval()
    row, mask = prompt(1, 5), F.pad(torch.ones(1, 5, dtype=torch.long), (4, 0))
    with torch.no_grad():
        padded = model(F.pad(row, (4, 0)), attention_mask=mask)[:, 4:]
        torch.testing.assert_close(padded, model(row), atol=1e-5, rtol=0)


def test_weights_are_trained_in_float32(shapes, tmp_path):
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    for from_scratch in (False, True):
        model = built(shapes, tmp_path, from_scratch=from_scratch)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_from_scratch_follows_the_seed(shapes, gpt2):
    def first(seed: int) -> torch.Tensor:
        torch.manual_seed(seed + 100)
        return built(shapes, gpt2, seed=seed, from_scratch=True).inner.get_input_embeddings().weight

    pretrained = built(shapes, gpt2).inner.get_input_embeddings().weight
    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))
    assert not torch.equal(first(1), pretrained)


def test_weights_from_another_folder(shapes, gpt2, tmp_path):
    other = make("gpt2")
    with torch.no_grad():
        other.transformer.wte.weight.mul_(2)
    other.save_pretrained(tmp_path)
    model = built(shapes, gpt2, weights=str(tmp_path))
    assert torch.equal(model.inner.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_checkpointed_gradients_are_the_same(shapes, folder):
    model = built(shapes, folder)
    calls: list[int] = []
    norm = model.inner.get_submodule(
        "transformer.h.0.ln_1" if "transformer" in dict(model.inner.named_children()) else "model.layers.0.input_layernorm"
    )
    norm.register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model.gradient_checkpointing(checkpointing)
        model.train().zero_grad()
        F.cross_entropy(model(prompt()[:, :-1]).flatten(0, 1), prompt()[:, 1:].flatten()).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain, again = gradients(False), gradients(True)
    assert len(calls) == 3
    for expected, found in zip(plain, again, strict=True):
        torch.testing.assert_close(found, expected)
    gradients(False)
    assert len(calls) == 4


# --- LoRA ---------------------------------------------------------------------------------------------------------------


def test_lora_trains_little_and_starts_at_the_model(shapes, folder):
    pytest.importorskip("peft")
    plain = built(shapes, folder).eval()
    model = built(shapes, folder, lora=schema.Lora(rank=3, alpha=6.0)).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert 0 < sum(parameter.numel() for parameter in trained) < 0.2 * sum(parameter.numel() for parameter in plain.parameters())
    assert all(3 in parameter.shape for parameter in trained)
    torch.testing.assert_close(model(prompt()), plain(prompt()))
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(1.0)
    assert not torch.allclose(model(prompt()), plain(prompt()))
    check_recomputed(model, steps=5)


@pytest.mark.parametrize("variant", [{"rslora": True}, {"dora": True}, {"rslora": True, "dora": True}], ids=["rslora", "dora", "both"])
def test_variants_of_lora_are_those_of_peft(shapes, folder, tmp_path, variant):
    peft = pytest.importorskip("peft")
    plain = built(shapes, folder).eval()
    model = built(shapes, folder, lora=schema.Lora(rank=4, alpha=6.0, **variant)).eval()
    torch.testing.assert_close(model(prompt()), plain(prompt()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * parameter.requires_grad)
    model.save_adapters(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (saved["use_rslora"], saved["use_dora"]) == (variant.get("rslora", False), variant.get("dora", False))
    expected = peft.PeftModel.from_pretrained(plain.inner, tmp_path).eval()(prompt()).logits
    torch.testing.assert_close(model(prompt()), expected)
    ordinary = built(shapes, folder, lora=schema.Lora(rank=4, alpha=6.0)).eval()
    with torch.no_grad():
        given = dict(model.named_parameters())
        for name, parameter in ordinary.named_parameters():
            parameter.copy_(given[name])
    assert not torch.allclose(ordinary(prompt()), expected)
    torch.testing.assert_close(HuggingFaceModel(model.merged())(prompt()), expected, rtol=1e-4, atol=1e-4)


def test_lora_goes_where_it_is_told(shapes, gpt2):
    pytest.importorskip("peft")
    model = built(shapes, gpt2, lora=schema.Lora(target_modules=("c_fc",)))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 4
    assert all("c_fc" in name for name in names)


def test_lora_on_unknown_layers_is_refused(shapes, gpt2):
    pytest.importorskip("peft")
    with pytest.raises(ShoalError, match=r"model.lora.target_modules: .*not found.*layers of this model: c_attn, c_fc, c_proj"):
        built(shapes, gpt2, lora=schema.Lora(target_modules=("attn_query",)))


def test_lora_without_peft_is_refused(shapes, gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ShoalError, match=r"model.lora needs peft: pip install peft"):
        built(shapes, gpt2, lora=schema.Lora())


# --- refusals -----------------------------------------------------------------------------------------------------------


def test_without_transformers(shapes, gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ShoalError, match=r"need transformers: pip install 'shoal\[hf\]'"):
        built(shapes, gpt2)


def test_number_of_layers_is_checked(shapes, folder):
    assert built(shapes, folder, num_layers=2)
    with pytest.raises(ShoalError, match=r"model.num_layers is 12, but .* has 2 layers"):
        built(shapes, folder, num_layers=12)


def test_the_tokenizer_must_fit(shapes, gpt2):
    with pytest.raises(ShoalError, match=r"model.pretrained: .* knows 40 tokens, but the tokenizer \(data.tokenizer\) has 41"):
        built(shapes, gpt2, vocab_size=41)


def test_sequences_must_fit(shapes, gpt2):
    with pytest.raises(ShoalError, match=r"data.sequence_length is 33, but the model .* takes 32 tokens"):
        built(shapes, gpt2, sequence_length=33)


def test_no_network_says_what_to_put_where(shapes, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ShoalError,
        match=r"model.pretrained: nobody/nothing is no folder here.*put config.json, model.safetensors .* set model.pretrained to its path",
    ):
        built(shapes, Path("nobody/nothing"))


def test_a_folder_that_is_not_there(shapes, tmp_path):
    with pytest.raises(ShoalError, match=r"model.pretrained: .*there is nothing at .*missing"):
        built(shapes, tmp_path / "missing")


@pytest.mark.parametrize("config", ["{", "{}", '{"model_type": "t5"}'])
def test_a_folder_without_a_causal_model(shapes, tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ShoalError, match=r"model.pretrained: the folder .* does not give a causal language model: .*it needs config.json"):
        built(shapes, tmp_path, from_scratch=True)


def test_a_folder_without_weights(shapes, gpt2, tmp_path):
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    with pytest.raises(ShoalError, match=r"model.pretrained: the folder .*model.safetensors"):
        built(shapes, tmp_path)
    assert built(shapes, tmp_path, from_scratch=True)


def test_pickled_weights_are_refused(shapes, gpt2, tmp_path):
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    torch.save(make("gpt2").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ShoalError, match=r"model.pretrained: the folder .*safetensors"):
        built(shapes, tmp_path)


def test_damaged_weights_are_refused(shapes, gpt2, tmp_path):
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((gpt2 / "model.safetensors").read_bytes()[:500])
    with pytest.raises(ShoalError, match=r"model.pretrained: the folder "):
        built(shapes, tmp_path)


@pytest.mark.parametrize(("change", "message"), [({"n_layer": 3}, "lack 12 tensors"), ({"n_embd": 32}, "model.weights: the folder")])
def test_weights_of_another_shape_are_refused(shapes, gpt2, tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(json.loads((gpt2 / "config.json").read_text()) | change))
    with pytest.raises(ShoalError, match=message):
        built(shapes, tmp_path, weights=str(gpt2))


def test_a_model_without_a_cache_says_so():
    from shoal.models.huggingface.model import HuggingFace

    class Forgetful(torch.nn.Module):
        config = transformers.GPT2Config(vocab_size=40)

        def forward(self, input_ids: torch.Tensor) -> None: ...

    network = HuggingFace(Forgetful())
    network.register_parameter("nothing", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ShoalError, match=r"Forgetful .* has no KV cache"):
        list(generate(network, prompt(), max_new_tokens=1, decoding=GREEDY))


def test_a_score_is_read_from_the_hidden_states_and_exported_as_a_classifier(shapes, folder: Path, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    network = built(shapes, folder)
    hidden = network.hidden(ids)
    assert torch.allclose(network.inner.get_output_embeddings()(hidden), network(ids), atol=1e-5)
    padded, mask = torch.tensor([[1, 1, 5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    assert torch.allclose(network.hidden(padded, attention_mask=mask)[:, 2:], hidden, atol=1e-4)
    model = ScoreModel(network)
    torch.nn.init.normal_(model.head.weight)
    score = model(ids)[0, -1]
    model.save(tmp_path / "classifier")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    loaded.config.pad_token_id = 39
    assert torch.allclose(loaded(ids).logits[0, 0], score, atol=1e-4)


def test_answers_of_prompts_of_unequal_length_are_scored_as_they_were_drawn(shapes, folder: Path) -> None:
    network = built(shapes, folder)
    prompts = [[5, 6, 7], [8]]
    draws = group_draws(0, 0, prompts, 1)
    drawn = sample(network, prompts, max_new_tokens=4, temperature=0.8, draws=draws, eos_id=None, pad_id=0)
    with as_used(network), torch.no_grad():
        assert torch.allclose(log_probs(network, as_text(*drawn[:4]), 0.8)[:, -4:], drawn.log_probs_BT, atol=1e-4)


def test_a_policy_with_lora_learns_in_its_adapters_and_is_its_own_reference(shapes, folder: Path) -> None:
    """PPO with a value network; the weights below the adapters stay, and the reference is the model without them."""
    pytest.importorskip("peft")
    ppo = {"rollout_size": 8, "mini_batch_size": 4, "epochs": 1, "response_length": 4, "prompt_length": 3}
    model = {"kind": "huggingface", "pretrained": str(folder), "lora": {"rank": 2}}
    training = {"device": "cpu", "epochs": 1, "optimizer": {"learning_rate": 0.05}}
    run = resolve_data(
        {"model": model, "data": {"sequence_length": 16}, "training": training, "rlhf": {"ppo": ppo}},
        name="test",
        dialect="shoal",
        environ={},
    ).run
    players = build(run, shapes(vocab_size=40))
    task: Any = build_task(run, players, shapes(vocab_size=40))
    below = {name: value.clone() for name, value in players["model"].named_parameters() if not value.requires_grad}
    engine = SingleEngine(run, task, torch.device("cpu"), 4)
    asked = [RolloutPrompt([5, 6, 7], "a"), RolloutPrompt([8], "b")]
    feed = RolloutFeed(run, task, Numbers(), asked, asked, lambda some: [float(len(one.text)) for one in some], engine)
    before = feed.answered(asked, 0).drawn.log_probs_BT
    for _ in range(2):
        engine.step([next(feed)])
    assert feed.figures["kl"] == pytest.approx(0, abs=1e-4)
    after = feed.answered(asked, 0)
    assert not torch.equal(after.drawn.log_probs_BT, before), "it has learned"
    assert after.difference_BT.abs().max() > 1e-3
    assert set(engine.layouts) == {"model", "value"}
    for name, value in players["model"].named_parameters():
        assert value.requires_grad or torch.equal(value, below[name])


class Numbers:
    """A tokenizer whose text is the tokens' numbers."""

    eos_id, pad_id = None, 0

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_threads_that_load_models_at_once_leave_output_matrices_tied(tmp_path: Path) -> None:
    """Transformers replaces `tie_weights` of all models while it loads one."""
    shape = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    inside, most = [], []

    class Slow:
        """Loads a model, and sees which threads load one meanwhile."""

        @staticmethod
        def from_pretrained(name: str, **options: Any) -> Any:
            inside.append(name)
            most.append(len(inside))
            try:
                return transformers.AutoModelForCausalLM.from_pretrained(name, **options)
            finally:
                inside.pop()

    def load() -> None:
        huggingface._read(Slow, str(tmp_path), huggingface.read_config(str(tmp_path)), None)

    tie = transformers.PreTrainedModel.tie_weights
    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert transformers.PreTrainedModel.tie_weights is tie
