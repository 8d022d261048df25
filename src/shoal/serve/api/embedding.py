"""Embeddings of texts: the mean of the model's last hidden states, or the one at the last token, with length 1."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import ShoalError
from shoal.models.generation.decoding import NotFiniteError, TokenDraws, Warp, finite_rows
from shoal.serve.api.completion import encode_prompt, raise_unfinished, submit
from shoal.serve.api.requests import EmbeddingRequest
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.batching.generation_job import EndReason, Finished, GenerationJob, JobEvent, PromptCollector
from shoal.serve.load_model import ServedModel
from shoal.web.auth import RefusedError

_QUEUE_PAUSE_S = 0.1
"""Time after which a request that was embedded in part asks for the next places in a full queue."""


class HiddenStateMean(PromptCollector):
    """The mean of the hidden states at all tokens, or the one at the last."""

    output = "hidden"

    def __init__(self, pooling: str) -> None:
        self.pooling = pooling
        self._sum_D: Tensor | None = None

    def add(self, values_LX: Tensor) -> None:
        if not finite_rows(values_LX).all():
            raise NotFiniteError
        if self.pooling == "last":
            self._sum_D = values_LX[-1].double()
        else:
            before = 0.0 if self._sum_D is None else self._sum_D
            self._sum_D = before + values_LX.double().sum(0)

    def embedding(self) -> list[float]:
        """The vector with length 1."""
        if self._sum_D is None:
            raise ShoalError("no token was read")
        return [float(value) for value in F.normalize(self._sum_D, dim=0).to(torch.float32)]


def input_ids(request: EmbeddingRequest, served: ServedModel, engine: BatchingEngine) -> list[list[int]]:
    """The token ids of the request's texts. Raises RefusedError."""
    longest = engine.backend.longest
    found = [encode_prompt(text, served, engine.backend, "input") for text in request.texts]
    for place, ids in enumerate(found):
        if len(ids) > longest:
            message = f"this model's context is {longest} tokens, and input {place} has {len(ids)}: shorten it"
            raise RefusedError(400, message, param="input", code="context_length_exceeded")
    return found


async def embed(request: EmbeddingRequest, texts: Sequence[list[int]], served: ServedModel, engine: BatchingEngine) -> list[list[float]]:
    """The embeddings of texts; as many at once as answers may be generated. Where others fill the queue meanwhile, the rest waits. Raises
    RefusedError."""
    found: list[list[float]] = []
    deadline = engine.clock() + served.settings.request_timeout_s
    while len(found) < len(texts):
        some = texts[len(found) : len(found) + engine.most_running]
        try:
            found += await _embed_some(request.pooling, some, served.adapter, engine, deadline)
        except RefusedError as error:
            if error.code != "queue_full" or not found:
                raise
            if engine.clock() > deadline:
                raise_unfinished("timeout")
            await asyncio.sleep(_QUEUE_PAUSE_S)
    return found


async def _embed_some(pooling: str, texts: Sequence[list[int]], adapter: str, engine: BatchingEngine, deadline: float) -> list[list[float]]:
    ended: asyncio.Queue[EndReason] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def on_event(event: JobEvent) -> bool:
        if isinstance(event, Finished):
            loop.call_soon_threadsafe(ended.put_nowait, event.reason)
        return False

    collectors = [HiddenStateMean(pooling) for _ in texts]
    jobs = [
        GenerationJob(ids, 0, TokenDraws(0, ids), on_event, Warp(0.0), deadline=deadline, collector=collector, adapter=adapter)
        for ids, collector in zip(texts, collectors, strict=True)
    ]
    numbers = submit(engine, jobs)
    try:
        for _ in jobs:
            raise_unfinished(await ended.get())
    finally:
        engine.cancel(numbers)
    return [collector.embedding() for collector in collectors]


def in_base64(vector: Sequence[float]) -> str:
    """The form that OpenAI's client asks for: 32-bit floats, the lowest byte first."""
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")
