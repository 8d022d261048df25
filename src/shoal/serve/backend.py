"""A model that is whole on one machine, as the engine uses it.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.generation.side_texts import SideTextReader, SideTexts
from shoal.models.huggingface.batched_lora import BatchedLora
from shoal.models.kernels.cpu_packing import pack_matrices
from shoal.models.packed.layers import byte_count, number_count
from shoal.serve.batched_kv_caches import KvCaches
from shoal.serve.batching.backend_interface import Backend, ForwardBatch, MachineEntry, moving_average
from shoal.serve.batching.generation_job import GenerationJob
from shoal.serve.nodes.layer_host import memory_for_layers
from shoal.serve.serving_memory import cache_token_bytes

LONGEST_UNBOUNDED = 32_768
"""Tokens that a request may have where the model itself has no longest sequence: this bounds its cache, or the time to read it."""


def refuse_unserved(model: Any) -> None:
    """Raises ShoalError for models that do not write text."""
    if not hasattr(model, "next_logits"):
        raise ShoalError(f"a {type(model).__name__} does not write text; serving needs model.kind lstm, gpt, moe or huggingface")


def reads_beside(model: Any) -> bool:
    """Whether a model reads passages, a context or its memory beside its input."""
    return getattr(model, "memory", None) is not None or getattr(model, "reader", None) is not None


class LocalBackend(Backend):
    """The whole model on this machine."""

    microbatches = 1

    def __init__(
        self, model: Any, beside: SideTexts | None = None, adapters: BatchedLora | None = None, memory_bytes: float | None = None
    ) -> None:
        """`beside`: finds the passages that the model reads. They differ between requests, which are then decoded one by one. `adapters`:
        those that requests may name. `memory_bytes`: for caches; null: most of what is free."""
        refuse_unserved(model)
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.memory_bytes = memory_for_layers(self.device) if memory_bytes is None else int(memory_bytes)
        self.token_s, self.tokens = 0.0, 0
        self.copied_bytes, self.token_bytes = pack_matrices(self.model, self.memory_bytes), cache_token_bytes(model)
        left = max(0, self.memory_bytes - self.copied_bytes)
        self.cache_tokens = left / self.token_bytes if self.token_bytes else float("inf")
        """Tokens for whose caches there is memory."""
        self.vocab_size: int = model.vocab_size
        self.longest: int = model.max_seq_len or LONGEST_UNBOUNDED
        self.beside, self.adapters = beside, adapters
        self._adapter_names: dict[int, str] = {}
        """Of each request."""
        self._reserved: dict[int, int] = {}
        """Tokens of each request, and of each retained cache."""
        self.caches = KvCaches(model.new_cache, getattr(model, "joins_rows", True) and not reads_beside(model), self.device)
        self.can_verify = self.caches.joins and hasattr(model.new_cache(0), "crop")
        self._readers: dict[int, SideTextReader] = {}
        self._pending: deque[ForwardBatch] = deque()

    def prepare(self) -> None:
        """Nothing is compiled or recorded."""

    def admit(self, job: GenerationJob) -> bool:
        """Reserve memory for the longest answer. A request alone is never held back."""
        tokens = len(job.prompt_ids) + job.max_tokens
        if self._reserved and sum(self._reserved.values()) + tokens > self.cache_tokens:
            return False
        self._reserved[job.number] = tokens
        self._adapter_names[job.number] = job.adapter
        return True

    def start(self, batch: ForwardBatch) -> None:
        self._pending.append(batch)

    def results(self) -> Iterator[tuple[ForwardBatch, Tensor | None]]:
        while self._pending:
            batch, start = self._pending.popleft(), time.perf_counter()
            logits_BV = self._read(batch)
            self.tokens += sum(map(len, batch.ids))
            if len(batch.ids[0]) == 1:  # decoding, not a chunk of a prompt
                self.token_s = moving_average(self.token_s, time.perf_counter() - start)
            yield batch, logits_BV

    def discard_pending(self) -> None:
        self._pending.clear()

    @torch.inference_mode()
    def _read(self, batch: ForwardBatch) -> Tensor | None:
        if batch.output is not None:
            return self._read_answers(batch) if batch.decodes else self._read_everywhere(batch)
        if not batch.needs_logits and hasattr(self.model, "project") and not reads_beside(self.model):
            # A model of our own can leave out the product with its output matrix, which is as large as many layers
            ids_1L = torch.tensor(batch.ids, device=self.device)
            with self._adapted(batch.requests):
                self.model.hidden(ids_1L, cache=self.caches.of_one(batch.requests[0], len(batch.ids[0])))
            return None
        if len(batch.requests) == 1 or not self.caches.joins:
            return torch.cat([self._alone(request, ids) for request, ids in zip(batch.requests, batch.ids, strict=True)])
        cache, mask_BS = self.caches.of_several(batch.requests, len(batch.ids[0]))
        with self._adapted(batch.requests):
            return self.model.next_logits(torch.tensor(batch.ids, device=self.device), cache, mask_BS)

    def _adapted(self, requests: Sequence[int]) -> AbstractContextManager[None]:
        """Context: the rows of a batch have the adapters of these requests."""
        if self.adapters is None:
            return nullcontext()
        return self.adapters.rows([self._adapter_names.get(request, "") for request in requests])

    def _alone(self, request: int, ids: Sequence[int]) -> Tensor:
        cache, ids_1L = self.caches.of_one(request, len(ids)), torch.tensor([ids], device=self.device)
        with self._adapted([request]):
            return self.model.next_logits(ids_1L, cache, **self._side_texts(request, ids_1L))

    def _read_everywhere(self, batch: ForwardBatch) -> Tensor:
        """The logits [1, L, V] or the last hidden states [1, L, D] at all tokens of a prompt's chunk."""
        (request,), ids_1L = batch.requests, torch.tensor(batch.ids, device=self.device)
        cache = self.caches.of_one(request, ids_1L.shape[1])
        compute = self.model if batch.output == "logits" else self.model.hidden
        with self._adapted([request]):
            values_1LX: Tensor = compute(ids_1L, cache=cache, **self._side_texts(request, ids_1L))
        return values_1LX

    def _read_answers(self, batch: ForwardBatch) -> Tensor:
        """The logits [B, L, V] at the last token of each answer and at those that are proposed after it."""
        ids_BL, mask_BS = torch.tensor(batch.ids, device=self.device), None
        if len(batch.requests) == 1:
            cache = self.caches.of_one(batch.requests[0], ids_BL.shape[1])
        else:
            cache, mask_BS = self.caches.of_several(batch.requests, ids_BL.shape[1])
        with self._adapted(batch.requests):
            logits_BLV: Tensor = self.model(ids_BL, cache=cache, attention_mask=mask_BS)
        return logits_BLV

    def _side_texts(self, request: int, ids_1L: Tensor) -> dict[str, Any]:
        """Arguments with the passages that the model reads beside these tokens."""
        return self._readers.setdefault(request, SideTextReader(self.model, self.beside)).after(ids_1L) if self.beside else {}

    @torch.inference_mode()
    def rewind(self, request: int, length: int) -> None:
        self.caches.rewind(request, length)

    def retain(self, request: int) -> bool:
        """A cache can be shared where it holds keys and values, of which the last can be cut off."""
        self._reserved[request] = self.caches.length(request)
        return self.can_verify

    @torch.inference_mode()
    def copy_prefix(self, request: int, retained: int, length: int) -> bool:
        self.caches.copy_prefix(request, retained, length)
        return True

    def release(self, request: int) -> None:
        self.caches.release(request)
        self._readers.pop(request, None)
        self._adapter_names.pop(request, None)
        self._reserved.pop(request, None)

    def machines(self) -> list[MachineEntry]:
        return [machine_entry(self.model, self.memory_bytes, self.token_s, self.tokens)]

    def close(self) -> None:
        """No other machine takes part."""


def machine_entry(model: Any, memory_bytes: int, token_s: float, tokens: int) -> MachineEntry:
    """This machine, which holds a whole model."""
    count, size = number_count(model), byte_count(model)
    return MachineEntry("this machine", count, None, True, size, memory_bytes, token_s, tokens, True)
