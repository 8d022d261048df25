"""Decoding with a CUDA graph: the step is captured once and replayed for every token.

A step of a small model is some hundred short kernels, and launching them takes longer than computing them. A graph launches all of them at
once. It reads and writes the same memory each time, so the KV cache has a fixed width, the position of the next token is a number on the
GPU, and a mask says which entries are valid.

Shapes: B batch, P tokens of the longest prompt, T tokens of the longest answer, K key and value heads, S cache capacity, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.generation.answer_buffers import AnswerBuffers
from shoal.models.generation.decoding import TokenDraws, finite_rows, require_finite
from shoal.models.generation.generate import evaluating
from shoal.models.generation.kv_cache import KeyValueCache, LayerCache
from shoal.models.gpt import Gpt

_WORTH = 16
"""Length of an answer from which on a capture is worth its time."""
_WIDTH = 256
"""Cache widths are multiples of this: short answers then read few unused keys."""
_LOOK_EVERY = 16
"""Steps between checks whether any answer is unfinished; a check synchronises with the GPU."""

Step = Callable[[], None]


def can_record(model: nn.Module, tokens: int) -> bool:
    """Whether answers of this many tokens are decoded with a graph: for a GPT that is whole on a CUDA GPU (sharded ones have other types)
    and whose linear layers are not replaced by reduced-precision ones."""
    if tokens < _WORTH or type(model) is not Gpt or not next(model.parameters()).is_cuda:
        return False
    return all(type(one) is nn.Linear for one in model.blocks.modules() if isinstance(one, nn.Linear))


class FixedLayerCache(LayerCache):
    """Keys and values of a fixed width. New ones are written at a position stored on the GPU, and the whole width counts as seen, so a
    mask must say which entries are valid."""

    def __init__(self, prompt: LayerCache, width: int, position_1: Tensor) -> None:
        super().__init__(width)
        self.keys_and_values = [buffer[:, :, :width] for buffer in prompt.keys_and_values]
        self.length, self._position_1 = width - 1, position_1

    def append(self, keys_BKLE: Tensor, values_BKLE: Tensor) -> tuple[Tensor, Tensor]:
        keys_BKSE, values_BKSE = self.keys_and_values
        return keys_BKSE.index_copy_(2, self._position_1, keys_BKLE), values_BKSE.index_copy_(2, self._position_1, values_BKLE)


class CudaGraphDecoder:
    """Generates answers with captured steps. Holds: the tokens are those of decoding with a growing cache, near-ties aside."""

    def __init__(self, model: Any, prompt_BP: Tensor, mask_BP: Tensor, written: AnswerBuffers, draws: Sequence[TokenDraws]) -> None:
        self.model, self.written, self.draws = model, written, draws
        (rows, self.prompt), columns = prompt_BP.shape, written.answer_BT.shape[1]
        self.capacity = min(_up_to_multiple(self.prompt + columns), model.max_seq_len)
        self.mask_BS = torch.zeros(rows, self.capacity, dtype=torch.bool, device=prompt_BP.device)
        self.mask_BS[:, : self.prompt] = mask_BP
        self.position_1 = torch.full((1,), self.prompt, device=prompt_BP.device)
        self.draws_TB = torch.zeros(columns, rows, dtype=torch.float64, device=prompt_BP.device)
        self.finite_B = torch.ones(rows, dtype=torch.bool, device=prompt_BP.device)
        self.cache: KeyValueCache = model.new_cache(self.capacity)
        self.prompt_BP, self.prompt_mask_BP = prompt_BP, mask_BP

    def write(self, any_goes_on: Callable[[bool], bool]) -> None:
        """Generate all answers to their ends. `any_goes_on`: see `batch_sampling.sample`."""
        self._read_prompts()
        step, columns = 1, self.written.answer_BT.shape[1]
        while step < columns and self._any(any_goes_on):
            width = min(_up_to_multiple(self.prompt + step), self.capacity)
            last = min(columns, width - self.prompt + 1)
            self._set_draws(step, last)
            self._write_some(last - step, width, any_goes_on)
            step = last
        require_finite(self.finite_B)

    def _read_prompts(self) -> None:
        self._set_draws(0, 1)
        given = {} if bool(self.prompt_mask_BP.all()) else {"attention_mask": self.prompt_mask_BP}
        with evaluating(self.model):
            logits_BV = self.model.next_logits(self.prompt_BP, self.cache, **given)
        self._take(logits_BV, self.cache.value_B)
        for layer in self.cache.layers:
            for buffer in layer.keys_and_values:
                buffer[:, :, self.prompt :] = 0  # masked entries must be finite: 0 · NaN is NaN

    def _set_draws(self, start: int, end: int) -> None:
        rows = [[one.at(step) for one in self.draws] for step in range(start, end)]
        self.draws_TB[start:end] = torch.tensor(rows, dtype=torch.float64).to(self.draws_TB.device)

    def _any(self, any_goes_on: Callable[[bool], bool]) -> bool:
        return self.written.eos_id is None or any_goes_on(bool(self.written.going_B.any()))

    def _write_some(self, steps: int, width: int, any_goes_on: Callable[[bool], bool]) -> None:
        """Generate `steps` tokens, all of which fit the cache width."""
        fixed = KeyValueCache(0, 0)
        fixed.layers = [FixedLayerCache(layer, width, self.position_1) for layer in self.cache.layers]

        def step() -> None:
            self.mask_BS.index_fill_(1, self.position_1, True)
            logits_BV = self.model.next_logits(self.written.last_B[:, None], fixed, attention_mask=self.mask_BS[:, :width])
            self._take(logits_BV, fixed.value_B)
            self.position_1 += 1

        with evaluating(self.model):
            step()  # uncaptured: lazy initialisation happens here
            again = capture_graph(step) if steps >= _WORTH and self.mask_BS.is_cuda else step
            for number in range(1, steps):
                again()
                if number % _LOOK_EVERY == 0 and not self._any(any_goes_on):
                    return

    def _take(self, logits_BV: Tensor, value_B: Tensor | None) -> None:
        self.finite_B &= finite_rows(logits_BV)
        self.written.take(logits_BV, self.draws_TB.index_select(0, self.written.step_1).squeeze(0), value_B)


def capture_graph(step: Step) -> Step:
    """Capture `step` as a CUDA graph without running it; the result replays it."""
    graph, side = torch.cuda.CUDAGraph(), _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Not torch.cuda.graph(…): that empties the allocator's cache, which the next training step needs again
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph.replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One side stream for all captures: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _up_to_multiple(tokens: int) -> int:
    return -(-tokens // _WIDTH) * _WIDTH
