"""Episodic memory: a bounded store of training sequences, whose hidden states are retrieved by similarity and whose tokens are replayed.

An episode is one training sequence: the means of its hidden states over a few segments, its tokens, and its importance. Importance is the
sequence's loss times the norm of the gradient at its hidden states, relative to the mean norm of its batch. It decays with every step and
is computed anew when the sequence is replayed; a new episode replaces the least important one. Nothing in the memory is trained.

A chunk retrieves episodes by its mean hidden state, and only the tokens after the chunk attend to them, so the model stays causal. A
sequence never retrieves an episode that began with the same tokens, since that may be the sequence itself.

In a run of many workers each reports its most important new episodes to the coordinator, whose memory consists of those. The coordinator
sends its newest episodes with the weights, and workers store them beside their own.

Shapes: B batch, L tokens, D width, N episodes, T longest sequence, U chunks, K episodes of a chunk, V vectors of an episode, W written,
R numbers of a reported episode: importance, T inputs, T labels, V · D of the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.compile_rules import not_compiled
from shoal.models.generation.kv_cache import KeyValueCache
from shoal.models.step_state import StepState
from shoal.models.transformer import NEVER, EncodedContext, LayerInputs

IGNORED = -100
_EMPTY = -1.0
_FADING = 0.999
"""Decay of an episode's importance per step: half is left after about 700 steps."""
_WRITTEN = 4
"""New sequences, and replayed ones, that one process stores per step at most."""
_SENT = 8
"""Episodes in a worker's report, and in what the coordinator sends with new weights."""
_MOST_IMPORTANT = 100.0
"""Largest importance a worker may report: about the loss of an untrained model with ten times the mean norm of its batch."""
_BASE = 6364136223846793005
"""Base of the polynomial hash of token sequences, modulo 2^64."""


class PendingEpisodes(NamedTuple):
    """Sequences of this step that may become episodes."""

    vectors_BVD: Tensor
    norms: list[Tensor]
    """The gradient norm of each sequence, once the backward pass has run."""
    scored: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    """Inputs, labels, losses and memory slots of the sequences; slot −1: not replayed."""


class RecallState(NamedTuple):
    """What a text that is being generated has retrieved so far; kept in its KV cache."""

    sum_BD: Tensor
    """Sum of the hidden states of the incomplete chunk."""
    code_B: Tensor
    """Hash of the tokens so far."""
    recalled: EncodedContext | None
    merged: tuple[EncodedContext | None, EncodedContext | None, EncodedContext | None] = (None, None, None)
    """The given context, the retrieved one, and both joined."""


class _Chunks(NamedTuple):
    """Which chunks the new tokens of each row belong to. Positions count from a row's first real token."""

    size: int
    past: int
    """Columns in the cache."""
    start_B: Tensor
    """The column of each row's first real token."""
    place_BL: Tensor
    real_BL: Tensor | None
    """False at padding; None: there is none."""
    first_B: Tensor
    """The chunk of each row's first new token."""
    complete_B: Tensor
    """Chunks that the new tokens complete."""
    complete: int
    """The maximum of `complete_B`."""

    @classmethod
    def of(cls, inputs: LayerInputs, length: int, size: int) -> _Chunks:
        ids_BL, past = inputs.input_ids_BL, inputs.past
        real_BS = inputs.real_BS
        if real_BS is None:
            real_BS = torch.ones(1, past + length, dtype=torch.bool, device=ids_BL.device).expand(len(ids_BL), -1)
        real_BS = real_BS.bool()
        count_BS = real_BS.long().cumsum(1)
        before_B = count_BS[:, past - 1] if past else torch.zeros_like(count_BS[:, 0])
        first_B, complete_B = before_B // size, count_BS[:, -1] // size - before_B // size
        place_BL = (count_BS[:, past:] - 1).clamp(min=0)
        real_BL = None if inputs.real_BS is None else real_BS[:, past:]
        return cls(size, past, real_BS.long().argmax(1), place_BL, real_BL, first_B, complete_B, int(complete_B.max()))

    @property
    def ends_BU(self) -> Tensor:
        """End positions of the chunks that are complete now; some rows may have fewer than others."""
        return (self.first_B[:, None] + torch.arange(1, self.complete + 1, device=self.first_B.device)) * self.size

    @property
    def is_complete_BU(self) -> Tensor:
        return torch.arange(self.complete, device=self.first_B.device) < self.complete_B[:, None]

    def column(self, place_BU: Tensor) -> Tensor:
        """The column of each position among the new tokens; arbitrary where it is not among them."""
        return (place_BU + self.start_B[:, None] - self.past).clamp(0, self.place_BL.shape[1] - 1)

    def sums(self, x_BLD: Tensor) -> Tensor:
        """Sums [B, U, D] of the hidden states of each chunk; of the first chunk only the part that is not in the cache."""
        (B, _, D), chunk_BL = x_BLD.shape, self.place_BL // self.size - self.first_B[:, None]
        chunk_BL = chunk_BL.clamp(min=0)
        wide = max(self.complete, int(chunk_BL.max())) + 1
        empty = torch.zeros(B * wide, D, device=x_BLD.device)
        flat_N = (chunk_BL + wide * torch.arange(B, device=x_BLD.device)[:, None]).flatten()
        real_BLD = x_BLD.float() if self.real_BL is None else torch.where(self.real_BL.unsqueeze(2), x_BLD.float(), 0.0)
        return empty.index_add_(0, flat_N, real_BLD.flatten(0, 1)).view(B, wide, D)

    def left(self, sums_BUD: Tensor) -> Tensor:
        """The sum [B, D] of each row's incomplete chunk."""
        return sums_BUD[torch.arange(len(sums_BUD), device=sums_BUD.device), self.complete_B]


class EpisodicMemory(StepState):
    """The episodes, as buffers that are saved with the weights."""

    def __init__(self, settings: schema.Moe, vocab_size: int) -> None:
        super().__init__()
        memory, width, longest = settings.episodic_memory, settings.hidden_size, settings.max_seq_len
        if memory.chunk_size >= longest:
            raise ShoalError(
                f"model.episodic_memory.chunk_size: what a chunk of {memory.chunk_size} tokens recalls is read by the tokens after it, "
                f"and a sequence has {longest} (model.max_seq_len): set it lower"
            )
        self.top_k, self.chunk_size = min(memory.top_k, memory.capacity), memory.chunk_size
        self.replay_rate, self.replay_weight = memory.replay_rate, memory.replay_weight
        self.layer = settings.num_layers // 2 - 1 if settings.num_layers > 1 else -1
        """The layer after which the memory is read and written; −1: before the first layer."""
        self.reading = True
        """Whether episodes are retrieved. Switched off to measure the loss without memory."""
        self.reports = False
        """Whether episodes are exchanged with other workers."""
        self.vocab_size, N = vocab_size, memory.capacity
        self.register_buffer("vectors_NVD", torch.zeros(N, memory.vectors, width))
        self.register_buffer("ids_NT", torch.full((N, longest), -1, dtype=torch.int32))
        self.register_buffer("labels_NT", torch.full((N, longest), IGNORED, dtype=torch.int32))
        self.register_buffer("importance_N", torch.full((N,), _EMPTY))
        self.register_buffer("powers_T", _powers(longest), persistent=False)
        self.register_buffer("received_WR", torch.full((_SENT, 1 + 2 * longest + memory.vectors * width), _EMPTY), persistent=False)
        self._seen: list[PendingEpisodes] = []
        self._unreported = self.received_WR[:0]

    vectors_NVD: Tensor
    ids_NT: Tensor
    labels_NT: Tensor
    importance_N: Tensor
    powers_T: Tensor
    received_WR: Tensor
    """The coordinator's episodes of its last round."""

    # --- retrieval -----------------------------------------------------------------------------------

    @not_compiled
    @torch.no_grad()
    def recall(self, x_BLD: Tensor, inputs: LayerInputs, cache: KeyValueCache | None) -> EncodedContext | None:
        """The context of the layers above: the given context, and the episodes that complete chunks retrieve."""
        if not self.reading or not bool((self.importance_N > _EMPTY).any()):
            return inputs.context
        thread = cache.memory if cache is not None and cache.memory is not None else self._begin(x_BLD)
        chunks = _Chunks.of(inputs, x_BLD.shape[1], self.chunk_size)
        codes_BL = self._codes(inputs.input_ids_BL, chunks) + thread.code_B[:, None]
        sums_BUD = chunks.sums(x_BLD)
        sums_BUD[:, 0] += thread.sum_BD
        recalled = thread.recalled
        if chunks.complete:
            recalled = _appended(recalled, self._nearest(sums_BUD[:, : chunks.complete], codes_BL, chunks, x_BLD.dtype), chunks)
        merged = thread.merged
        if merged[2] is None or merged[0] is not inputs.context or merged[1] is not recalled:
            merged = (inputs.context, recalled, _joined(inputs.context, recalled) or _nothing(x_BLD))
        if cache is not None:
            cache.memory = RecallState(chunks.left(sums_BUD), codes_BL[:, -1], recalled, merged)
        return merged[2]

    def _begin(self, x_BLD: Tensor) -> RecallState:
        nothing_B = torch.zeros(len(x_BLD), dtype=torch.int64, device=x_BLD.device)
        return RecallState(torch.zeros_like(x_BLD[:, 0], dtype=torch.float32), nothing_B, None)

    def _codes(self, ids_BL: Tensor, chunks: _Chunks) -> Tensor:
        """Prefix hashes: one for the tokens up to each position. Padding does not change them."""
        terms_BL = (ids_BL.long() + 1) * self.powers_T[chunks.place_BL]
        return (terms_BL if chunks.real_BL is None else terms_BL * chunks.real_BL).cumsum(1)

    def _nearest(self, sums_BUD: Tensor, codes_BL: Tensor, chunks: _Chunks, dtype: torch.dtype) -> EncodedContext:
        """The episodes that the complete chunks retrieve, as a context of U · K · V vectors."""
        keys_ND = F.normalize(self.vectors_NVD.mean(1), dim=1)
        likeness_BUN = F.normalize(sums_BUD, dim=2) @ keys_ND.t()
        ends_BU = chunks.ends_BU
        codes_BU = codes_BL.gather(1, chunks.column(ends_BU - 1))
        of_all_NT = ((self.ids_NT.long() + 1) * self.powers_T).cumsum(1)
        own_BUN = of_all_NT.t()[(ends_BU - 1).clamp(max=of_all_NT.shape[1] - 1)] == codes_BU[:, :, None]
        likeness_BUN = likeness_BUN.masked_fill(own_BUN | (self.importance_N <= _EMPTY), -torch.inf)
        near = likeness_BUN.topk(self.top_k, dim=2)
        states_BUKVD = self.vectors_NVD[near.indices].to(dtype)
        first_BU1 = (ends_BU + chunks.start_B[:, None]).masked_fill(~chunks.is_complete_BU, NEVER).unsqueeze(2)
        first_BUK = torch.where(near.values > -torch.inf, first_BU1, NEVER)
        first_BUKV = first_BUK.unsqueeze(-1).expand(-1, -1, -1, states_BUKVD.shape[3])
        return EncodedContext(states_BUKVD.flatten(1, 3), first_BUKV.flatten(1))

    # --- storing episodes ----------------------------------------------------------------------------

    @not_compiled
    def watch(self, x_BLD: Tensor) -> None:
        """Called in training with the hidden states at the memory's layer: record their means, and later their gradient norms."""
        norms: list[Tensor] = []
        if self.counting and x_BLD.requires_grad:
            x_BLD.register_hook(lambda slope_BLD: norms.append(_norms(slope_BLD)))  # type: ignore[no-untyped-call]
            pooled = F.adaptive_avg_pool1d(x_BLD.detach().float().transpose(1, 2), self.vectors_NVD.shape[1]).transpose(1, 2)
            self._seen.append(PendingEpisodes(F.rms_norm(pooled, (pooled.shape[2],)), norms, []))

    def score(self, ids_BL: Tensor, labels_BL: Tensor, losses_B: Tensor, slots_B: Tensor) -> None:
        """Record the losses of the sequences of the last `watch`."""
        if self._seen and self.counting:
            self._seen[-1].scored.append((ids_BL, labels_BL, losses_B.detach().float(), slots_B))

    def begin_step(self) -> None:
        self._seen = []

    @torch.no_grad()
    def end_step(self) -> None:
        """Store the episodes that all processes chose. Holds: all processes make the same changes."""
        of_all_ranks = self._gathered(self._chosen())
        self._seen = []
        if not bool((of_all_ranks[0] > _EMPTY).any()):
            return  # policy gradients only read the memory: see docs/mixtures.md
        self._fade()
        self._write(of_all_ranks)
        if self.reports:
            self._queue_report(*of_all_ranks)

    def _fade(self) -> None:
        self.importance_N[self.importance_N > _EMPTY] *= _FADING

    def _write(self, episodes: Sequence[Tensor]) -> None:
        for importance, slot, ids_T, labels_T, vectors_VD in zip(*episodes, strict=True):
            chosen = self._choose_slot(float(importance), int(slot), ids_T)
            if chosen is not None:
                self.importance_N[chosen], self.vectors_NVD[chosen] = importance, vectors_VD
                self.ids_NT[chosen], self.labels_NT[chosen] = ids_T.int(), labels_T.int()

    def _choose_slot(self, importance: float, slot: int, ids_T: Tensor) -> int | None:
        """The slot of an episode: its present one, else that of the least important episode if this one is more important."""
        if importance <= 0:
            return None
        same = (self.ids_NT == ids_T.int()).all(1) & (self.importance_N > _EMPTY)
        if bool(same.any()):
            return int(same.int().argmax())
        if slot >= 0:
            return None  # the replayed episode has been replaced meanwhile
        least = int(self.importance_N.argmin())
        return least if importance > float(self.importance_N[least]) else None

    def _chosen(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """This process's most important sequences: importance, slot, inputs, labels, vectors. Importance −1 marks empty rows."""
        W, T, (_, V, D) = 2 * _WRITTEN, self.ids_NT.shape[1], self.vectors_NVD.shape
        device = self.ids_NT.device
        importance_W = torch.full((W,), _EMPTY, device=device)
        slot_W = torch.full((W,), -1, dtype=torch.int64, device=device)
        ids_WT, labels_WT = (torch.full((W, T), fill, dtype=torch.int64, device=device) for fill in (-1, IGNORED))
        vectors_WVD = torch.zeros(W, V, D, device=device)
        for row, (importance, slot, ids_L, labels_L, vectors_VD) in enumerate(self._best()):
            importance_W[row], slot_W[row], vectors_WVD[row] = importance, slot, vectors_VD
            ids_WT[row, : len(ids_L)], labels_WT[row, : len(labels_L)] = ids_L, labels_L
        return importance_W, slot_W, ids_WT, labels_WT, vectors_WVD

    def _best(self) -> list[tuple[float, int, Tensor, Tensor, Tensor]]:
        found: list[tuple[float, int, Tensor, Tensor, Tensor]] = []
        for seen in self._seen:
            if seen.norms and seen.scored:
                ids_BL, labels_BL, losses_B, slots_B = seen.scored[0]
                norms_B = torch.where(slots_B < 0, seen.norms[0], seen.norms[0] / self.replay_weight)
                importance_B = torch.nan_to_num(losses_B * norms_B / norms_B.mean().clamp(min=1e-30), nan=0.0, posinf=0.0)
                rows = zip(importance_B.tolist(), slots_B.tolist(), ids_BL, labels_BL, seen.vectors_BVD, strict=True)
                found += [row for row in rows if bool(torch.isfinite(row[4]).all())]
        found.sort(key=lambda one: -one[0])
        replayed = [one for one in found if one[1] >= 0]
        return replayed[:_WRITTEN] + [one for one in found if one[1] < 0][:_WRITTEN]

    def _gathered(self, own: tuple[Tensor, ...]) -> list[Tensor]:
        """The rows of all processes, in the order of their ranks."""
        gathered = []
        for values in own:
            of_all_ranks = values.new_zeros(self.ranks, *values.shape)
            of_all_ranks[self.rank] = values
            gathered.append(self.total(of_all_ranks).flatten(0, 1))
        return gathered

    # --- exchange between workers --------------------------------------------------------------------

    def _queue_report(self, importance_W: Tensor, slot_W: Tensor, ids_WT: Tensor, labels_WT: Tensor, vectors_WVD: Tensor) -> None:
        rows_WR = torch.cat([importance_W[:, None], ids_WT.float(), labels_WT.float(), vectors_WVD.flatten(1)], 1)
        rows_WR = torch.cat([self._unreported.to(rows_WR), rows_WR[(slot_W < 0) & (importance_W > 0)]])
        self._unreported = rows_WR[rows_WR[:, 0].argsort(descending=True, stable=True)[:_SENT]]

    def state(self) -> list[Tensor]:
        return [self.received_WR] if self.reports else []

    def take_movement(self) -> list[Tensor]:
        if not self.reports:
            return []
        rows_WR = torch.full_like(self.received_WR, _EMPTY)
        rows_WR[: len(self._unreported)], self._unreported = self._unreported, self._unreported[:0]
        return [rows_WR]

    def pending(self) -> list[Tensor]:
        return [self._unreported] if len(self._unreported) else []

    def load_pending(self, values: list[Tensor]) -> None:
        self._unreported = values[0] if values else self._unreported[:0]

    def apply_movement(self, movement: list[Tensor]) -> None:
        for rows_WR in movement:
            self.received_WR.copy_(self._believable(rows_WR))
            self._fade()
            self.on_state_loaded()

    def on_state_loaded(self) -> None:
        """Store the received episodes. Their vectors were computed with older weights, as those of all episodes."""
        if not self.reports:
            return
        T, vectors_NVD = self.ids_NT.shape[1], self.vectors_NVD
        there_WR = self.received_WR[self.received_WR[:, 0] > 0]
        importance_W, ids_WT, labels_WT, vectors_WX = torch.split(there_WR, [1, T, T, vectors_NVD[0].numel()], 1)
        new_W = torch.full((len(there_WR),), -1)
        self._write((importance_W[:, 0], new_W, ids_WT.long(), labels_WT.long(), vectors_WX.view(-1, *vectors_NVD.shape[1:])))

    def _believable(self, rows_WR: Tensor) -> Tensor:
        """Reported episodes, with the importance of impossible ones set to empty and all values clamped to their bounds."""
        T, limit = self.ids_NT.shape[1], self.vectors_NVD.shape[2] ** 0.5
        importance_W, ids_WT, labels_WT, vectors_WX = torch.split(rows_WR, [1, T, T, rows_WR.shape[1] - 1 - 2 * T], 1)
        sound_WT = (ids_WT >= -1) & (ids_WT < self.vocab_size) & (ids_WT == ids_WT.round())
        sound_WT &= (labels_WT == IGNORED) | ((labels_WT >= 0) & (labels_WT < self.vocab_size) & (labels_WT == labels_WT.round()))
        importance_W = torch.where(sound_WT.all(1, keepdim=True), importance_W.clamp(max=_MOST_IMPORTANT), _EMPTY)
        return torch.cat([importance_W, ids_WT, labels_WT, vectors_WX.clamp(-limit, limit)], 1)

    # --- replay --------------------------------------------------------------------------------------

    @torch.no_grad()
    def mixed(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """A batch with replayed sequences, drawn by importance, after its own; and the slot of each sequence, −1 for its own."""
        ids_BL = batch["input_ids"]
        own_B = torch.full((len(ids_BL),), -1, dtype=torch.int64, device=ids_BL.device)
        wanted = int(len(ids_BL) * self.replay_rate + float(torch.rand(()))) if self.replay_rate else 0
        filled = (self.importance_N > 0).nonzero().flatten()
        if not wanted or len(filled) < wanted:
            return batch, own_B
        slots_R = filled[torch.multinomial(self.importance_N[filled].cpu(), wanted).to(filled.device)]
        width = max(ids_BL.shape[1], int((self.ids_NT[slots_R] >= 0).sum(1).max()))
        replayed = {"input_ids": self.ids_NT[slots_R, :width].long().clamp(min=0), "labels": self.labels_NT[slots_R, :width].long()}
        replayed["attention_mask"] = self.ids_NT[slots_R, :width] >= 0
        mixed = {name: _append(value, replayed.get(name), wanted, width, _FILL[name]) for name, value in batch.items()}
        return mixed, torch.cat([own_B, slots_R])


_FILL = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0, "context_ids": -1, "passage_ids": -1, "passage_from": 0}
"""Padding value of each batch column."""


def _append(own: Tensor, more: Tensor | None, count: int, width: int, fill: int) -> Tensor:
    """Append rows to a column. Replayed sequences have no side texts."""
    if more is None:
        return torch.cat([own, own.new_full((count, *own.shape[1:]), fill)])
    return torch.cat([F.pad(own, (0, width - own.shape[1]), value=fill), F.pad(more, (0, width - more.shape[1]), value=fill).to(own.dtype)])


def _nothing(x_BLD: Tensor) -> EncodedContext:
    """A context that no token may read: with sharded parameters all rows must run the same modules."""
    return EncodedContext(torch.zeros_like(x_BLD[:, :1]), torch.full_like(x_BLD[:, :1, 0], NEVER, dtype=torch.int64))


def _joined(first: EncodedContext | None, second: EncodedContext | None) -> EncodedContext | None:
    if first is None or second is None:
        return first or second
    return EncodedContext(torch.cat([first.states_BCD, second.states_BCD], 1), torch.cat([first.first_BC, second.first_BC], 1))


def _appended(before: EncodedContext | None, found: EncodedContext, chunks: _Chunks) -> EncodedContext:
    """Earlier and new retrievals, each at the index of its chunk, so that rows which complete chunks at different times have no gaps."""
    each = found.first_BC.shape[1] // chunks.complete
    width = each * int((chunks.first_B + chunks.complete_B).max())
    known = EncodedContext(found.states_BCD[:, :0], found.first_BC[:, :0]) if before is None else before
    states_BCD, first_BC = (one.clone() for one in known.widened(max(width, known.first_BC.shape[1])))
    row_N, chunk_N = chunks.is_complete_BU.nonzero(as_tuple=True)
    place_NX = ((chunks.first_B[row_N] + chunk_N) * each)[:, None] + torch.arange(each, device=row_N.device)
    from_NX = (chunk_N * each)[:, None] + torch.arange(each, device=row_N.device)
    states_BCD[row_N[:, None], place_NX] = found.states_BCD[row_N[:, None], from_NX]
    first_BC[row_N[:, None], place_NX] = found.first_BC[row_N[:, None], from_NX]
    return EncodedContext(states_BCD, first_BC)


def _norms(slope_BLD: Tensor) -> Tensor:
    return torch.linalg.vector_norm(slope_BLD.float(), dim=(1, 2))


def _powers(length: int) -> Tensor:
    powers, power = [], 1
    for _ in range(length):
        powers.append(power - 2**64 if power >= 2**63 else power)
        power = power * _BASE % 2**64
    return torch.tensor(powers)
