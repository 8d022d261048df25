"""Reward models as transformers has them: classifiers of sequences, loaded from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.load import resolve_data
from shoal.config.schema.rlhf import ClassifierReward
from shoal.errors import ShoalError
from shoal.runs.rlhf.rewards.interface import Answer

transformers = pytest.importorskip("transformers", reason="reward models of transformers need transformers: pip install 'shoal[hf]'")
RUN = resolve_data({"model": {"kind": "gpt"}, "training": {"device": "cpu"}, "rlhf": {}}, name="test", dialect="shoal", environ={}).run
WORDS = ["[UNK]", "<end>", "is", "it", "good", "bad", "very"]


def saved(folder: Path, labels: int) -> Any:
    """A tiny classifier with a tokenizer of words that has no padding."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=16, n_embd=8, n_layer=1, n_head=2, num_labels=labels, pad_token_id=1
    )
    model = transformers.GPT2ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="<end>").save_pretrained(folder)
    return model


def test_the_score_is_the_models_number_at_the_last_real_token_whoever_stands_beside(tmp_path: Path) -> None:
    model = saved(tmp_path, 1)
    reward = ClassifierReward(model=str(tmp_path))
    score = reward.builder()(reward, RUN)
    answers = [Answer("is it ", "good"), Answer("is it ", "very very very bad"), Answer("it ", "is")]
    together = score(answers)
    for answer, found in zip(answers, together, strict=True):
        ids = torch.tensor([[WORDS.index(word) for word in (answer.prompt + answer.text).split()]])
        assert found == pytest.approx(float(model(ids).logits[0, 0].detach()), abs=1e-5)
        assert found == pytest.approx(score([answer])[0], abs=1e-5)


def test_of_several_labels_one_must_be_named(tmp_path: Path) -> None:
    model = saved(tmp_path, 3)
    reward = ClassifierReward(model=str(tmp_path), label=2)
    ids = torch.tensor([[2, 3, 4]])
    expected = float(model(ids).logits[0].log_softmax(-1)[2].detach())
    assert reward.builder()(reward, RUN)([Answer("is it ", "good")])[0] == pytest.approx(expected, abs=1e-5)
    for wrong in (ClassifierReward(model=str(tmp_path)), ClassifierReward(model=str(tmp_path), label=3)):
        with pytest.raises(ShoalError, match="has 3 labels"):
            wrong.builder()(wrong, RUN)
    nowhere = ClassifierReward(model=str(tmp_path / "nowhere"))
    with pytest.raises(ShoalError, match="cannot be loaded as a classifier"):
        nowhere.builder()(nowhere, RUN)


def test_a_text_that_is_too_long_is_cut_where_positions_begin_at_the_padding(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 10}
    config = transformers.RobertaConfig(vocab_size=len(WORDS), **sizes, num_labels=1, pad_token_id=1)
    model = transformers.RobertaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    reward = ClassifierReward(model=str(tmp_path))
    (found,) = reward.builder()(reward, RUN)([Answer("is it very very very very ", "very very very good bad")])
    ids = torch.tensor([[WORDS.index(word) for word in (*["very"] * 6, "good", "bad")]])
    assert found == pytest.approx(float(model(ids).logits[0, 0].detach()), abs=1e-5), "the last 8 words: positions 0 and 1 are not used"
