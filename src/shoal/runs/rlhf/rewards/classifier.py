"""Reward from a Hugging Face sequence classifier, the form in which most reward models are published."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shoal.config import Run
from shoal.config.schema.rlhf import ClassifierReward
from shoal.data import load_tokenizer
from shoal.data.text.chat_template import ChatTemplate, RenderRequest, plain_template, template_of
from shoal.engines import choose_device
from shoal.errors import ShoalError
from shoal.manifest import check_manifest
from shoal.models.packed.layers import pack_linear_layers
from shoal.runs.rlhf.rewards.interface import Answer, Score
from shoal.untrusted import huggingface

_AT_ONCE = 8
_LONGEST = 4096
"""Limit on tokens, also for a model that does not state its own."""


def build(settings: ClassifierReward, run: Run) -> Score:
    token = run.hub.token.reveal() if run.hub.token else None
    model, tokenizer = _loaded(settings.model, token)
    device = choose_device(run.training.device)
    model = model.to(device).eval()
    pack_linear_layers(model, run.serving.weights)
    labels = int(model.config.num_labels)
    if (settings.label is None and labels != 1) or (settings.label or 0) >= labels:
        raise ShoalError(f"rlhf.reward.label: {settings.model} has {labels} labels: say which of them is to be probable, from 0 on")
    max_tokens = _max_tokens(model, tokenizer)

    read = _Reader(settings.model, token)

    @torch.no_grad()
    def score(answers: Sequence[Answer]) -> list[float]:
        found: list[float] = []
        for start in range(0, len(answers), _AT_ONCE):
            some = answers[start : start + _AT_ONCE]
            lengths = {"padding": True, "truncation": True, "max_length": max_tokens}
            texts, complete = read.texts(some)
            batch = tokenizer(texts, return_tensors="pt", add_special_tokens=not complete, **lengths).to(device)
            logits_BC = model(**batch).logits.float()
            found += (logits_BC[:, 0] if settings.label is None else logits_BC.log_softmax(-1)[:, settings.label]).tolist()
        return found

    return score


class _Reader:
    """Prompts and answers as the classifier reads them."""

    def __init__(self, name: str, token: str | None) -> None:
        self._name, self._token = name, token
        self._template: ChatTemplate | None = None

    def texts(self, answers: Sequence[Answer]) -> tuple[list[str], bool]:
        """The texts, and whether a template wrote them with their special tokens."""
        chats = [chat for answer in answers if (chat := answer.whole()) is not None]
        if len(chats) < len(answers):
            return [one.prompt + one.text for one in answers], False
        if self._template is None:
            tokenizer = load_tokenizer(self._name, token=self._token)
            self._template = template_of(tokenizer) or plain_template(tokenizer)
        return [one.text for one in self._template.render([RenderRequest(chat.messages, chat.tools) for chat in chats])], True


def _max_tokens(model: Any, tokenizer: Any) -> int:
    """The number of tokens that the model reads: fewer than its positions where it counts these from its padding index on."""
    positions = int(getattr(model.config, "max_position_embeddings", None) or _LONGEST)
    begun = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return min(positions - max(begun, default=0), int(tokenizer.model_max_length), _LONGEST)


def _loaded(name: str, token: str | None) -> tuple[Any, Any]:
    if find_spec("transformers") is None:
        raise ShoalError("the reward `classifier` needs transformers: pip install 'shoal[hf]'")
    check_manifest(Path(name))
    try:
        model: Any = huggingface.read_classifier(name, token)
        tokenizer = huggingface.read_tokenizer(name, token, truncation_side="left", padding_side="right")
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ShoalError(f"rlhf.reward.model: {name} cannot be loaded as a classifier of sequences: {str(error).splitlines()[0]}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id  # the score is read at the last token that is not padding
    return model, tokenizer
