"""Text generation with a KV cache: prefill, then one token per step.

Shapes: B batch, L tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config.schema.serving import Decoding
from shoal.errors import ShoalError
from shoal.models.generation.decoding import LogitPenalties, apply_penalties, choose, row_draws, warp_of
from shoal.models.generation.side_texts import SideTextReader, SideTexts
from shoal.models.layers.value_head import ScoreModel


def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    decoding: Decoding,
    seed: int | None = None,
    eos_id: int | None = None,
    beside: SideTexts | None = None,
) -> Iterator[Tensor]:
    """Yield the next token ids [B] for prompts [B, L] of one length, decoded as `decoding.active` says. `beside`: side texts.

    With a seed, a row's text does not depend on the other rows. A row that has given `eos_id` keeps giving it; generation ends when all
    rows have. When the model's `max_seq_len` is full, generation continues from the last half of it. Longer prompts are cut at their start.
    """
    if not hasattr(model, "next_logits"):
        if isinstance(model, ScoreModel):
            raise ShoalError("a reward model scores answers and does not write text; name the run of a policy or of its base")
        raise ShoalError(f"a {type(model).__name__} does not write text; generation needs model.kind lstm, gpt, moe or huggingface")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ShoalError("the prompt is empty; give at least one token")
    _check_vocabulary(model, input_ids)
    input_ids = input_ids.to(next(model.parameters()).device)
    chooser = _Chooser(decoding, seed, input_ids.tolist())
    return _tokens(model, GenerationState(model, input_ids, max_new_tokens, beside), max_new_tokens, chooser, eos_id)


def _check_vocabulary(model: Any, input_ids: Tensor) -> None:
    strange = input_ids[(input_ids < 0) | (input_ids >= model.vocab_size)]
    if strange.numel():
        raise ShoalError(
            f"token id {int(strange[0])} of the prompt is not in the model's vocabulary of {model.vocab_size}; "
            f"use the tokenizer the model was trained with"
        )


@torch.no_grad()
def _tokens(model: nn.Module, context: GenerationState, max_new_tokens: int, chooser: _Chooser, eos_id: int | None) -> Iterator[Tensor]:
    ended_B = torch.zeros(len(context.unseen_BL), dtype=torch.bool, device=context.unseen_BL.device)
    for step in range(max_new_tokens):
        with evaluating(model):
            logits_BV = context.next_logits()
        next_B = chooser.next(logits_BV)
        if eos_id is not None:
            next_B = next_B.masked_fill(ended_B, eos_id)
            ended_B |= next_B == eos_id
        yield next_B
        if eos_id is not None and ended_B.all():
            return
        if step + 1 < max_new_tokens:
            context.append(next_B)


class _Chooser:
    """Chooses the next token of each row, and keeps the tokens so far where repetition is penalised."""

    def __init__(self, decoding: Decoding, seed: int | None, prompts: list[list[int]]) -> None:
        self.warps = [warp_of(decoding)] * len(prompts)
        self.draws = row_draws(seed, prompts)
        self.penalties = LogitPenalties(repetition=decoding.repetition_penalty)
        self.seen = prompts
        self.position = 0

    def next(self, logits_BV: Tensor) -> Tensor:
        if self.penalties.repetition != 1:
            rows = zip(logits_BV, self.seen, strict=True)
            logits_BV = torch.stack([apply_penalties(logits_V, self.penalties, seen, ()) for logits_V, seen in rows])
        next_B = choose(logits_BV, self.warps, [draws.at(self.position) for draws in self.draws])
        self.position += 1
        if self.penalties.repetition != 1:
            for seen, token in zip(self.seen, next_B.tolist(), strict=True):
                seen.append(token)
        return next_B


class GenerationState:
    """Tokens of a batch that is being generated, and the model's KV cache of them."""

    def __init__(
        self,
        model: Any,
        prompt_BL: Tensor,
        max_new_tokens: int,
        beside: SideTexts | None = None,
        mask_BL: Tensor | None = None,
        any_of_all: Callable[[bool], bool] = bool,
    ) -> None:
        """`mask_BL`: False at padding, which stands before a prompt. A padded prompt must fit whole. `any_of_all`: see `SideTextReader`."""
        self.model, self.beside, self.mask_BS, self.any_of_all = model, beside, mask_BL, any_of_all
        self.longest: int | None = model.max_seq_len
        self.unseen_BL = prompt_BL if self.longest is None else prompt_BL[:, -self.longest :]
        wanted = self.unseen_BL.shape[1] + max_new_tokens
        self.capacity = wanted if self.longest is None else min(wanted, self.longest)
        self.recent = deque(self.unseen_BL.unbind(1), maxlen=max(1, (self.longest or 0) // 2))
        self._start()

    def _start(self) -> None:
        self.cache, self.length = self.model.new_cache(self.capacity), 0
        self.reader = SideTextReader(self.model, self.beside, self.any_of_all)

    def next_logits(self) -> Tensor:
        """Logits [B, V] of the next token: run the tokens that are not in the cache yet."""
        self.length += self.unseen_BL.shape[1]
        keywords = self.reader.after(self.unseen_BL, self.mask_BS) | ({} if self.mask_BS is None else {"attention_mask": self.mask_BS})
        return self.model.next_logits(self.unseen_BL, self.cache, **keywords)

    def append(self, next_B: Tensor, going_B: Tensor | None = None) -> None:
        """Append a token to each row. `going_B`: the unfinished rows; tokens of the others are padding."""
        if going_B is not None and self.beside is not None:
            self.reader.going = going_B.tolist()
        self.recent.append(next_B)
        if self.mask_BS is not None:
            self.mask_BS = F.pad(self.mask_BS, (0, 1), value=True)
        if self.length == self.longest:
            self.unseen_BL = torch.stack(tuple(self.recent), dim=1)
            self._start()
        else:
            self.unseen_BL = next_B.unsqueeze(1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for one step; afterwards each module has the caller's mode again."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
