"""Reward from a local judge model: it is asked whether an answer is good; the score is the probability of `yes` relative to `no`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal import data
from shoal.config import Run
from shoal.config.schema import model as schema
from shoal.config.schema.rlhf import JudgeReward
from shoal.data.text.chat_template import template_of
from shoal.errors import ShoalError
from shoal.models.generation.batch_sampling import pad_prompts
from shoal.models.huggingface import pretrained
from shoal.models.huggingface.model import HuggingFace
from shoal.models.packed.layers import pack_linear_layers
from shoal.runs.rlhf.rewards.http import ask
from shoal.runs.rlhf.rewards.interface import Answer, Score, filled
from shoal.runs.trained_model import open_run
from shoal.tasks.answer_logprobs import PromptAnswers, as_used, log_probs
from shoal.tasks.base import IGNORED

_WORDS = ((" yes",), (" no",))
_WORDS_OF_CHAT = (("yes", "Yes"), ("no", "No"))
"""The words with which an assistant's turn begins."""
_AT_ONCE = 8


def build(settings: JudgeReward, run: Run) -> Score:
    if settings.address is not None:
        return ask(settings)
    model, tokenizer = _judge(settings, run)
    pack_linear_layers(model, run.serving.weights)
    template = template_of(tokenizer, tokenizer.chat_time)
    words = [[tokenizer.encode(word) for word in same] for same in (_WORDS if template is None else _WORDS_OF_CHAT)]
    max_tokens = (getattr(model, "max_seq_len", None) or 4096) - max(len(word) for same in words for word in same)

    def ids_of(question: str) -> list[int]:
        """The question; for a model that is tuned to chat, as what its user says."""
        if template is None:
            return [*tokenizer.opening, *tokenizer.encode(question)]
        return tokenizer.encode(template.prompt([{"role": "user", "content": question}]))

    def score(answers: Sequence[Answer]) -> list[float]:
        asked = [filled(settings.question, answer) for answer in answers]
        questions = [ids_of(text)[-max_tokens:] for text in asked]
        found: list[float] = []
        for start in range(0, len(questions), _AT_ONCE):
            some = questions[start : start + _AT_ONCE]
            each = [torch.stack([_how_probable(model, some, word, tokenizer.pad_id) for word in same]) for same in words]
            yes_B, no_B = (one.logsumexp(0) for one in each)
            found += torch.sigmoid(yes_B - no_B).tolist()
        return found

    return score


def _judge(settings: JudgeReward, run: Run) -> tuple[nn.Module, data.Tokenizer]:
    if (Path(settings.model) / "config.yaml").exists():
        trained = open_run(settings.model, lambda text: None)
        if trained.tokenizer is None or trained.run.chosen_task.shows != "text":
            raise ShoalError(f"rlhf.reward.model: the run at {settings.model} does not write text")
        return trained.task.players["model"], trained.tokenizer
    token = run.hub.token.reveal() if run.hub.token else None
    found: Any = HuggingFace(pretrained.load(schema.HuggingFace(pretrained=settings.model), token))
    return found.eval(), data.load_tokenizer(settings.model, token=token)


@torch.no_grad()
def _how_probable(model: nn.Module, questions: Sequence[list[int]], word: list[int], pad_id: int) -> torch.Tensor:
    """The log-probability of a word after each question."""
    ids_BL, mask_BL = pad_prompts([[*question, *word] for question in questions], pad_id, next(model.parameters()).device)
    labels_BL = torch.full_like(ids_BL[:, 1:], IGNORED)
    labels_BL[:, -len(word) :] = ids_BL[:, -len(word) :]
    with as_used(model):
        return log_probs(model, PromptAnswers(ids_BL[:, :-1], labels_BL, mask_BL[:, :-1])).sum(1)
