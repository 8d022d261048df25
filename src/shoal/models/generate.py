"""Token after token from a language model, at the cost of one token each.

Shapes: B batch, L tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config.schema.serving import Decoding
from shoal.errors import ShoalError
from shoal.models.decoding import choose


def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    decoding: Decoding,
    generator: torch.Generator | None = None,
    eos_id: int | None = None,
) -> Iterator[Tensor]:
    """The next token ids [B] for prompts [B, L] of one length, step by step, as `decoding.active` says.

    A row that gave `eos_id` goes on giving it; when all have, the end is reached. When the model's longest sequence is full, it goes on
    from the last half of it. Prompts longer than that are seen from their end.
    """
    if not hasattr(model, "next_logits"):
        raise ShoalError(f"a {type(model).__name__} does not write text; generation needs model.kind lstm, gpt or huggingface")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ShoalError("the prompt is empty; give at least one token")
    _check_vocabulary(model, input_ids)
    input_ids = input_ids.to(next(model.parameters()).device)
    return _tokens(model, input_ids, max_new_tokens, decoding, generator, eos_id)


def _check_vocabulary(model: Any, input_ids: Tensor) -> None:
    strange = input_ids[(input_ids < 0) | (input_ids >= model.vocab_size)]
    if strange.numel():
        raise ShoalError(
            f"token id {int(strange[0])} of the prompt is not in the model's vocabulary of {model.vocab_size}; "
            f"use the tokenizer the model was trained with"
        )


@torch.no_grad()
def _tokens(
    model: nn.Module, prompt_BL: Tensor, max_new_tokens: int, decoding: Decoding, generator: torch.Generator | None, eos_id: int | None
) -> Iterator[Tensor]:
    context = Context(model, prompt_BL, max_new_tokens)
    ended_B = torch.zeros(len(prompt_BL), dtype=torch.bool, device=prompt_BL.device)
    for step in range(max_new_tokens):
        with evaluating(model):
            logits_BV = context.next_logits()
        next_B = choose(logits_BV, decoding, generator)
        if eos_id is not None:
            next_B = next_B.masked_fill(ended_B, eos_id)
            ended_B |= next_B == eos_id
        yield next_B
        if eos_id is not None and ended_B.all():
            return
        if step + 1 < max_new_tokens:
            context.append(next_B)


class Context:
    """The tokens a model sees, and its cache of them."""

    def __init__(self, model: Any, prompt_BL: Tensor, max_new_tokens: int, mask_BL: Tensor | None = None) -> None:
        """`mask_BL`: False at padding, which stands before a prompt. A prompt with padding must fit whole."""
        self.model, self.mask_BS = model, mask_BL
        self.longest: int | None = model.max_seq_len
        self.unseen_BL = prompt_BL if self.longest is None else prompt_BL[:, -self.longest :]
        wanted = self.unseen_BL.shape[1] + max_new_tokens
        self.capacity = wanted if self.longest is None else min(wanted, self.longest)
        self.recent = deque(self.unseen_BL.unbind(1), maxlen=max(1, (self.longest or 0) // 2))
        self._start()

    def _start(self) -> None:
        self.cache, self.length = self.model.new_cache(self.capacity), 0

    def next_logits(self) -> Tensor:
        """Logits [B, V] of the next token, from the tokens not seen yet and the cache of the others."""
        self.length += self.unseen_BL.shape[1]
        masked = {} if self.mask_BS is None else {"attention_mask": self.mask_BS}
        logits_BV: Tensor = self.model.next_logits(self.unseen_BL, self.cache, **masked)
        return logits_BV

    def append(self, next_B: Tensor) -> None:
        self.recent.append(next_B)
        if self.mask_BS is not None:
            self.mask_BS = F.pad(self.mask_BS, (0, 1), value=True)
        if self.length == self.longest:
            self._start()
            self.unseen_BL = torch.stack(tuple(self.recent), dim=1)
        else:
            self.unseen_BL = next_B.unsqueeze(1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off for one step only: between the steps the model belongs to the caller."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
