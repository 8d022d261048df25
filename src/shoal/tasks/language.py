"""Language modelling: next-token prediction. Labels are shifted by the data; −100 marks tokens that do not count.

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
from shoal.config.data_shapes import DataShapes
from shoal.config.schema import task as schema
from shoal.config.schema.training import Penalties
from shoal.errors import ShoalError
from shoal.tasks import penalties
from shoal.tasks.base import IGNORED, Batch, Loss, Task
from shoal.tasks.chunked_logprobs import cross_entropy_of, gradient_buffer_of, output_of

READ_BESIDE = ("context_ids", "passage_ids", "passage_from")
"""Columns of a batch with texts that a model reads beside its input."""
DOCUMENT_LENGTHS = "document_lengths"
"""Column of a batch of packed rows: the tokens of each document."""
_LEFT_OUT = {"loss_without_context": ("context_ids",), "loss_without_retrieval": ("passage_ids", "passage_from")}
"""Losses that measure the benefit of side texts, and the columns that are left out for each."""
_PADDED = {"input_ids", "labels", "attention_mask"}
"""The columns of a batch whose padding can be left out: others may be read by row and place."""
_HAS_TRITON = find_spec("triton") is not None  # it comes with torch for CUDA, except on Windows


def build(task: schema.LanguageModelling, run: Run, players: dict[str, nn.Module], shapes: DataShapes) -> LanguageModelling:
    return LanguageModelling(players, run.training.penalties, shapes.eos_id, left_padding=run.data.padding_side == "left")


class LanguageModelling(Task):
    """Next-token cross-entropy over the tokens that count, plus penalties."""

    headline = "loss"
    counts_tokens = True

    def __init__(
        self, players: dict[str, nn.Module], penalties: Penalties | None = None, eos_id: int | None = None, *, left_padding: bool = False
    ) -> None:
        self.players = players
        self.penalties = penalties or Penalties()
        self.eos_id = eos_id
        self.left_padding = left_padding
        self._most_rows = 0
        """Of all batches of evaluations."""
        if self.penalties.eos_weight and eos_id is None:
            raise ShoalError("training.penalties.eos_weight needs a tokenizer with an end-of-text token")
        if self.memory is not None and left_padding:
            raise ShoalError("model.episodic_memory keeps sequences from their first column on: set data.padding_side to right")

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def compile(self) -> None:
        self.outputs = torch.compile(self.outputs)  # type: ignore[method-assign]
        self.fixed_shapes = True
        model = self.players["model"]
        self.evaluates_in_training_mode = type(self) is LanguageModelling and bool(getattr(model, "trains_as_it_evaluates", False))

    @property
    def memory(self) -> Any:
        """The model's episodic memory, where it has one."""
        return getattr(self.players["model"], "memory", None)

    def losses(self, batch: Batch) -> Iterator[Loss]:
        fresh, slots_B = len(batch["input_ids"]), None
        if self.memory is not None:
            batch, slots_B = self.memory.mixed(batch)
        batch = self._without_padding(batch)
        if slots_B is None and not self.penalised and self._selects(batch):
            total, beside = self._in_pieces(batch)
            metrics = {"loss": total}
        else:
            total, metrics, beside = self._of_all_logits(batch, slots_B, fresh)
        if beside is not None:
            if beside.ahead is not None:
                beside.losses.append(self._ahead(batch, beside))
            for name, weight, value in beside.losses:
                metrics[name] = value
                total = total + weight * value
            metrics |= beside.figures
        yield Loss("model", total, metrics)

    def _of_all_logits(self, batch: Batch, slots_B: Tensor | None, fresh: int) -> tuple[Tensor, dict[str, Tensor], Any]:
        """The loss, metrics, and what the model gives beside its logits. `slots_B`, `fresh`: what the memory mixed into the batch."""
        logits_BLV, beside = self.outputs(batch)
        replay = {} if slots_B is None else self._score(logits_BLV, batch, slots_B, fresh)  # first: a fused loss uses the logits up
        if len(batch["labels"]) > fresh and self.memory.replay_weight != 1:
            self._weigh_replayed(logits_BLV, batch["labels"], fresh)
        fused = logits_BLV.is_cuda and _HAS_TRITON
        total, metrics = self._fused(logits_BLV, batch) if fused else self._plain(logits_BLV[..., : self.vocab_size], batch)
        return total, metrics | replay, beside

    def _without_padding(self, batch: Batch) -> Batch:
        """The batch as one packed row, where a CPU saves padding by that and the model computes the same."""
        if self.fixed_shapes or batch["input_ids"].device.type != "cpu" or batch.keys() != _PADDED:
            return batch
        real_BL = batch["attention_mask"].bool()
        if bool(real_BL.all()) or not getattr(self.players["model"], "skips_padding", False):
            return batch
        joined = {name: batch[name][real_BL].unsqueeze(0) for name in ("input_ids", "labels")}
        return joined | {DOCUMENT_LENGTHS: real_BL.sum(1).unsqueeze(0)}

    def _selects(self, batch: Batch) -> bool:
        """Whether logits are made for tokens that count alone, some at a time. On a GPU a kernel computes the loss of all of them."""
        model, labels_BL = self.players["model"], batch["labels"]
        if self.fixed_shapes or type(self).outputs is not LanguageModelling.outputs or labels_BL.device.type != "cpu":
            return False
        shown = hasattr(model, "output_weight") or bool(getattr(model, "gives_product", False))
        return shown and bool((labels_BL != IGNORED).any())

    def _in_pieces(self, batch: Batch) -> tuple[Tensor, Any]:
        """The cross-entropy, and what the model gives beside its hidden states."""
        model: Any = self.players["model"]
        given, counted_BL = self.beside_tokens(batch), batch["labels"] != IGNORED
        hidden_ND, labels_N = model.hidden(batch["input_ids"], **given)[counted_BL], batch["labels"][counted_BL]
        weight_VD = output_of(model, given)
        ahead = "beside" in given and given["beside"].ahead is not None  # then the gradient has two parts
        buffer_VD = None if ahead else gradient_buffer_of(getattr(model, "output_weight", weight_VD))
        loss = cross_entropy_of(hidden_ND, weight_VD, labels_N, buffer_VD)
        return loss, given.get("beside")

    def _ahead(self, batch: Batch, beside: Any) -> tuple[str, float, Tensor]:
        """The loss of the token after the next: the sum over the tokens for which both this token and the next one count, divided by the
        number of all that count. So the losses of several processes have the mean that one process computes."""
        labels_BL = batch["labels"]
        counted_BL = (labels_BL[:, 1:] != IGNORED) & (labels_BL[:, :-1] != IGNORED)
        total = self._mean_ahead(batch, beside, counted_BL) * counted_BL.sum()
        return "mtp", beside.ahead.weight, total / (labels_BL != IGNORED).sum().clamp(min=1)

    def _mean_ahead(self, batch: Batch, beside: Any, counted_BL: Tensor) -> Tensor:
        ahead, labels_BL = beside.ahead, batch["labels"][:, 1:]
        if ahead.is_logits:
            return cross_entropy(ahead.value[:, :-1].float(), labels_BL.masked_fill(~counted_BL, IGNORED))
        hidden_BLD, weight_VD = ahead.value[:, :-1], output_of(self.players["model"], {"beside": beside})
        if labels_BL.device.type == "cpu" and not self.fixed_shapes and bool(counted_BL.any()):
            return cross_entropy_of(hidden_BLD[counted_BL], weight_VD, labels_BL[counted_BL])
        logits_BLV = F.linear(hidden_BLD, weight_VD.to(hidden_BLD.dtype))
        return cross_entropy(logits_BLV.float(), labels_BL.masked_fill(~counted_BL, IGNORED))

    @torch.no_grad()
    def _score(self, logits_BLV: Tensor, batch: Batch, slots_B: Tensor, fresh: int) -> dict[str, Tensor]:
        """Report the loss of each sequence to the memory. Returns the loss of the batch's own sequences, and of the replayed ones."""
        labels_BL = batch["labels"]
        flat = F.cross_entropy(logits_BLV[..., : self.vocab_size].flatten(0, 1).float(), labels_BL.flatten(), reduction="none")
        sums_B, counts_B = flat.view_as(labels_BL).sum(1), (labels_BL != IGNORED).sum(1)
        self.memory.score(batch["input_ids"], labels_BL, sums_B / counts_B.clamp(min=1), slots_B)
        parts = {"loss": slice(fresh), "replay_loss": slice(fresh, None)}
        metrics = {name: sums_B[part].sum() / counts_B[part].sum().clamp(min=1) for name, part in parts.items()}
        return metrics | {"replayed": torch.full_like(metrics["loss"], len(slots_B) - fresh)}

    def _weigh_replayed(self, logits_BLV: Tensor, labels_BL: Tensor, fresh: int) -> None:
        """Scale gradients so that a token of a replayed sequence counts `replay_weight` times in the mean. That mean is not reported
        anywhere, so only gradients are scaled, and a fused loss needs no other kernel."""
        counted_B = (labels_BL != IGNORED).sum(1).float()
        weight_B = torch.ones_like(counted_B)
        weight_B[fresh:] = self.memory.replay_weight
        scale_B11 = (weight_B * counted_B.sum() / (weight_B * counted_B).sum().clamp(min=1e-30))[:, None, None]
        logits_BLV.register_hook(lambda slope_BLV: slope_BLV * scale_B11.to(slope_BLV.dtype))  # type: ignore[no-untyped-call]

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
        chosen, punished = penalties.weights(self.penalties), None
        if self.penalised:
            punished = fused_loss.Punished(self.marks(batch), chosen, self.penalties.repetition_window, self.eos_id)
        total, figures = fused_loss.cross_entropy(logits_NV, labels_N, self.vocab_size, IGNORED, punished)
        names = ("loss", *penalties.NAMES)
        return total, {name: figures[i] for i, name in enumerate(names) if i == 0 or chosen[i - 1]}

    def marks(self, batch: Batch) -> penalties.Marks:
        labels_BL = batch["labels"]
        early_BL = self.places(batch) < self.penalties.min_sequence_length
        real_BL, lengths_BM = batch.get("attention_mask"), batch.get(DOCUMENT_LENGTHS)
        return penalties.marks(batch["input_ids"], labels_BL, labels_BL != IGNORED, real_BL, early_BL, lengths_BM)

    def outputs(self, batch: Batch) -> tuple[Tensor, Any]:
        """Logits, and what the model gives beside them (None: nothing).

        On a GPU the logits have columns added up to a multiple of 64, since its matrix units are a good deal slower on odd sizes.
        Padding on the right needs no mask: a causal model never looks there, and the fast attention takes none.
        """
        model: Any = self.players["model"]
        ids, keywords = batch["input_ids"], self.beside_tokens(batch)
        beside = keywords.get("beside")
        if ids.is_cuda and hasattr(model, "output_weight"):
            return F.linear(model.hidden(ids, **keywords), F.pad(model.output_weight, (0, 0, 0, -self.vocab_size % 64))), beside
        return model(ids, **keywords), beside

    def beside_tokens(self, batch: Batch) -> dict[str, Any]:
        """The keyword arguments of the model besides the tokens of a batch."""
        model: Any = self.players["model"]
        keywords: dict[str, Any] = {}
        if hasattr(model, "new_beside"):
            columns = {name: batch[name] for name in READ_BESIDE if name in batch}
            keywords["beside"] = model.new_beside(counted_BL=batch["labels"] != IGNORED, **columns)
        if self.left_padding and "attention_mask" in batch:
            keywords["attention_mask"] = batch["attention_mask"]
        if DOCUMENT_LENGTHS in batch:
            keywords[DOCUMENT_LENGTHS] = batch[DOCUMENT_LENGTHS]
        return keywords

    @property
    def vocab_size(self) -> int:
        return int(self.players["model"].vocab_size)  # type: ignore[arg-type]

    @property
    def penalised(self) -> bool:
        return any(penalties.weights(self.penalties))

    def places(self, batch: Batch) -> Tensor:
        """How many tokens of its document stand before each: counted from the first real token, and anew after an end of text and at each
        document of a packed row."""
        ids_BL = batch["input_ids"]
        index_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
        starts_BL = ids_BL.eq(-1 if self.eos_id is None else self.eos_id).roll(1, 1)
        starts_BL[:, 0] = True
        if "attention_mask" in batch:
            starts_BL |= batch["attention_mask"] & ~batch["attention_mask"].roll(1, 1)
        if DOCUMENT_LENGTHS in batch:
            starts_BL |= penalties.document_starts(batch[DOCUMENT_LENGTHS], ids_BL.shape[1])
        return index_L - (index_L * starts_BL).cummax(1).values

    def _held_out_loss(self, batch: Batch) -> Tensor:
        if self.evaluates_in_training_mode:
            with torch.enable_grad():  # what is compiled for training steps is compiled with gradients
                logits_BLV = self.outputs(self._filled(batch))[0].detach()[: len(batch["labels"])]
        elif self._selects(batch := self._without_padding(batch)):
            return self._in_pieces(batch)[0]
        else:
            logits_BLV = self.outputs(batch)[0]
        return cross_entropy(logits_BLV[..., : self.vocab_size], batch["labels"])

    def _filled(self, batch: Batch) -> Batch:
        """The last batch, which may have fewer rows, with rows that do not count: other sizes would be compiled anew."""
        rows = len(batch["labels"])
        self._most_rows = max(self._most_rows, rows)
        if rows == self._most_rows:
            return batch
        return {name: torch.cat([value, value[-1:].expand(self._most_rows - rows, *value.shape[1:])]) for name, value in batch.items()}

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        losses = {"loss": self._held_out_loss(batch)}
        for name, columns in _LEFT_OUT.items():
            if columns[0] in batch:
                losses[name] = self._held_out_loss({column: value for column, value in batch.items() if column not in columns})
        if self.memory is not None:
            self.memory.reading = False
            losses["loss_without_memory"] = self._held_out_loss(batch)
            self.memory.reading = True
        return losses

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        result = super().evaluate(batches)
        if "loss" in result:
            result["perplexity"] = math.exp(min(result["loss"], 700.0))
        return result


def cross_entropy(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """The mean over the tokens that count; 0 if none does."""
    total = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels_BL != IGNORED).sum().clamp(min=1)
