"""A model in memory: the engine that runs its requests, and the thread in which the engine works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shoal.data import TokenTexts
from shoal.models.packed.layers import byte_count
from shoal.serve.backend import LocalBackend
from shoal.serve.batching import Backend, BatchingEngine
from shoal.serve.constraints import GrammarCompiler
from shoal.serve.load_model import ServedModel
from shoal.serve.paged_backend import local_backend
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

    def __init__(self, served: ServedModel, warn: Callable[[str], None], stages: Backend | None = None) -> None:
        """`stages`: where the model's layers are; null: all of them here."""
        settings = served.settings
        self.served = served
        self.token_texts = TokenTexts(served.tokenizer)
        self.engine = BatchingEngine(
            stages or _backend_here(served, warn),
            most_running=settings.max_running,
            most_waiting=settings.max_waiting,
            clock=time.monotonic,
            kept_tokens=settings.prefix_cache_tokens,
            warn=warn,
            speculation=None if settings.proposed_tokens == 0 else Speculation(settings.proposed_tokens),
        )
        self.grammars = GrammarCompiler(served.tokenizer, served.eos_ids, self.engine.backend.vocab_size)
        self._thread = EngineThread(self.engine, warn)

    @property
    def nbytes(self) -> int:
        """Memory that counts as the model's."""
        adapters = self.served.adapters
        return byte_count(self.served.model) + (adapters.nbytes if adapters is not None else 0)

    def start(self) -> None:
        self.engine.backend.prepare()
        self._thread.start()

    def stop(self) -> None:
        """End every request."""
        if self._thread.is_alive():
            self._thread.stop()
        self.engine.backend.close()
        self.grammars.close()


def _backend_here(served: ServedModel, warn: Callable[[str], None]) -> Backend:
    """The backend of a model that is whole on this machine. The steps that a GPU records have no adapters."""
    settings = served.settings
    if served.adapters is None:
        return local_backend(served.model, served.beside, most_running=settings.max_running, kept_tokens=settings.prefix_cache_tokens)
    if next(served.model.parameters()).is_cuda:
        warn(f"{served.name} has adapters, so its requests are decoded step by step, without the recorded steps of the GPU")
    return LocalBackend(served.model, served.beside, served.adapters)
