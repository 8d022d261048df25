"""Choice of the next tokens of requests that have a slot on the device: each slot has its own decoding, penalties and last token.

On a GPU a kernel chooses (`kernels/token_choice.py`); elsewhere `decoding.py` does, row by row.

Shapes: R rows, N slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.models.generation.choice_state import Choices, ChoiceState
from shoal.models.generation.decoding import NO_PENALTIES, LogitPenalties, Warp, draw_tokens, finite_rows
from shoal.models.kernels import HAS_TRITON


class SlotPenalties:
    """Penalties and biases by slot, and the tokens that they are about."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.written_NV = torch.zeros(slots, vocabulary, dtype=torch.int32, device=device)
        """How often a token occurs in the text."""
        self.prompt_NV = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        self.bias_NV = torch.zeros(slots, vocabulary, device=device)
        self.factors_N3 = torch.zeros(slots, 3, device=device)
        """Repetition, presence, frequency."""
        self.factors_N3[:, 0] = 1
        self._changed: set[int] = set()
        """Slots that a text with penalties has had."""

    def open(self, slot: int, penalties: LogitPenalties, prompt_ids: Sequence[int]) -> None:
        """The penalties of a new text. Rows without penalties are in the same steps, with factors that change nothing."""
        if penalties == NO_PENALTIES and slot not in self._changed:
            return
        self._changed.add(slot)
        self.written_NV[slot] = 0
        self.prompt_NV[slot] = False
        self.bias_NV[slot] = 0
        device = self.bias_NV.device
        self.prompt_NV[slot, torch.tensor(sorted(set(prompt_ids)), device=device)] = True
        self.factors_N3[slot] = torch.tensor([penalties.repetition, penalties.presence, penalties.frequency], device=device)
        if penalties.bias:
            added = torch.tensor([*penalties.bias.values()], dtype=self.bias_NV.dtype, device=device)
            self.bias_NV[slot, torch.tensor([*penalties.bias], device=device)] = added

    def apply(self, logits_RV: Tensor, rows_R: Tensor) -> Tensor:
        """The logits as `decoding.apply_penalties` changes them."""
        written_RV, factors_R31 = self.written_NV[rows_R], self.factors_N3[rows_R].unsqueeze(2)
        seen_RV = (written_RV > 0) | self.prompt_NV[rows_R]
        scores_RV = logits_RV.float()
        repetition_R1, presence_R1, frequency_R1 = factors_R31.unbind(1)
        repeated_RV = torch.where(scores_RV < 0, scores_RV * repetition_R1, scores_RV / repetition_R1)
        scores_RV = torch.where(seen_RV, repeated_RV, scores_RV)
        scores_RV = scores_RV - torch.where(written_RV > 0, presence_R1 + frequency_R1 * written_RV, 0.0)
        return scores_RV + self.bias_NV[rows_R]

    def add(self, rows_R: Tensor, tokens_R: Tensor) -> None:
        """Count the tokens that were chosen."""
        places_R = rows_R * self.written_NV.shape[1] + tokens_R.clamp(min=0)
        self.written_NV.view(-1).scatter_add_(0, places_R, torch.ones_like(places_R, dtype=torch.int32))


def choose_in_slots(logits_RV: Tensor, rows_R: Tensor, draws_R: Tensor, state: ChoiceState) -> Choices:
    """Choose a token in each row, and make it its slot's last one."""
    if logits_RV.is_cuda and HAS_TRITON and logits_RV.dtype != torch.float64:
        from shoal.models.kernels.token_choice import choose_tokens

        return choose_tokens(logits_RV, rows_R, draws_R, state)
    rows = rows_R.tolist()
    chosen = Choices(torch.full_like(rows_R, -1), torch.zeros(len(rows), device=logits_RV.device))
    finite_R = finite_rows(logits_RV)
    for i, slot in enumerate(rows):
        if bool(finite_R[i]):
            chosen.tokens_R[i], chosen.log_probs_R[i] = _one(logits_RV[i : i + 1], state, slot, draws_R[i : i + 1])
        if slot:
            state.tokens_N[slot] = chosen.tokens_R[i].clamp(min=0)
            state.lengths_N[slot] += 1
    return chosen


def _one(logits_1V: Tensor, state: ChoiceState, slot: int, draws_1: Tensor) -> tuple[Tensor, Tensor]:
    warp = warp_in(state, slot)
    if warp.temperature <= 0:
        return logits_1V.argmax(), torch.zeros(())
    token_1, log_p_1 = draw_tokens(logits_1V, warp, draws_1)
    return token_1[0], log_p_1[0]


def warp_in(state: ChoiceState, slot: int) -> Warp:
    """The decoding of a slot."""
    k, p, least = int(state.top_k_N[slot]), float(state.top_p_N[slot]), float(state.min_p_N[slot])
    return Warp(float(state.temperature_N[slot]), k or None, p if p < 1 else None, least or None)
