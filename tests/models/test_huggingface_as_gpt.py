"""Models of Hugging Face by our own layers: the same logits, and only where that is so; and products that are made quicker."""

from __future__ import annotations

import pytest
import torch

from shoal.models.gpt import Gpt
from shoal.models.huggingface.as_gpt import gpt_conversion
from shoal.models.huggingface.model import HuggingFace
from shoal.models.kernels.cpu_packing import PackedProduct, pack_matrices

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}
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
