"""Answers of models that read: what is found, given and remembered is the same for a row in a batch, for a pass over it, and alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.config.schema.model import CrossAttention, EpisodicMemory, Experts, Retrieval
from shoal.models.generation.batch_sampling import SampledAnswers, sample
from shoal.models.generation.decoding import group_draws
from shoal.models.generation.side_texts import SideTexts, make_side_texts, side_text_columns
from shoal.models.layers.cross_attention import ContextEncoder, WithCrossAttention
from shoal.models.layers.value_head import ScoreModel
from shoal.models.moe import Moe
from shoal.tasks.answer_logprobs import PromptAnswers, as_text, as_used, given_to, log_probs

CHUNK, LENGTH = 4, 13
PROMPTS = [[5, 6, 7, 8, 9, 10], [9], [3, 4, 2], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
CONTEXTS = [[7, 7, 7], [], [4], [1, 2, 3, 4, 5]]
SMALL = schema.Moe(hidden_size=32, num_layers=4, num_heads=4, intermediate_size=24, max_seq_len=32).replace(
    experts=Experts(count=4, capacity_factor=None)
)
CROSS = {"cross_attention": CrossAttention(enabled=True, every_layers=1)}
RETRIEVAL = {"retrieval": Retrieval(enabled=True, chunk_size=CHUNK, passage_tokens=6)}
MEMORY = {"episodic_memory": EpisodicMemory(enabled=True, capacity=5, chunk_size=CHUNK, top_k=2, vectors=2)}
FEATURES = {"context": CROSS, "retrieval": RETRIEVAL, "memory": MEMORY, "all": CROSS | RETRIEVAL | MEMORY}


class Turned:
    """Finds for a chunk the chunk itself turned round, and a number for the documents that are left out."""

    chunk_size = CHUNK

    def text_columns(self, texts: Sequence[Sequence[int]], own: Sequence[Sequence[str]], starts: Sequence[int]) -> dict[str, Tensor]:
        chunks = max(1, (max(map(len, texts)) - 1) // CHUNK)
        ids, first = torch.full((len(texts), chunks, CHUNK + 1), -1), torch.zeros(len(texts), chunks).long()
        for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
            for number in range(chunks):
                first[row, number] = start + (number + 1) * CHUNK
                if len(text) > (number + 1) * CHUNK:
                    ids[row, number] = torch.tensor([len(own[row]), *text[number * CHUNK : (number + 1) * CHUNK][::-1]])
        return {"passage_ids": ids, "passage_from": first}


def model_of(feature: str) -> Moe:
    torch.manual_seed(0)
    model = Moe(SMALL.replace(**FEATURES[feature]), 50)
    for part in model.modules():
        if isinstance(part, WithCrossAttention):
            part.gate.data.fill_(0.9)
    if model.memory is not None:
        model.memory.importance_N.fill_(1.0)
        model.memory.vectors_NVD.normal_()
        model.memory.ids_NT[0, :10] = torch.tensor(PROMPTS[3])  # an episode that began as a prompt does is not recalled
    return model


def beside_of(feature: str, rows: Sequence[int] = range(4)) -> SideTexts | None:
    finder = Turned() if feature in ("retrieval", "all") else None
    return make_side_texts(finder, [CONTEXTS[row] for row in rows] if feature in ("context", "all") else ())


def answers(model: Moe, beside: SideTexts | None, rows: Sequence[int] = range(4), eos_id: int | None = 49, **more: Any) -> SampledAnswers:
    """Answers to some of the prompts, each with the draws of its own."""
    draws = group_draws(3, 0, PROMPTS, 1)
    prompts, own = [PROMPTS[row] for row in rows], [draws[row] for row in rows]
    return sample(model, prompts, max_new_tokens=LENGTH, temperature=0.7, draws=own, eos_id=eos_id, pad_id=0, beside=beside, **more)


def text_of(drawn: SampledAnswers, beside: SideTexts | None) -> PromptAnswers:
    text = as_text(*drawn[:4])
    return text._replace(beside=side_text_columns(beside, text.input_ids_BL, text.mask_BL))


@pytest.mark.parametrize("feature", FEATURES)
def test_tokens_are_as_probable_when_they_are_drawn_as_in_a_pass_over_them_and_alone(feature: str) -> None:
    model, beside = model_of(feature), beside_of(feature)
    drawn = answers(model, beside)
    text = text_of(drawn, beside)
    with as_used(model), torch.no_grad():
        scored = log_probs(model, text, 0.7)[:, -LENGTH:]
        blind = log_probs(model, text._replace(beside={}), 0.7)[:, -LENGTH:] if beside else None
    torch.testing.assert_close(scored, drawn.log_probs_BT, rtol=0, atol=1e-4)
    for row in range(len(PROMPTS)):
        alone = answers(model, beside_of(feature, [row]), [row])
        assert torch.equal(alone.answer_BT[0], drawn.answer_BT[row])
        torch.testing.assert_close(alone.log_probs_BT[0], drawn.log_probs_BT[row], rtol=0, atol=1e-4)
    if blind is not None:
        assert not torch.allclose(blind, scored, atol=1e-3), "what is read changes what is written"


@pytest.mark.parametrize("feature", FEATURES)
def test_scores_and_values_do_not_depend_on_padding(feature: str) -> None:
    model, beside = model_of(feature), beside_of(feature)
    head = ScoreModel(model).eval()
    head.head.weight.data.normal_()
    text = text_of(answers(model, beside, eos_id=None), beside)
    with torch.no_grad():
        values = head(text.input_ids_BL, **given_to(head, text))
        for row, prompt in enumerate(PROMPTS):
            ids = text.input_ids_BL[row : row + 1, text.mask_BL[row].long().argmax() :]
            columns = side_text_columns(beside_of(feature, [row]), ids, torch.ones_like(ids, dtype=torch.bool))
            alone = head(ids, beside=head.new_beside(**columns))
            torch.testing.assert_close(values[row, -LENGTH:], alone[0, len(prompt) - 1 :], rtol=0, atol=1e-4)


def test_only_a_memory_with_episodes_that_is_switched_on_changes_answers() -> None:
    model = model_of("memory")
    with_episodes = answers(model, None, eos_id=None)
    model.memory.reading = False
    without = answers(model, None, eos_id=None)
    assert not torch.allclose(with_episodes.log_probs_BT, without.log_probs_BT, atol=1e-3)
    model.memory.reading = True
    model.memory.importance_N.fill_(-1.0)
    assert torch.equal(answers(model, None, eos_id=None).log_probs_BT, without.log_probs_BT)


def test_a_prompt_without_a_context_is_answered_as_by_a_model_that_reads_none() -> None:
    model = model_of("context")
    drawn, plain = answers(model, beside_of("context"), eos_id=None), answers(model, None, eos_id=None)
    assert torch.equal(drawn.answer_BT[1], plain.answer_BT[1])
    torch.testing.assert_close(drawn.log_probs_BT[1], plain.log_probs_BT[1], rtol=0, atol=1e-5)
    assert not torch.equal(drawn.log_probs_BT[0], plain.log_probs_BT[0])


def test_only_rows_with_a_new_chunk_are_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    before = ContextEncoder.forward
    monkeypatch.setattr(ContextEncoder, "forward", lambda self, x, mask: encoded.append(len(x)) or before(self, x, mask))  # type: ignore[func-returns-value]
    model = model_of("retrieval")
    answers(model, beside_of("retrieval"), eos_id=None)
    lengths = [len(prompt) for prompt in PROMPTS]
    all_at_once, later = encoded[0], encoded[1:]
    assert all_at_once == 4 * ((max(lengths) - 1) // CHUNK)
    wanted = [(length - 1) // CHUNK for prompt in lengths for length in range(prompt + 1, prompt + LENGTH) if length % CHUNK == 1]
    rows_at_once = sum(wanted)
    assert rows_at_once <= sum(later) <= 1.5 * rows_at_once, "a passage that a longer row beside it has may be encoded as nothing"


def test_rows_that_have_ended_look_nothing_up() -> None:
    asked: list[int] = []

    class Counting(Turned):
        def text_columns(self, texts: Sequence[Sequence[int]], own: Sequence[Sequence[str]], starts: Sequence[int]) -> dict[str, Tensor]:
            asked.append(max(map(len, texts)))
            return super().text_columns(texts, own, starts)

    model = model_of("retrieval")
    first = int(answers(model, make_side_texts(Counting()), [0], eos_id=None).answer_BT[0, 0])
    assert max(asked) > len(PROMPTS[0]) + CHUNK
    asked.clear()
    drawn = answers(model, make_side_texts(Counting()), [0, 3], eos_id=first)
    assert int(drawn.real_BT[0].sum()) == 1
    looked_up_for_the_other = [length for length in range(11, 10 + LENGTH) if length % CHUNK == 1]
    assert len(asked) <= 1 + len(looked_up_for_the_other)


def test_processes_that_compute_together_read_at_the_same_steps() -> None:
    """A process whose rows find nothing new reads again when another's do: networks that are held in parts are computed in step."""
    model, asked = model_of("retrieval"), []

    def any_of_all(own: bool) -> bool:
        asked.append(own)
        return True

    drawn = answers(model, beside_of("retrieval"), eos_id=None, any_goes_on=any_of_all)
    assert False in asked
    torch.testing.assert_close(drawn.log_probs_BT, answers(model, beside_of("retrieval"), eos_id=None).log_probs_BT, rtol=0, atol=1e-5)
