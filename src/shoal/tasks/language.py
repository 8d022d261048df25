"""What comes next? Labels are shifted by the data; −100 marks what must not count.

Letters: B batch, L length, V vocabulary, D width, W window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import Run
from shoal.config.schema import task as schema
from shoal.config.schema.training import Penalties
from shoal.errors import ShoalError
from shoal.tasks.base import Batch, Loss, Mean, TaskInfo

IGNORED = -100
READ_BESIDE = ("context_ids", "passage_ids", "passage_from")
"""Columns of a batch with texts that a model reads beside its input."""
_LEFT_OUT = {"loss_without_context": ("context_ids",), "loss_without_retrieval": ("passage_ids", "passage_from")}
"""Losses that tell what reading is worth, and the columns that are left out for each."""
_HAS_TRITON = find_spec("triton") is not None  # it comes with torch for CUDA, except on Windows


def build(task: schema.LanguageModelling, run: Run, players: dict[str, nn.Module], info: TaskInfo) -> LanguageModelling:
    return LanguageModelling(players, run.training.penalties, info.eos_id, left_padding=run.data.padding_side == "left")


class LanguageModelling:
    """Next-token cross-entropy over the tokens that count, plus penalties."""

    headline = "loss"
    higher_is_better = False

    def __init__(
        self, players: dict[str, nn.Module], penalties: Penalties | None = None, eos_id: int | None = None, *, left_padding: bool = False
    ) -> None:
        self.players = players
        self.penalties = penalties or Penalties()
        self.eos_id = eos_id
        self.left_padding = left_padding
        if self.penalties.eos_weight and eos_id is None:
            raise ShoalError("training.penalties.eos_weight needs a tokenizer with an end-of-text token")
        if self.memory is not None and left_padding:
            raise ShoalError("model.episodic_memory keeps sequences from their first column on: set data.padding_side to right")

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def compile(self) -> None:
        self.outputs = torch.compile(self.outputs)  # type: ignore[method-assign]

    @property
    def memory(self) -> Any:
        """The model's episodic memory, where it has one."""
        return getattr(self.players["model"], "memory", None)

    def losses(self, batch: Batch) -> Iterator[Loss]:
        fresh, slots_B = len(batch["input_ids"]), None
        if self.memory is not None:
            batch, slots_B = self.memory.mixed(batch)
        logits_BLV, beside = self.outputs(batch)
        replay = {} if slots_B is None else self._score(logits_BLV, batch, slots_B, fresh)  # first: a fused loss uses the logits up
        if logits_BLV.is_cuda and not self.penalised and _HAS_TRITON:
            total = self.fused_loss(logits_BLV, batch["labels"])
        else:
            total = cross_entropy(logits_BLV[..., : self.vocab_size], batch["labels"])
        metrics = {"loss": total} | replay
        if beside is not None:
            for name, weight, value in beside.losses:
                metrics[name] = value
                total = total + weight * value
            metrics |= beside.figures
        for name, weight, value in self.penalty_terms(logits_BLV[..., : self.vocab_size], batch):
            metrics[name] = value
            total = total + weight * value
        yield Loss("model", total, metrics)

    @torch.no_grad()
    def _score(self, logits_BLV: Tensor, batch: Batch, slots_B: Tensor, fresh: int) -> dict[str, Tensor]:
        """Tell the memory the loss of each sequence. Return the loss of the batch's own sequences, and of those that were replayed."""
        labels_BL = batch["labels"]
        flat = F.cross_entropy(logits_BLV[..., : self.vocab_size].flatten(0, 1).float(), labels_BL.flatten(), reduction="none")
        sums_B, counts_B = flat.view_as(labels_BL).sum(1), (labels_BL != IGNORED).sum(1)
        self.memory.score(batch["input_ids"], labels_BL, sums_B / counts_B.clamp(min=1), slots_B)
        parts = {"loss": slice(fresh), "replay_loss": slice(fresh, None)}
        told = {name: sums_B[part].sum() / counts_B[part].sum().clamp(min=1) for name, part in parts.items()}
        return told | {"replayed": torch.full_like(told["loss"], len(slots_B) - fresh)}

    def fused_loss(self, logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
        from shoal.tasks import fused_loss

        return fused_loss.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), self.vocab_size, IGNORED)

    def outputs(self, batch: Batch) -> tuple[Tensor, Any]:
        """Logits, and what the model gives beside them (None: nothing).

        On a GPU the logits have columns added up to a multiple of 64, since its matrix units are a good deal slower on odd sizes.
        Padding on the right needs no mask: a causal model never looks there, and the fast attention takes none.
        """
        model: Any = self.players["model"]
        ids, beside = batch["input_ids"], None
        keywords: dict[str, Any] = {}
        if hasattr(model, "new_beside"):
            columns = {name: batch[name] for name in READ_BESIDE if name in batch}
            keywords["beside"] = beside = model.new_beside(counted_BL=batch["labels"] != IGNORED, **columns)
        if self.left_padding and "attention_mask" in batch:
            keywords["attention_mask"] = batch["attention_mask"]
        if ids.is_cuda and hasattr(model, "output_weight"):
            return F.linear(model.hidden(ids, **keywords), F.pad(model.output_weight, (0, 0, 0, -self.vocab_size % 64))), beside
        return model(ids, **keywords), beside

    @property
    def vocab_size(self) -> int:
        return int(self.players["model"].vocab_size)  # type: ignore[arg-type]

    @property
    def penalised(self) -> bool:
        settings = self.penalties
        return bool(settings.repetition_weight or settings.immediate_repetition_weight or settings.eos_weight)

    def penalty_terms(self, logits_BLV: Tensor, batch: Batch) -> Iterator[tuple[str, float, Tensor]]:
        """The penalties that are switched on: name, weight, differentiable value."""
        settings = self.penalties
        if not self.penalised:
            return
        log_p_BLV = logits_BLV.float().log_softmax(-1)
        counted_BL = batch["labels"] != IGNORED
        if settings.repetition_weight:
            value = repetition(log_p_BLV, batch["input_ids"], batch["labels"], settings.repetition_window)
            yield "repetition", settings.repetition_weight, value
        if settings.immediate_repetition_weight:
            p_BL = log_p_BLV.gather(-1, batch["input_ids"].unsqueeze(-1)).squeeze(-1).exp()
            yield "immediate_repetition", settings.immediate_repetition_weight, _mean(p_BL, counted_BL)
        if settings.eos_weight and self.eos_id is not None:
            early_BL = counted_BL & (self.places(batch) < settings.min_sequence_length)
            yield "early_end", settings.eos_weight, _mean(log_p_BLV[..., self.eos_id].exp(), early_BL)

    def places(self, batch: Batch) -> Tensor:
        """How many tokens of its document stand before each: counted from the first real token, and anew after an end of text."""
        ids_BL = batch["input_ids"]
        index_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
        starts_BL = ids_BL.eq(-1 if self.eos_id is None else self.eos_id).roll(1, 1)
        starts_BL[:, 0] = True
        if "attention_mask" in batch:
            starts_BL |= batch["attention_mask"] & ~batch["attention_mask"].roll(1, 1)
        places: Tensor = index_L - (index_L * starts_BL).cummax(1).values
        return places

    def _judge(self, batch: Batch) -> Tensor:
        return cross_entropy(self.outputs(batch)[0][..., : self.vocab_size], batch["labels"])

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        mean = Mean()
        for batch in batches:
            losses = {"loss": self._judge(batch)}
            for name, columns in _LEFT_OUT.items():
                if columns[0] in batch:
                    losses[name] = self._judge({column: value for column, value in batch.items() if column not in columns})
            if self.memory is not None:
                self.memory.reading = False
                losses["loss_without_memory"] = self._judge(batch)
                self.memory.reading = True
            mean.add(losses, self.count(batch))
        result = mean.result()
        if "loss" in result:
            result["perplexity"] = math.exp(min(result["loss"], 700.0))
        return result


def cross_entropy(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """The mean over the tokens that count; 0 if none does."""
    total = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels_BL != IGNORED).sum().clamp(min=1)


def repetition(log_p_BLV: Tensor, input_ids_BL: Tensor, labels_BL: Tensor, window: int) -> Tensor:
    """Unlikelihood of saying again what stands in the window before: −log(1 − p), once for each token other than the right one."""
    window = min(window, input_ids_BL.shape[1])
    padded = F.pad(input_ids_BL, (window - 1, 0), value=-1)
    seen_BLW = padded.unfold(1, window, 1)
    again_BLW = (seen_BLW.unsqueeze(-1) == seen_BLW.unsqueeze(-2)).tril(-1).any(-1)
    wanted_BLW = (seen_BLW >= 0) & ~again_BLW & (seen_BLW != labels_BL.unsqueeze(-1)) & (labels_BL != IGNORED).unsqueeze(-1)
    p_BLW = log_p_BLV.gather(-1, seen_BLW.clamp(min=0)).exp()
    unlikely_BLW = -torch.log1p(-p_BLW.clamp(max=1 - 1e-6))
    return _mean((unlikely_BLW * wanted_BLW).sum(-1), labels_BL != IGNORED)


def _mean(value: Tensor, counted: Tensor) -> Tensor:
    return (value * counted).sum() / counted.sum().clamp(min=1)
