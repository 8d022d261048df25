"""A model in memory: the engine that runs its requests, and the thread in which the engine works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shoal.data import TokenTexts
from shoal.models.packed.layers import byte_count
from shoal.serve.backend import LONGEST_UNBOUNDED, LocalBackend
from shoal.serve.batching.backend_interface import Backend
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.constraints import GrammarCompiler
from shoal.serve.load_model import ServedModel
from shoal.serve.nodes.layer_host import memory_for_layers
from shoal.serve.paged_backend import PagedBackend, is_paged, paged_tokens
from shoal.serve.serving_memory import COUNTED_TOKENS, AnswerLimit, answer_limit, answers_over_nodes
from shoal.serve.speculation import Speculation


class EngineThread(threading.Thread):
    """Steps while there is something to do, and waits while there is not."""

    def __init__(self, engine: BatchingEngine, warn: Callable[[str], None]) -> None:
        super().__init__(name="shoal-engine", daemon=True)
        self.engine, self.warn = engine, warn
        self._ending = False

    def stop(self) -> None:
        """End every request and the thread."""
        with self.engine.arrived:
            self._ending = True
            self.engine.arrived.notify_all()
        self.join()
        self.engine.cancel([job.number for job in (*self.engine.running, *self.engine.waiting)])
        self.engine.step()

    def run(self) -> None:
        while self._wait():
            try:
                self.engine.step()
            except Exception as error:  # one request's fault must not end the service of the others
                self.warn(f"a step of the model failed, and the requests in it ended: {error}")
                self.engine.fail()

    def _wait(self) -> bool:
        with self.engine.arrived:
            self.engine.arrived.wait_for(lambda: self.engine.busy or self._ending)
            return not self._ending


class LoadedModel:
    """A model whose engine runs between `start` and `stop`."""

    def __init__(
        self, served: ServedModel, warn: Callable[[str], None], stages: Backend | None = None, memory_bytes: float | None = None
    ) -> None:
        """`stages`: where the model's layers are; null: all of them here. `memory_bytes`: for the weights and all caches; null: the
        weights, and most of what is free beside them."""
        settings = served.settings
        self.served = served
        self.token_texts = TokenTexts(served.tokenizer)
        self.weight_bytes = byte_count(served.model) + (served.adapters.nbytes if served.adapters is not None else 0)
        self.cache_bytes = 0.0
        """Memory that is kept for caches, and for copies of matrices."""
        self.kept_tokens = settings.prefix_cache_tokens
        """Tokens of the prefix cache."""
        if stages is not None:
            backend, self.limit = stages, AnswerLimit(answers_over_nodes(settings), "the layers are on several machines")
        else:
            backend = self._backend_here(warn, None if memory_bytes is None else max(0.0, memory_bytes - self.weight_bytes))
        self.engine = BatchingEngine(
            backend,
            most_running=self.limit.answers,
            most_waiting=settings.max_waiting,
            clock=time.monotonic,
            kept_tokens=self.kept_tokens,
            warn=warn,
            speculation=None if settings.proposed_tokens == 0 else Speculation(settings.proposed_tokens),
        )
        if settings.proposed_tokens and self.engine.scheduler.speculation is None:
            warn("serving.proposed_tokens has no effect: the model has paged caches on a GPU, or keeps more than keys and values")
        self.grammars = GrammarCompiler(served.tokenizer, served.eos_ids, self.engine.backend.vocab_size)
        self._thread = EngineThread(self.engine, warn)

    @property
    def nbytes(self) -> int:
        """Memory that counts as the model's."""
        return int(self.weight_bytes + self.cache_bytes)

    def start(self) -> None:
        self.engine.backend.prepare()
        self._thread.start()

    def stop(self) -> None:
        """End every request."""
        if self._thread.is_alive():
            self._thread.stop()
        self.engine.backend.close()
        self.grammars.close()

    def _backend_here(self, warn: Callable[[str], None], memory_bytes: float | None) -> Backend:
        """The backend of a model that is whole on this machine. The steps that a GPU records have no adapters."""
        served = self.served
        if served.adapters is None and is_paged(served.model, served.beside):
            return self._paged_backend(memory_bytes)
        if served.adapters is not None and next(served.model.parameters()).is_cuda:
            warn(f"{served.name} has adapters, so its requests are decoded step by step, without the recorded steps of the GPU")
        local = LocalBackend(served.model, served.beside, served.adapters, memory_bytes)
        kept = self.kept_tokens = int(min(self.kept_tokens, local.cache_tokens / 2))
        self.limit = answer_limit(served.settings, local.cache_tokens - kept, local.longest, on_gpu=local.device.type == "cuda")
        tokens = min(local.cache_tokens, self.limit.answers * min(local.longest, COUNTED_TOKENS) + kept)
        self.cache_bytes = local.copied_bytes + (tokens * local.token_bytes if local.token_bytes else 0)
        return local

    def _paged_backend(self, memory_bytes: float | None) -> Backend:
        served = self.served
        device = next(served.model.parameters()).device
        memory_bytes = memory_for_layers(device) if memory_bytes is None else memory_bytes
        tokens = paged_tokens(served.model, memory_bytes)
        kept = self.kept_tokens = int(min(self.kept_tokens, tokens / 2))
        self.limit = answer_limit(served.settings, tokens - kept, served.model.max_seq_len or LONGEST_UNBOUNDED, on_gpu=True)
        self.cache_bytes = memory_bytes
        return PagedBackend(served.model, most_running=self.limit.answers, kept_tokens=kept, memory_bytes=memory_bytes)
