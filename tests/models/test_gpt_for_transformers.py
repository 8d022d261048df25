"""Shoal's own GPT as a model of transformers: the same logits, and refused where none computes the same."""

from __future__ import annotations

import pytest
import torch

from shoal.config.schema import model as schema
from shoal.data.text.tokenizers.for_transformers import save_for_transformers
from shoal.data.text.tokenizers.own import ByteTokenizer, CharacterTokenizer
from shoal.errors import ShoalError
from shoal.models.gpt import Gpt
from shoal.models.huggingface.from_gpt import as_transformers

transformers = pytest.importorskip("transformers")
LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms"}


def shaken(**settings) -> tuple[Gpt, schema.Gpt]:
    chosen = schema.Gpt(**{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 24, **settings})
    torch.manual_seed(1)
    model = Gpt(chosen, 31).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model, chosen


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", LLAMA | {"bias": False, "num_kv_heads": 2, "intermediate_size": 40}),
        ("llama", LLAMA | {"bias": True, "tied_embeddings": False, "norm_eps": 1e-3}),
        ("gpt_neox", {"positions": "rotary"}),
        ("gpt_neox", {"positions": "rotary", "bias": False, "tied_embeddings": False, "intermediate_size": 40, "norm_eps": 1e-3}),
        ("gpt2", {"dropout": 0.1}),
        ("gpt2", {"bias": False, "tied_embeddings": False, "intermediate_size": 40, "norm_eps": 1e-3}),
    ],
)
@torch.inference_mode()
def test_transformers_computes_the_same_logits_from_the_folder(tmp_path, family, settings):
    model, chosen = shaken(**settings)
    as_transformers(model, chosen, 30).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False).eval()
    assert theirs.config.model_type == family
    assert theirs.generation_config.eos_token_id == 30
    ids_BL = torch.randint(0, 31, (3, 24))
    torch.testing.assert_close(theirs(ids_BL).logits, model(ids_BL), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({"positions": "rotary", "norm": "rms"}, ["Llama has no feed_forward gelu;", "GPT-2 has no positions rotary and no norm rms"]),
        ({"num_kv_heads": 2}, ["GPT-2 has no num_kv_heads 2"]),
    ],
)
def test_what_none_computes_is_refused_with_the_reason(settings, reasons):
    with pytest.raises(ShoalError) as refused:
        as_transformers(*shaken(**settings), None)
    assert all(reason in str(refused.value) for reason in reasons)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharacterTokenizer("añ€ \n\t🙂.")], ids=["bytes", "characters"])
def test_transformers_reads_our_own_tokenizers_to_the_same_ids(tmp_path, tokenizer):
    save_for_transformers(tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "a ñ€\n\n\t🙂  . "
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eos_id
