"""The process that serves: its ports, the models behind them, and uvicorn between them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from shoal.errors import ShoalError
from shoal.serve.api.app import make_app
from shoal.serve.batching.batching_engine import BatchingEngine, QueueFullError
from shoal.serve.batching.generation_job import JobEvent, is_answer, probe_job
from shoal.serve.model_pool import ModelPool
from shoal.transports.addresses import is_loopback
from shoal.web.auth import AuthMiddleware, listening_socket
from shoal.web.uvicorn_limits import bounded_server

_ASK_AGAIN_S, _PROBE_S = 0.2, 3600.0
"""Seconds between two questions whether the model answers, and how long one may wait for machines."""


class ModelServer:
    """Models that answer on one or more ports, until `stop` or a signal."""

    def __init__(self, models: ModelPool, host: str, ports: Sequence[int]) -> None:
        settings = models.settings
        key = settings.api_key.reveal() if settings.api_key else None
        require_key(host, key)
        self.models = models
        self.sockets = [listening_socket(host, port) for port in ports]
        self.ports: list[int] = [one.getsockname()[1] for one in self.sockets]
        app: Any = AuthMiddleware(make_app(models), key, guarded=("/v1", "/metrics", "/tokenize", "/detokenize"))
        if settings.allow_origins:
            allowed: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["retry-after"]}
            app = CORSMiddleware(app, allow_origins=settings.allow_origins, **allowed)
        self.server = bounded_server(app)
        self._ending = threading.Event()

    @property
    def engine(self) -> BatchingEngine:
        """The engine of the first model."""
        return self.models.first.engine

    def run(self, announce: Callable[[], None] | None = None) -> None:
        """Serve until a signal comes. `announce` is called when the first model has written its first token."""
        self.models.start()
        if announce is not None:
            threading.Thread(target=self._announce, args=(announce,), name="shoal-announce", daemon=True).start()
        try:
            self.server.run(self.sockets)
        finally:
            self._ending.set()
            self.models.close()
            for one in self.sockets:
                one.close()

    def _announce(self, announce: Callable[[], None]) -> None:
        while not (self.server.started and self._answers()):
            if self._ending.wait(_ASK_AGAIN_S):
                return
        announce()

    def _answers(self) -> bool:
        """Whether the model writes a token, which it cannot while machines that hold layers are missing."""
        events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()

        def on_event(event: JobEvent) -> bool:
            events.put(event)
            return True

        try:
            numbers = self.engine.submit(probe_job(on_event, self.engine.clock() + _PROBE_S))
        except QueueFullError:
            return False
        while not self._ending.is_set():
            with contextlib.suppress(queue.Empty):
                return is_answer(events.get(timeout=_ASK_AGAIN_S))
        self.engine.cancel(numbers)
        return False

    def stop(self) -> None:
        self.server.should_exit = True


def require_key(host: str, key: str | None) -> None:
    """Raises ShoalError where others than this machine could ask without a key."""
    if key is None and not is_loopback(host):
        raise ShoalError(f"{host} can be reached from other machines, so a key is needed: export SHOAL_API_KEY=… (16 letters or more)")
    if key is not None and len(key) < 16:
        raise ShoalError("the key in SHOAL_API_KEY (or serving.api_key) must have at least 16 letters")
