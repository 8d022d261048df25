"""What lm-eval asks of a model: log-probabilities of texts, and texts that are written greedily."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from shoal.cli.main import main
from shoal.config.schema.model import Gpt as Settings
from shoal.config.schema.serving import Decoding
from shoal.data.text.tokenizers.own import ByteTokenizer
from shoal.models.gpt import Gpt
from shoal.runs.lm_eval_tasks import TextScorer

LONGEST = 12


@pytest.fixture
def scorer() -> TextScorer:
    torch.manual_seed(0)
    model = Gpt(Settings(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=LONGEST), 257).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return TextScorer(model, ByteTokenizer(), Decoding())


@torch.inference_mode()
def expected(scorer: TextScorer, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One text alone, in float64."""
    ids = [*context, *continuation][-(LONGEST + 1) :]
    logits = scorer.network(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    count, target = min(len(continuation), len(ids) - 1), torch.tensor(ids[1:])
    chosen = logits.gather(1, target[:, None])[-count:]
    return float(chosen.sum()), bool((logits.argmax(1) == target)[-count:].all())


def test_scores_of_many_texts_are_those_of_each_alone(scorer: TextScorer) -> None:
    greedy = [int(scorer.network(torch.tensor([[5, 6]]))[0, -1].argmax())]
    asked = [([5, 6], greedy), ([1], [2, 3, 4]), (list(range(30)), [7, 8]), ([9], list(range(40, 70)))]
    for found, (context, continuation) in zip(scorer.score(asked), asked, strict=True):
        score, right = expected(scorer, context, continuation)
        assert found[0] == pytest.approx(score, abs=1e-4)
        assert found[1] == right
    assert scorer.score(asked)[0][1], "the id that greedy decoding gives"
    assert scorer.score([([3], [])]) == [(0.0, True)]


def test_a_whole_text_is_scored_in_pieces_that_fit(scorer: TextScorer) -> None:
    ids = scorer.tokenizer.encode("thirty letters of a whole text")
    pieces = [([scorer.first_id], ids[:12]), ([ids[11]], ids[12:24]), ([ids[23]], ids[24:])]
    assert scorer.score_text("thirty letters of a whole text") == pytest.approx(
        sum(expected(scorer, *piece)[0] for piece in pieces), abs=1e-4
    )


def test_a_written_text_ends_before_the_first_stop(scorer: TextScorer) -> None:
    whole = scorer.write("ab", {"max_gen_toks": 8})
    assert whole
    stop = whole[len(whole) // 2]
    assert scorer.write("ab", {"max_gen_toks": 8, "until": [stop]}) == whole[: whole.index(stop)]


def test_a_missing_lm_eval_is_told_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        pytest.skip("lm-eval is installed here")
    assert main(["eval", "nothing", "--tasks", "hellaswag"]) == 2
    assert "pip install lm-eval" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", "nothing", "--limit", "3"])
