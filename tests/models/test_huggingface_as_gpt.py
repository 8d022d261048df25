"""Models of Hugging Face by our own layers: the same logits, and only where that is so; and products that are made quicker."""

from __future__ import annotations

import pytest
import torch

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.models import build
from shoal.models.gpt import Gpt
from shoal.models.huggingface.as_gpt import as_huggingface, gpt_conversion, weights_for
from shoal.models.huggingface.model import HuggingFace
from shoal.models.kernels.cpu_packing import PackedProduct, pack_matrices
from shoal.tasks.language import LanguageModelling

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def made(kind: str, **settings) -> HuggingFace:
    torch.manual_seed(2)
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = HuggingFace(
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SIZES, **none, **settings))
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
        ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
        ("mistral", {"sliding_window": None, "num_key_value_heads": 2}),
        ("llama", {"head_dim": 16}),
        ("qwen2", {"num_key_value_heads": 2}),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
        ("gemma", {"num_key_value_heads": 1, "head_dim": 16}),
        ("gpt2", {}),
    ],
)
@torch.inference_mode()
def test_our_layers_give_the_logits_of_the_models_own(kind, settings):
    model = made(kind, **settings)
    found = gpt_conversion(model)
    assert found is not None
    ours, ids_BL = found.convert(model.state_dict().__getitem__), torch.randint(0, 50, (2, 40))
    torch.testing.assert_close(ours(ids_BL), model(ids_BL), atol=1e-4, rtol=1e-5)
    cache = ours.new_cache(0)
    pieces = [ours(ids_BL[:, :30], cache=cache), ours(ids_BL[:, 30:], cache=cache)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids_BL), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"attention_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("gemma2", {"head_dim": 8}),
        ("gemma3_text", {"head_dim": 8}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("mistral", {"sliding_window": 5}),
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("opt", {}),
    ],
)
def test_a_model_that_computes_otherwise_keeps_its_own_layers(kind, settings):
    assert gpt_conversion(made(kind, **settings)) is None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16, "num_key_value_heads": 2}),
        ("gpt2", NO_DROPOUT),
    ],
)
def test_both_kinds_of_layers_learn_the_same_and_are_written_by_the_same_names(tmp_path, kind, settings):
    made(kind, **settings).inner.save_pretrained(tmp_path)
    batch = {"input_ids": torch.arange(48).view(4, 12) % 50, "labels": (torch.arange(48).view(4, 12) + 1) % 50}
    losses, weights = {}, {}
    for layers in ("own", "original"):
        engine = learner(tmp_path, layers, "SGD")  # Adam makes steps of the rounding errors of gradients that are 0
        losses[layers] = [float(engine.step([batch]).metrics["loss"]) for _ in range(4)]
        model = engine.task.players["model"]
        assert isinstance(model, Gpt if layers == "own" else HuggingFace)
        weights[layers] = (as_huggingface(model) if layers == "own" else model).state_dict()
    assert losses["own"] == pytest.approx(losses["original"], rel=1e-5)
    assert losses["own"][-1] < losses["own"][0]
    assert weights["own"].keys() == weights["original"].keys()
    for name, value in weights["own"].items():
        torch.testing.assert_close(value, weights["original"][name], atol=2e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def learner(folder, layers: str, optimizer: str = "AdamW") -> SingleEngine:
    settings = {
        "model": {"kind": "huggingface", "pretrained": str(folder), "layers": layers},
        "training": {"device": "cpu", "optimizer": {"name": optimizer, "learning_rate": 1e-3}},
    }
    run = resolve_data(settings, name="test", dialect="shoal", environ={}).run
    return SingleEngine(run, LanguageModelling(build(run, DataShapes(vocab_size=50))), torch.device("cpu"), 10)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gpt2"])
def test_weights_are_found_by_the_names_of_either_kind_of_layers(kind):
    model = made(kind)
    theirs = dict(model.named_parameters()) | {"head.weight": torch.ones(1)}
    ours = gpt_conversion(model).convert(model.state_dict().__getitem__)
    by_our_names = weights_for(ours, theirs)
    assert {"token_embedding.weight", "head.weight"} <= by_our_names.keys()
    back = weights_for(model, by_our_names)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], value) for name, value in theirs.items())
    assert weights_for(model, theirs) is theirs


def test_layers_that_would_learn_otherwise_are_kept_or_refused(tmp_path):
    made("gpt2", embd_pdrop=0.0).inner.save_pretrained(tmp_path / "uneven")
    made("llama").inner.save_pretrained(tmp_path / "llama")
    assert isinstance(learner(tmp_path / "uneven", "auto").task.players["model"], HuggingFace)
    assert isinstance(learner(tmp_path / "llama", "auto", "Muon").task.players["model"], HuggingFace), "it steps whole matrices"
    assert isinstance(learner(tmp_path / "llama", "auto").task.players["model"], Gpt)
    with pytest.raises(ShoalError, match=r"model\.layers: .* do not compute the same as GPT2LMHeadModel in training"):
        learner(tmp_path / "uneven", "own")


@torch.inference_mode()
def test_a_packed_product_is_the_plain_one_for_any_number_of_rows(monkeypatch):
    from shoal.config.schema import model as schema

    monkeypatch.setattr("shoal.models.kernels.cpu_packing._SMALLEST", 1)
    monkeypatch.setattr("shoal.models.kernels.cpu_packing._is_quicker", lambda weight: True)
    torch.manual_seed(1)
    for tied in (True, False):
        settings = schema.Gpt(hidden_size=32, num_layers=2, num_heads=4, tied_embeddings=tied)
        model = Gpt(settings, 60).eval()
        several, one = torch.randint(0, 60, (3, 5)), torch.tensor([[7]])
        plain = model(several), model(one)
        assert not pack_matrices(model, room_bytes=1e4)
        assert pack_matrices(model, room_bytes=1e9)
        assert isinstance(model.packed_output, PackedProduct)
        torch.testing.assert_close((model(several), model(one)), plain, atol=1e-5, rtol=1e-5)
        assert list(model.state_dict()) == list(
            Gpt(schema.Gpt(hidden_size=32, num_layers=2, num_heads=4, tied_embeddings=tied), 60).state_dict()
        )
