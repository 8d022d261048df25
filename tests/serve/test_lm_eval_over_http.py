"""lm-eval's `local-completions` on a server gives the log-likelihoods that its `hf` model gives on the same folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.load import parse_override
from shoal.serve.load_model import open_served
from tests.support.chat_folders import write_tokenizer
from tests.support.small_service import running

pytestmark = pytest.mark.long
transformers = pytest.importorskip("transformers")
instance = pytest.importorskip("lm_eval.api.instance", reason="needs lm-eval: pip install 'lm-eval[api]'")
TEXTS = [
    "Once upon a time, there was a little girl named Lily. She loved to play in the park with her friends.",
    "Tom and Ann saw a big dog. The dog ran after the ball and jumped into the water.",
    "One day, a bird wanted to fly to the sun. Its mother said that it was too far away.",
    "The boy was sad because his toy was broken. His father helped him to make a new one.",
]


def asked() -> list[Any]:
    """500 ends of texts after their beginnings."""
    draw, words = random.Random(0), " ".join(TEXTS).split(" ")
    drawn = [(draw.choices(words, k=draw.randint(1, 25)), draw.choices(words, k=draw.randint(1, 6))) for _ in range(500)]
    return [instance.Instance("loglikelihood", {}, (" ".join(before), " " + " ".join(end)), 0) for before, end in drawn]


def write_model(folder: Path, family: str) -> None:
    """A small random Llama and a tokenizer."""
    write_tokenizer(folder, family)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(folder))
    config = transformers.LlamaConfig(vocab_size=vocabulary, max_position_embeddings=256, **sizes)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(folder)


@pytest.mark.parametrize(("family", "batch_size"), [("llama3", 1), ("qwen25", 20)])
def test_lm_eval_scores_texts_over_http_as_in_its_own_process(family: str, batch_size: int, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    folder = tmp_path / "small"
    write_model(folder, family)
    expected = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1).loglikelihood(asked(), disable_tqdm=True)
    with running(open_served([str(folder)], [parse_override("training.device=cpu")], lambda text: None)) as service:
        address = f"http://127.0.0.1:{service.ports[0]}/v1/completions"
        has_start = family == "llama3"  # lm-eval puts the token that a text begins with there by itself for `hf` alone
        settings = {"tokenizer": str(folder), "max_length": 256, "batch_size": batch_size, "add_bos_token": has_start}
        api = LocalCompletionsAPI(address, model="small", **settings)
        found = api.loglikelihood(asked(), disable_tqdm=True)
    assert len(found) == 500
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
