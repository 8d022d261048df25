"""Reward from a model that a run of the task `reward` trained: its score at the last real token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal import data
from shoal.config import Run
from shoal.config.schema.rlhf import TrainedReward
from shoal.data.text.chat_template import template_of
from shoal.data.text.documents import Document
from shoal.data.text.encoding import Encoding, collate
from shoal.errors import ShoalError
from shoal.models.generation.side_texts import make_side_texts, side_text_columns
from shoal.models.packed.layers import pack_linear_layers
from shoal.runs.rlhf.rewards.interface import Answer, Score
from shoal.runs.trained_model import open_run
from shoal.tasks.answer_logprobs import PromptAnswers, as_used
from shoal.tasks.reward import RewardModelTask

_AT_ONCE = 16


def build(settings: TrainedReward, run: Run) -> Score:
    if settings.run is None:
        raise ShoalError("rlhf.reward.run: name the folder of the run that trained the reward model, or give rlhf.reward.preferences")
    trained = open_run(settings.run, lambda text: None)
    task, tokenizer = trained.task, trained.tokenizer
    if not isinstance(task, RewardModelTask) or tokenizer is None:
        raise ShoalError(f"rlhf.reward.run: the run at {settings.run} learned {trained.run.chosen_task.kind}, not reward")
    encoding = Encoding(tokenizer, trained.run.data.sequence_length or 128, "dynamic", template=template_of(tokenizer, tokenizer.chat_time))
    model = task.players["model"]
    pack_linear_layers(model, run.serving.weights)
    device = next(model.parameters()).device

    finder = data.open_finder(trained.run, trained.passages, tokenizer) if trained.passages else None
    context = data.reads_context(trained.run)

    def text_of(answers: Sequence[Answer]) -> PromptAnswers:
        """Answers as the reward model reads them, with their side texts."""
        chats = [answer.whole() for answer in answers]
        documents = [
            Document(answer.text, answer.prompt) if chat is None else chat.document() for answer, chat in zip(answers, chats, strict=True)
        ]
        batch = collate(data.answer_samples(documents, encoding), encoding)
        text = PromptAnswers.of({name: value.to(device) for name, value in batch.items()})
        contexts = [tokenizer.encode(answer.context) if answer.context else [] for answer in answers] if context else ()
        beside = make_side_texts(finder, contexts, [answer.own for answer in answers])
        return text._replace(beside=side_text_columns(beside, text.input_ids_BL, text.mask_BL))

    @torch.no_grad()
    def score(answers: Sequence[Answer]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(answers), _AT_ONCE):
            with as_used(model):
                scores += task.score(text_of(answers[start : start + _AT_ONCE])).tolist()
        return scores

    return score
