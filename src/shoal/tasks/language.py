"""What comes next? Labels are shifted by the data; −100 marks what must not count.

Letters: B batch, L length, N all places of a batch, V vocabulary.
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
from shoal.tasks import penalties
from shoal.tasks.base import Batch, Loss, Mean, TaskInfo

IGNORED = -100
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

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def compile(self) -> None:
        self.outputs = torch.compile(self.outputs)  # type: ignore[method-assign]

    def losses(self, batch: Batch) -> Iterator[Loss]:
        logits_BLV, beside = self.outputs(batch)
        fused = logits_BLV.is_cuda and _HAS_TRITON
        total, metrics = self._fused(logits_BLV, batch) if fused else self._plain(logits_BLV[..., : self.vocab_size], batch)
        if beside is not None:
            for name, weight, value in beside.losses:
                metrics[name] = value
                total = total + weight * value
            metrics |= beside.figures
        yield Loss("model", total, metrics)

    def _plain(self, logits_BLV: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        total = cross_entropy(logits_BLV, batch["labels"])
        metrics = {"loss": total}
        if self.penalised:
            marked, log_p_BLV = self.marks(batch), logits_BLV.float().log_softmax(-1)
            counted = marked.counted_BL.sum().clamp(min=1)
            for name, weight, value in penalties.sums(self.penalties, log_p_BLV, marked, self.eos_id):
                metrics[name] = value / counted
                total = total + weight * metrics[name]
        return total, metrics

    def _fused(self, logits_BLV: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        from shoal.tasks import fused_loss

        logits_NV, labels_N = logits_BLV.flatten(0, 1), batch["labels"].flatten()
        if not self.penalised:
            loss = fused_loss.cross_entropy(logits_NV, labels_N, self.vocab_size, IGNORED)
            return loss, {"loss": loss}
        chosen = penalties.weights(self.penalties)
        punished = fused_loss.Punished(self.marks(batch), chosen, self.penalties.repetition_window, self.eos_id)
        total, figures = fused_loss.punished_cross_entropy(logits_NV, labels_N, self.vocab_size, IGNORED, punished)
        names = ("loss", *penalties.NAMES)
        return total, {name: figures[i] for i, name in enumerate(names) if i == 0 or chosen[i - 1]}

    def marks(self, batch: Batch) -> penalties.Marks:
        labels_BL = batch["labels"]
        early_BL = self.places(batch) < self.penalties.min_sequence_length
        return penalties.marks(batch["input_ids"], labels_BL, labels_BL != IGNORED, batch.get("attention_mask"), early_BL)

    def outputs(self, batch: Batch) -> tuple[Tensor, Any]:
        """Logits, and what the model gives beside them (None: nothing).

        On a GPU the logits have columns added up to a multiple of 64, since its matrix units are a good deal slower on odd sizes.
        Padding on the right needs no mask: a causal model never looks there, and the fast attention takes none.
        """
        model: Any = self.players["model"]
        ids, beside = batch["input_ids"], None
        keywords: dict[str, Any] = {}
        if hasattr(model, "new_beside"):
            keywords["beside"] = beside = model.new_beside(counted_BL=batch["labels"] != IGNORED)
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
        return any(penalties.weights(self.penalties))

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

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        mean = Mean()
        for batch in batches:
            logits_BLV = self.outputs(batch)[0][..., : self.vocab_size]
            mean.add({"loss": cross_entropy(logits_BLV, batch["labels"])}, self.count(batch))
        result = mean.result()
        if "loss" in result:
            result["perplexity"] = math.exp(min(result["loss"], 700.0))
        return result


def cross_entropy(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """The mean over the tokens that count; 0 if none does."""
    total = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels_BL != IGNORED).sum().clamp(min=1)
