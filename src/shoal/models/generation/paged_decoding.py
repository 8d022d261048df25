"""Decoding with paged KV caches: a slot for each text, and a step that gives each of some slots a token.

On a GPU the step is compiled and recorded as a CUDA graph for some numbers of rows, and rows that stand for no text fill the rest. The
tokens, positions and decoding of all slots are on the GPU, so a step needs nothing from the one before but its end: the next one can be
started before the tokens of the last one are read. On other devices the same step is computed without recording.

Shapes: B batch, T tokens of prompts, R rows, N slots, P pages of a slot, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.models.compile_rules import exclude_from_compilation
from shoal.models.generation.choice_state import ChoiceState
from shoal.models.generation.decoding import NO_PENALTIES, LogitPenalties, Warp
from shoal.models.generation.paged_cache import DecodingLayer, PagePool, PageTables, PromptTokens, ReadingLayer, pages_for
from shoal.models.generation.slot_choice import SlotPenalties, choose_in_slots
from shoal.models.generation.token_masks import SlotMasks
from shoal.models.gpt import Attention, Gpt
from shoal.models.kernels import HAS_TRITON
from shoal.models.layers.expert_layer import ExpertLayer, products_are_grouped
from shoal.models.moe import Moe
from shoal.models.transformer import LayerInputs

MOST_LIKELY = 20
"""Likely tokens whose log-probabilities a step gives, if it gives any."""
READ_RUNGS = (128, 512, 2048)
"""Numbers of tokens of prompts for which reading is recorded."""
MOST_READ = READ_RUNGS[-1]
_MOST_RECOMPILED = 512


class PromptPiece(NamedTuple):
    """Tokens of a text that are read in a row with others."""

    text: int
    """The text's number in its batch."""
    slot: int
    start: int
    """The position of the first of them."""
    first: int
    """The place of the first of them in the row."""
    taken: Sequence[int]


class StepKind(NamedTuple):
    """What a step computes beside the tokens."""

    penalties: bool = False
    likely: bool = False
    """Log-probabilities of the chosen and of the most likely tokens, before penalties, masks and decoding."""
    masks: bool = False
    """Only tokens that the slots' masks allow are chosen."""


class StepChoices(NamedTuple):
    """What a step has chosen, row by row, on the device. A later step may overwrite it."""

    tokens_R: Tensor
    """−1 where the logits were not finite."""
    log_probs_R: Tensor
    """In the distribution that each token was drawn from."""
    values_R: Tensor | None = None
    """Of the value head; None: there is none."""
    likely: tuple[Tensor, Tensor, Tensor] | None = None
    """Log-probabilities of the tokens [R], the most likely tokens [R, 20] and their log-probabilities."""

    def first(self, rows: int) -> StepChoices:
        likely = None if self.likely is None else tuple(one[:rows] for one in self.likely)
        values_R = None if self.values_R is None else self.values_R[:rows]
        return StepChoices(self.tokens_R[:rows], self.log_probs_R[:rows], values_R, likely)  # type: ignore[arg-type]


def can_page(model: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Whether the model's caches can be paged: a GPT or a mixture of experts that reads nothing beside its input, whose attention the
    kernel computes, and whose steps can be recorded, if it is on a GPU. `dtype`: the type that it will have; None: its own."""
    if type(model) not in (Gpt, Moe) or model.reader is not None or model.memory is not None:
        return False
    weight: Tensor = model.token_embedding.weight
    if type(weight.data) is not Tensor or not weight.is_cuda:
        return type(weight.data) is Tensor
    if not HAS_TRITON:
        return False
    from shoal.models.kernels.paged_attention import takes

    sizes = {part.head_size for part in model.modules() if isinstance(part, Attention)}
    layers = [part for part in model.modules() if isinstance(part, ExpertLayer)]
    dtype = dtype or weight.dtype
    return all(takes(size, dtype) for size in sizes) and all(products_are_grouped(layer, dtype) for layer in layers)


class PagedDecoder:
    """Slots for texts. Slot 0 is no text's."""

    def __init__(self, model: Any, *, rows: int, longest: int, tokens: int, compiles: bool = True) -> None:
        """`rows`: texts at the same time; `longest`: tokens that one may have; `tokens`: of all texts together."""
        attention: Any = next(part for part in model.modules() if isinstance(part, Attention))
        weight = model.token_embedding.weight
        self.model, self.device, self.most_rows, self.compiles = model, weight.device, rows, compiles
        self.records = self.device.type == "cuda"
        self.pool = PagePool(
            len(model.blocks), attention.kv_heads, attention.head_size, pages_for(tokens) + rows, weight.dtype, self.device
        )
        slots, pages = rows + 1, pages_for(longest)
        zeros = torch.zeros(4, slots, dtype=torch.float32, device=self.device)
        whole = torch.zeros(2, slots, dtype=torch.long, device=self.device)
        top_k_N = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self.state = ChoiceState(zeros[0], top_k_N, zeros[1], zeros[2], whole[0], whole[1])
        self.tables_NP = torch.zeros(slots, pages, dtype=torch.int32, device=self.device)
        self.penalties: SlotPenalties | None = None
        self.masks: SlotMasks | None = None
        self._rows_R = torch.zeros(up_to_rung(rows), dtype=torch.long, device=self.device)
        self._draws_R = torch.zeros(up_to_rung(rows), dtype=torch.float64, device=self.device)
        self._placed: tuple[int, ...] = ()
        self._prompt_3T = torch.zeros(3, MOST_READ, dtype=torch.long, device=self.device)
        """Ids, slots and positions of the tokens of prompts that are read."""
        self._align = 1
        if self.records:
            from shoal.models.kernels.paged_attention import tokens_of_block

            self._align = tokens_of_block(attention.query_heads // attention.kv_heads)
        self._free = list(range(rows, 0, -1))
        self._pages: dict[int, list[int]] = {}
        self.held: dict[int, int] = {}
        """Tokens that a slot's pages hold, or will once the started work is done."""
        self._recordings: dict[tuple[int, StepKind], tuple[Any, StepChoices]] = {}
        self._read_recordings: dict[int, tuple[Any, Tensor]] = {}
        self._memory: Any = None

    # --- slots -------------------------------------------------------------------------------------

    def open(self, tokens: int, warp: Warp, penalties: LogitPenalties = NO_PENALTIES, prompt_ids: Sequence[int] = ()) -> int | None:
        """A slot for a text of at most `tokens` tokens; None: there is no slot, or not enough free pages. With penalties, the steps of
        this slot must be of a kind that has them."""
        if not self._free or self.pool.free < pages_for(tokens):
            return None
        slot = self._free.pop()
        self._pages[slot], self.held[slot] = self.pool.take(pages_for(tokens)), 0
        self._fill_table(slot)
        values = (warp.temperature, warp.top_k or 0, 1.0 if warp.top_p is None else warp.top_p, warp.min_p or 0.0)
        for target_N, value in zip(self.state, values, strict=False):
            target_N[slot] = value
        if penalties != NO_PENALTIES and self.penalties is None:
            self.penalties = SlotPenalties(self.most_rows + 1, self.model.vocab_size, self.device)
        if self.penalties is not None:
            self.penalties.open(slot, penalties, prompt_ids)
        if self.masks is not None:
            self.masks.open(slot)
        return slot

    def mask(self, slots: Sequence[int], masks: Sequence[Tensor | None]) -> None:
        """The tokens that the next ones of these texts are chosen from, a bit for each; None: all, as before. The steps of such a slot must
        be of a kind that has masks."""
        given = {slot: mask for slot, mask in zip(slots, masks, strict=False) if mask is not None}
        if given:
            if self.masks is None:
                self.masks = SlotMasks(self.most_rows + 1, self.model.vocab_size, self.device)
            words_KW = torch.stack(list(given.values()))
            words_KW = words_KW.pin_memory().to(self.device, non_blocking=True) if self.records else words_KW.to(self.device)
            self.masks.replace([*given], self._sent([*given], torch.long), words_KW)

    def begin_with(self, slot: int, pages: Sequence[int], tokens: int) -> None:
        """A new text begins with the first tokens in these pages: it shares those that are full, and copies the rest."""
        own, full = self._pages[slot], tokens // (size := _page_size(self.pool))
        self.pool.share(pages[:full])
        self.pool.give_back(own[:full])
        own[:full] = pages[:full]
        if tokens % size:
            self.pool.copy(pages[full], own[full], tokens % size)
        self.held[slot] = tokens
        self._fill_table(slot)

    def close(self, slot: int, keep: bool = False) -> list[int]:
        """Free a slot. `keep`: the pages that hold its tokens stay in use, and are returned; later they are given back to the pool."""
        pages, tokens = self._pages.pop(slot), self.held.pop(slot)
        kept = pages_for(tokens) if keep else 0
        self.pool.give_back(pages[kept:])
        self._free.append(slot)
        return pages[:kept]

    def _fill_table(self, slot: int) -> None:
        pages = self._pages[slot]
        self.tables_NP[slot] = 0
        self.tables_NP[slot, : len(pages)] = self._sent(pages, torch.int32)

    def _sent(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Values on the device, without waiting for it."""
        made = torch.tensor(values, dtype=dtype)
        return made.pin_memory().to(self.device, non_blocking=True) if self.records else made.to(self.device)

    # --- prompts -----------------------------------------------------------------------------------

    def read(self, slots: Sequence[int], ids: Sequence[Sequence[int]], draws: Sequence[float] | None, kind: StepKind) -> StepChoices | None:
        """Append tokens to texts. `draws`: choose the next tokens; None: more of these prompts follows."""
        last = [torch.empty(0)] * len(slots)
        for index, x_LD in self._read_pieces(slots, ids):
            last[index] = x_LD[-1]
        return None if draws is None else self._choose_first(slots, last, draws, kind)

    def read_whole(
        self, slots: Sequence[int], ids: Sequence[Sequence[int]], draws: Sequence[float] | None, kind: StepKind
    ) -> tuple[StepChoices | None, Tensor]:
        """The same for one text. Also the residual stream [1, L, D] after all layers at these tokens, which no later step overwrites."""
        x_LD = torch.cat([x_TD for _, x_TD in self._read_pieces(slots, ids)])
        return None if draws is None else self._choose_first(slots, [x_LD[-1]], draws, kind), x_LD[None]

    def _read_pieces(self, slots: Sequence[int], ids: Sequence[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        """Append tokens to texts: the number of a text, and the residual stream at some of its tokens."""
        for pieces in self._pieces(slots, ids):
            x_1TD = self._read(pieces)
            for index, slot, _, first, taken in pieces:
                self.held[slot] += len(taken)
                yield index, x_1TD[0, first : first + len(taken)]

    def _choose_first(self, slots: Sequence[int], last: Sequence[Tensor], draws: Sequence[float], kind: StepKind) -> StepChoices:
        """Choose the tokens after the texts from the residual stream at their last ones."""
        rows_B = self._sent(slots, torch.long)
        with computing(self.model):
            self.state.lengths_N[rows_B] = self._sent([self.held[slot] - 1 for slot in slots], torch.long)
            return self._choose(self.model.norm(torch.stack([*last])), rows_B, self._sent(draws, torch.float64), kind)

    def _pieces(self, slots: Sequence[int], ids: Sequence[Sequence[int]]) -> Iterator[list[PromptPiece]]:
        """The tokens in rows of at most `MOST_READ`, in which each text begins at a multiple of `_align`."""
        row: list[PromptPiece] = []
        used = 0
        for index, (slot, whole) in enumerate(zip(slots, ids, strict=True)):
            done = 0
            while done < len(whole):
                if MOST_READ - used < min(self._align, len(whole) - done):
                    yield row
                    row, used = [], 0
                taken = whole[done : done + MOST_READ - used]
                row.append(PromptPiece(index, slot, self.held[slot], used, taken))
                done += len(taken)
                used += -(-len(taken) // self._align) * self._align
                if done < len(whole):
                    yield row
                    row, used = [], 0
        if row:
            yield row

    def _read(self, pieces: Sequence[PromptPiece]) -> Tensor:
        """The residual stream [1, T, D] after all layers."""
        *_, (_, _, _, first, taken) = pieces
        used = -(-(first + len(taken)) // self._align) * self._align
        length = next(rung for rung in READ_RUNGS if rung >= used) if self.records else used
        rows = np.zeros((3, length), np.int64)  # ids, slots, positions
        for _, slot, start, first, taken in pieces:
            part = slice(first, first + len(taken))
            rows[0, part], rows[1, part], rows[2, part] = taken, slot, range(start, start + len(taken))
        sent = torch.from_numpy(rows)
        self._prompt_3T[:, :length].copy_(sent.pin_memory() if self.records else sent, non_blocking=True)
        if self.records and self.compiles:
            if length not in self._read_recordings:
                self._read_recordings[length] = self._recorded(partial(self._read_row, length, ()), self._prompt_3T)
                self._prompt_3T[:, :length].copy_(sent.pin_memory(), non_blocking=True)
            graph, x_1TD = self._read_recordings[length]
            graph.replay()
            return x_1TD.clone()
        with computing(self.model):
            return self._read_row(length, [(slot, first, len(taken), start) for _, slot, start, first, taken in pieces], _block)

    def _read_row(self, length: int, parts: Sequence[tuple[int, int, int, int]], run: Callable[..., Tensor]) -> Tensor:
        ids_1T, slots_1T, positions_1T = self._prompt_3T[:, :length].unsqueeze(1)
        tokens = PromptTokens(slots_1T[0], positions_1T[0], self.tables_NP, parts)
        caches = [ReadingLayer(*buffers, tokens, self.records) for buffers in self.pool.layers]
        return self._through(ids_1T, positions_1T, caches, run)

    def _through(self, ids_BL: Tensor, positions_BL: Tensor, caches: Sequence[Any], run: Callable[..., Tensor]) -> Tensor:
        """The residual stream after all layers."""
        x_BLD = self.model.embed(ids_BL, positions_BL=positions_BL)
        turns = None if self.model.rotary is None else self.model.rotary.turns_SP2[positions_BL]
        inputs = LayerInputs(turns, None, False, ids_BL)
        for block, own in zip(self.model.blocks.children(), caches, strict=True):
            x_BLD = run(block, x_BLD, inputs, own)
        return x_BLD

    def _choose(self, last_BD: Tensor, rows_R: Tensor, draws_R: Tensor, kind: StepKind) -> StepChoices:
        logits_RV, head = self.model.project(last_BD), getattr(self.model, "value_head", None)
        scores_RV = logits_RV
        if kind.penalties and self.penalties is not None:
            scores_RV = self.penalties.apply(logits_RV, rows_R)
        if kind.masks and self.masks is not None:
            scores_RV = self.masks.apply(scores_RV, rows_R)
        tokens_R, log_probs_R = choose_in_slots(scores_RV, rows_R, draws_R, self.state)
        if kind.penalties and self.penalties is not None:
            self.penalties.add(rows_R, tokens_R)
        likely = _likely(logits_RV, tokens_R) if kind.likely else None
        return StepChoices(tokens_R, log_probs_R, None if head is None else head(last_BD), likely)

    # --- steps -------------------------------------------------------------------------------------

    def step(self, slots: Sequence[int], draws: Sequence[float], kind: StepKind) -> StepChoices:
        """Append the last token of each of these texts, and choose the next ones."""
        rows, count = up_to_rung(len(slots)) if self.records else len(slots), len(slots)
        if self.records and (rows, kind) not in self._recordings:
            self.record(rows, kind)
        placed = (*slots, *[0] * (rows - count))
        if placed != self._placed:
            self._rows_R[:rows] = self._sent(placed, torch.long)
            self._placed = placed
        self._draws_R[:count] = self._sent(draws, torch.float64)
        for slot in slots:
            self.held[slot] += 1
        if not self.records:
            with computing(self.model):
                return self._step(rows, kind, _block)
        graph, result = self._recordings[rows, kind]
        graph.replay()
        return result.first(count)

    def _step(self, rows: int, kind: StepKind, run: Callable[..., Tensor]) -> StepChoices:
        rows_R, draws_R = self._rows_R[:rows], self._draws_R[:rows]
        tables = PageTables(rows_R, self.state.lengths_N, self.tables_NP)
        caches = [DecodingLayer(*buffers, tables, self.records) for buffers in self.pool.layers]
        ids_R1, positions_R1 = self.state.tokens_N[rows_R][:, None], self.state.lengths_N[rows_R][:, None]
        return self._choose(self.model.norm(self._through(ids_R1, positions_R1, caches, run)[:, -1]), rows_R, draws_R, kind)

    def record(self, rows: int, kind: StepKind) -> None:
        """Compile and record the step for a number of rows. Meanwhile the rows stand for no text, so nothing is changed."""
        self._placed = ()
        if kind.penalties and self.penalties is None:
            self.penalties = SlotPenalties(self.most_rows + 1, self.model.vocab_size, self.device)
        if kind.masks and self.masks is None:
            self.masks = SlotMasks(self.most_rows + 1, self.model.vocab_size, self.device)
        self._recordings[rows, kind] = self._recorded(partial(self._step, rows, kind), self._rows_R)

    def _recorded(self, work: Callable[[Callable[..., Tensor]], Any], slots: Tensor) -> tuple[Any, Any]:
        """The graph of some work, and its results. `slots` becomes 0, so that the work changes nothing."""
        slots.zero_()
        run = _compiled_block() if self.compiles else _block
        side = _side_stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with computing(self.model), torch.cuda.stream(side), _many_shapes():
            for _ in range(2):  # unrecorded: what is compiled or initialised at first use happens here
                work(run)
            torch.cuda.synchronize(self.device)
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(…): that empties the allocator's cache, which the next training step needs again
            graph.capture_begin(self._memory, capture_error_mode="thread_local")
            try:
                result = work(run)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(side)
        return graph, result

    def record_all(self) -> None:
        """Record the plain step for all numbers of rows, and the reading of prompts."""
        for rows in rungs(self.most_rows):
            if (rows, StepKind()) not in self._recordings:
                self.record(rows, StepKind())
        for length in READ_RUNGS:
            if length not in self._read_recordings:
                self._read_recordings[length] = self._recorded(partial(self._read_row, length, ()), self._prompt_3T)

    def forget_recordings(self) -> None:
        self._recordings.clear()
        self._read_recordings.clear()
        self._memory = None  # that of graphs which are gone cannot be used again


def rungs(most: int) -> list[int]:
    """The numbers of rows that are recorded: powers of two."""
    return [1 << power for power in range(up_to_rung(most).bit_length())]


def up_to_rung(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _page_size(pool: PagePool) -> int:
    return pool.layers[0][0].shape[2]


def _likely(logits_RV: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logprobs_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)).log_softmax(-1)
    best = logprobs_RV.topk(min(MOST_LIKELY, logprobs_RV.shape[1]))
    return logprobs_RV.gather(1, tokens_R.clamp(min=0)[:, None]).squeeze(1), best.indices, best.values


def _block(block: nn.Module, x_BLD: Tensor, inputs: LayerInputs, own: Any) -> Tensor:
    found: Tensor = block(x_BLD, inputs, own)[0]
    return found


@cache
def _compiled_block() -> Callable[..., Tensor]:
    """All blocks of a model share one compiled function for each number of rows."""
    exclude_from_compilation()
    return torch.compile(_block, dynamic=False)


@contextmanager
def _many_shapes() -> Iterator[None]:
    """Context: the compiler may compile for each number of rows."""
    import torch._dynamo

    limits: dict[str, Any] = {"recompile_limit": _MOST_RECOMPILED, "accumulated_recompile_limit": _MOST_RECOMPILED}
    with torch._dynamo.config.patch(limits):
        yield


@contextmanager
def computing(model: nn.Module) -> Iterator[None]:
    """Context: evaluation mode, without gradients and autocast. Tensors are ordinary ones: those of inference mode cannot be changed
    outside it."""
    from shoal.models.generation.generate import evaluating

    kind = next(model.parameters()).device.type
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False), evaluating(model):
        yield


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One side stream for all recordings: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
