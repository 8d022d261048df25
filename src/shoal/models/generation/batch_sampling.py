"""Sample answers to many prompts at once, with the log-probability of each token.

Random numbers are derived from a seed, the prompt, the number of the answer and the position (`TokenDraws`), not from a stateful generator.
So every worker with the same weights gets the same answers, and one pass over an answer shows whether it can be genuine
(`decoding.draw_gap`).

Shapes: B batch, P tokens of the longest prompt, T tokens of the longest answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models.generation.answer_buffers import AnswerBuffers
from shoal.models.generation.decoding import TokenDraws, Warp, finite_rows, require_finite
from shoal.models.generation.generate import GenerationState, evaluating
from shoal.models.generation.rollout_decoding import decoder_for
from shoal.models.generation.side_texts import SideTexts
from shoal.models.kernels.cpu_packing import packed_for


class SampledAnswers(NamedTuple):
    """Answers, one in each row."""

    prompt_BP: Tensor
    """Prompts, with padding before the shorter ones."""
    prompt_mask_BP: Tensor
    answer_BT: Tensor
    real_BT: Tensor
    """True at the tokens of an answer, including its end token; False after that."""
    log_probs_BT: Tensor
    """Log-probability of each token when it was drawn; 0 after the end."""
    stopped_B: Tensor
    """Whether an answer ended with the end token, before the length limit."""
    values_BT: Tensor | None = None
    """Output of the model's value head before each token; 0 after the end. None: it has no value head."""


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    draws: Sequence[TokenDraws],
    eos_id: int | None,
    pad_id: int,
    width: int = 0,
    any_goes_on: Callable[[bool], bool] = bool,
    beside: SideTexts | None = None,
) -> SampledAnswers:
    """Draw an answer to each prompt from the model's own probabilities at a temperature; no other decoding gives probabilities that a
    policy can learn from. All answers have `max_new_tokens` columns. `draws`: the random numbers of each answer. `width`: least number of
    prompt columns. `any_goes_on`: over processes that must compute together, whether any has an unfinished answer. `beside`: side texts."""
    prompt_BP, mask_BP = pad_prompts(prompts, pad_id, next(model.parameters()).device, width)
    _check_room(model, prompt_BP.shape[1], max_new_tokens)
    written = AnswerBuffers(len(prompts), max_new_tokens, Warp(temperature), eos_id, pad_id, prompt_BP.device)
    decoder = decoder_for(model, len(prompts), prompt_BP.shape[1], max_new_tokens) if beside is None else None
    if decoder is not None:
        decoder.write(prompts, draws, written, any_goes_on)
    else:
        with packed_for(model, len(prompts)):
            context = GenerationState(model, prompt_BP, max_new_tokens, beside, None if bool(mask_BP.all()) else mask_BP, any_goes_on)
            _write(model, context, written, draws, any_goes_on)
    values_BT = written.values_BT if written.valued else None
    return SampledAnswers(prompt_BP, mask_BP, written.answer_BT, written.real_BT, written.log_probs_BT, ~written.going_B, values_BT)


def _write(
    model: nn.Module, context: GenerationState, written: AnswerBuffers, draws: Sequence[TokenDraws], any_goes_on: Callable[[bool], bool]
) -> None:
    """Generate all answers to their ends, step by step."""
    columns = written.answer_BT.shape[1]
    for step in range(columns):
        with evaluating(model):
            logits_BV = context.next_logits()
        require_finite(finite_rows(logits_BV))
        draws_B = torch.tensor([one.at(step) for one in draws], dtype=torch.float64).to(logits_BV.device)
        written.take(logits_BV, draws_B, getattr(context.cache, "value_B", None))
        if not any_goes_on(bool(written.going_B.any())):
            return
        if step + 1 < columns:
            context.append(written.last_B, written.going_B)


def pad_prompts(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device, width: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left to at least `width` tokens, and a mask that is False at padding."""
    if not prompts or not all(prompts):
        raise ShoalError("a prompt is empty: each must have at least one token")
    width = max(width, *map(len, prompts))
    rows = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    mask_BP = torch.arange(width) >= width - lengths_B[:, None]
    return torch.tensor(rows, device=device), mask_BP.to(device)


def _check_room(model: nn.Module, prompt: int, answer: int) -> None:
    longest = getattr(model, "max_seq_len", None)
    if longest is not None and prompt + answer > longest:
        raise ShoalError(
            f"prompts of {prompt} tokens (rlhf.ppo.prompt_length) with answers of {answer} (rlhf.ppo.response_length) do not fit a model "
            f"that takes {longest}"
        )


def received_answers(
    prompt_BP: Tensor, prompt_mask_BP: Tensor, answer_BT: Tensor, log_probs_BT: Tensor, eos_id: int | None, pad_id: int
) -> SampledAnswers:
    """Answers that another process has drawn: `answer_BT` has −1 after the end of an answer."""
    real_BT = answer_BT >= 0
    last_B = answer_BT.gather(1, real_BT.sum(1, keepdim=True) - 1).squeeze(1)
    stopped_B = torch.zeros_like(last_B, dtype=torch.bool) if eos_id is None else last_B == eos_id
    return SampledAnswers(prompt_BP, prompt_mask_BP, answer_BT.masked_fill(~real_BT, pad_id), real_BT, log_probs_BT * real_BT, stopped_B)


def tokens_to_send(drawn: SampledAnswers) -> Tensor:
    """The tokens of the answers with −1 after the end of each, as they are sent."""
    return drawn.answer_BT.masked_fill(~drawn.real_BT, -1)
