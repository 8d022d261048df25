"""All models that a server offers. Each is loaded when the first request names it, and leaves when another needs its memory.

Holds: a model with requests is never unloaded; requests for a model that is being loaded wait for one load, and for no other model; a load
that fails tells its reason to those who wait for it, and the next request tries again.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import NamedTuple

import torch

from shoal.config.schema.serving import Serving, bytes_of
from shoal.data import TokenTexts
from shoal.errors import ShoalError
from shoal.freed_memory import return_freed_memory
from shoal.serve.batching.backend_interface import Backend
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.constraints import GrammarCompiler
from shoal.serve.load_model import ServedModel
from shoal.serve.loaded_model import LoadedModel
from shoal.serve.serving_memory import fitting_weights, too_large
from shoal.web.auth import RefusedError

_LOOK_AGAIN_S = 0.05
"""Interval for checking whether the requests of a model that leaves have ended."""
_NAMES_SHOWN = 20
_LEAST_FOR_CACHES = 0.2
"""Of the memory of all models."""


class ModelSource(NamedTuple):
    """A model that can be loaded."""

    name: str
    load: Callable[[], ServedModel]
    """Raises ShoalError."""
    needed: int = 0
    """Bytes of memory that it will take, as far as that is known before it is loaded."""
    adapters: tuple[str, ...] = ()
    """The names of its adapters; requests name `name+adapter`."""


class ModelInUse(NamedTuple):
    """A loaded model, under the name that a request gave."""

    served: ServedModel
    engine: BatchingEngine
    token_texts: TokenTexts
    grammars: GrammarCompiler


class ModelState(NamedTuple):
    """What is known of a model without loading it."""

    name: str
    parent: str | None
    """The model that an adapter changes."""
    loaded: LoadedModel | None
    nbytes: int
    counts: Counter[str]
    """Tokens that its earlier engines have read, reused, written, proposed and accepted."""


class _Load:
    """A load that was begun, and how many requests wait for it."""

    def __init__(self) -> None:
        self.result: Future[LoadedModel | Exception] = Future()
        """The model, or why it could not be loaded."""
        self.waiting = 0


class _PoolEntry:
    """A model of the pool."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.loaded: LoadedModel | None = None
        self.load: _Load | None = None
        self.leaving = False
        """Whether it is unloaded as soon as its requests have ended; further requests wait for the next load."""
        self.users = 0
        """Requests that are about to be given to the engine."""
        self.used_at = 0.0
        self.nbytes = source.needed
        self.budget: float | None = None
        """Bytes for its weights and caches; null: what is free."""
        self.counts: Counter[str] = Counter()

    @property
    def is_idle(self) -> bool:
        if self.loaded is None:
            return not self.users
        with self.loaded.engine.arrived:
            return not (self.users or self.loaded.engine.busy)


class ModelPool:
    """Models by name. The first is loaded from the start."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        settings: Serving,
        warn: Callable[[str], None],
        tell: Callable[[str], None] = lambda text: None,
        limit: float = float("inf"),
    ) -> None:
        """`settings`: those of the server; `tell` gets what the user may want to know; `limit`: bytes that all models may take together."""
        self.settings = settings
        self._entries = {source.name: _PoolEntry(source) for source in sources}
        self._names = {source.name: (source.name, "") for source in sources}
        self._names |= {f"{source.name}+{adapter}": (source.name, adapter) for source in sources for adapter in source.adapters}
        self._warn, self._tell, self._limit = warn, tell, limit
        self._changed = threading.Condition()
        self._orders: queue.SimpleQueue[_PoolEntry | None] = queue.SimpleQueue()
        self._loader = threading.Thread(target=self._load_all, name="shoal-loader", daemon=True)
        self._is_open = True
        self._first = self._entries[sources[0].name]
        if limit < float("inf"):
            self._divide(limit)

    @classmethod
    def of_one(cls, served: ServedModel, warn: Callable[[str], None], stages: Backend | None = None, place: str = "") -> ModelPool:
        """The pool of one model that is loaded already, and stays. `stages`: where its layers are; null: all of them here. `place`: its
        folder or file, for advice. Raises ShoalError where it takes more memory than `serving.memory`."""
        adapters, limit = tuple(served.adapters.names) if served.adapters is not None else (), bytes_of(served.settings.memory)
        made = cls([ModelSource(served.name, lambda: served, 0, adapters)], served.settings, warn)
        made._hold_first(LoadedModel(served, warn, stages, limit))
        if limit is not None and made.first.weight_bytes > limit:
            rest = limit - (served.adapters.nbytes if served.adapters is not None else 0)
            fitting = fitting_weights(place, served.run.model.kind, rest) if served.run is not None else []
            raise too_large(served.name, made.first.weight_bytes, limit, fitting)
        return made

    def with_first(self) -> ModelPool:
        """This pool, with its first model loaded."""
        self._hold_first(LoadedModel(self._first.source.load(), self._warn, memory_bytes=self._first.budget))
        return self

    def _hold_first(self, loaded: LoadedModel) -> None:
        self._first.loaded, self._first.nbytes = loaded, loaded.nbytes

    def _divide(self, limit: float) -> None:
        """Give each model an equal part of the memory for caches: of what is left beside as many models, the largest first, as leave
        enough."""
        needed = sorted((entry.source.needed for entry in self._entries.values()), reverse=True)
        sums = list(itertools.accumulate(needed))
        together = max(1, sum(one <= (1 - _LEAST_FOR_CACHES) * limit for one in sums))
        room = (limit - sums[together - 1]) / together
        for entry in self._entries.values():
            entry.budget = entry.nbytes = int(entry.source.needed + room)

    @property
    def first(self) -> LoadedModel:
        """The first model, which is loaded until another needs its memory."""
        assert self._first.loaded is not None
        return self._first.loaded

    def start(self) -> None:
        self.first.start()
        self._loader.start()

    def close(self) -> None:
        """End all requests, and loads that have not begun."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._orders.put(None)
        if self._loader.is_alive():
            self._loader.join()
        for entry in self._entries.values():
            if entry.loaded is not None:
                entry.loaded.stop()

    def states(self) -> list[ModelState]:
        """All models and adapters, by the names that requests may give."""
        with self._changed:
            return [
                ModelState(name, base if adapter else None, entry.loaded, entry.nbytes, entry.counts)
                for name, (base, adapter) in self._names.items()
                for entry in [self._entries[base]]
            ]

    def state(self, name: str) -> ModelState:
        """Raises RefusedError where there is no such model."""
        self._entry(name)
        return next(state for state in self.states() if state.name == name)

    def _entry(self, name: str) -> tuple[_PoolEntry, str]:
        """The model and the adapter of a name. Raises RefusedError."""
        if name not in self._names:
            shown = [repr(one) for one in list(self._names)[:_NAMES_SHOWN]]
            more = f" and {len(self._names) - len(shown)} more (GET /v1/models)" if len(shown) < len(self._names) else ""
            there = f"this is {shown[0]}" if len(self._names) == 1 else f"there are {', '.join(shown)}{more}"
            raise RefusedError(404, f"there is no model {name[:100]!r} here; {there}", param="model", code="model_not_found")
        base, adapter = self._names[name]
        return self._entries[base], adapter

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ModelInUse]:
        """Context: the model of this name, which stays at least until its engine has the request. It is loaded where it is not. Raises
        RefusedError."""
        entry, adapter = self._entry(name)
        loaded = await self._taken(entry)
        try:
            served = loaded.served._replace(name=name, adapter=adapter) if adapter else loaded.served
            yield ModelInUse(served, loaded.engine, loaded.token_texts, loaded.grammars)
        finally:
            with self._changed:
                entry.users -= 1
                entry.used_at = time.monotonic()
                self._changed.notify_all()

    async def _taken(self, entry: _PoolEntry) -> LoadedModel:
        """The loaded model, with one more user."""
        with self._changed:
            if entry.loaded is not None and not entry.leaving:
                entry.users += 1
                return entry.loaded
            load = self._joined_load(entry)
        try:
            found = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(load.result)), self.settings.request_timeout_s)
        except BaseException as problem:
            with self._changed:
                load.waiting -= 1
                if load.result.done() and isinstance(load.result.result(), LoadedModel):
                    entry.users -= 1
            if not isinstance(problem, TimeoutError):
                raise
            message = f"the model {entry.source.name!r} was not loaded within serving.request_timeout_s"
            raise RefusedError(504, message, kind="server_error", code="timeout") from None
        if isinstance(found, LoadedModel):
            return found
        message = f"the model {entry.source.name!r} cannot be loaded: {found}"
        raise RefusedError(503, message, kind="server_error", code="model_not_loaded")

    def _joined_load(self, entry: _PoolEntry) -> _Load:
        """The load that is under way or begins now, with one more request that waits for it. Raises RefusedError."""
        if entry.load is None:
            entry.load = _Load()
            self._orders.put(entry)
        if entry.load.waiting >= self.settings.max_waiting:
            limit = f"serving.max_waiting is {self.settings.max_waiting}"
            message = f"too many requests wait for the model {entry.source.name!r} already ({limit}); try again soon"
            raise RefusedError(429, message, kind="rate_limit_error", code="queue_full")
        entry.load.waiting += 1
        return entry.load

    def _load_all(self) -> None:
        """Carry out loads one after the other, in the order of the requests."""
        while (entry := self._orders.get()) is not None and self._is_open:
            self._carry_out(entry)
            self._make_room(entry, 0, may_wait=False)

    def _carry_out(self, entry: _PoolEntry) -> None:
        load = entry.load
        assert load is not None
        found: LoadedModel | Exception
        try:
            found = self._loaded(entry, load)
        except Exception as problem:
            self._warn(f"{entry.source.name} cannot be loaded: {problem}")
            found = problem
        with self._changed:
            entry.load = None
            if isinstance(found, LoadedModel):
                entry.loaded, entry.nbytes, entry.used_at = found, found.nbytes, time.monotonic()
                entry.users += load.waiting
            load.result.set_result(found)

    def _loaded(self, entry: _PoolEntry, load: _Load) -> LoadedModel:
        if load.waiting == 0:
            raise ShoalError("no request waits for it any more")
        self._make_room(entry, entry.nbytes, may_wait=True)
        start = time.monotonic()
        made = LoadedModel(entry.source.load(), self._warn, memory_bytes=entry.budget)
        made.start()
        self._tell(f"{entry.source.name} is loaded, in {time.monotonic() - start:.1f} s")
        return made

    def _make_room(self, entry: _PoolEntry, needed: int, may_wait: bool) -> None:
        """Unload other models, the least recently used first, until `needed` bytes are free. `may_wait`: where all have requests, wait
        until those of one have ended; else models with requests stay."""
        while True:
            with self._changed:
                here = [one for one in self._entries.values() if one.loaded is not None]
                candidates = [one for one in here if one is not entry and (may_wait or one.is_idle)]
                if sum(one.nbytes for one in here) + needed <= self._limit or not candidates:
                    return
                leaving = min(candidates, key=lambda one: (not one.is_idle, one.used_at))
                leaving.leaving = True
            self._unload(leaving)

    def _unload(self, entry: _PoolEntry) -> None:
        """Wait until the requests of a model that leaves have ended, and free its memory."""
        with self._changed:
            while not entry.is_idle and self._is_open:
                self._changed.wait(_LOOK_AGAIN_S)
            loaded, entry.loaded, entry.leaving = entry.loaded, None, False
        if loaded is None:
            return
        engine = loaded.engine
        loaded.stop()
        entry.counts.update(read=engine.tokens_read, reused=engine.tokens_reused, written=engine.tokens_written)
        entry.counts.update(proposed=engine.tokens_proposed, accepted=engine.tokens_accepted)
        del loaded, engine
        gc.collect()
        return_freed_memory()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._tell(f"{entry.source.name} is unloaded")
