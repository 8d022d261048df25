"""Evaluation beside a run that must not wait for it."""

from __future__ import annotations

import copy
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.strategies.assembly import Parts, sampler
from shoal.worker import RunDirectory


class Judge:
    """Evaluates copies of the weights beside everything else, so that no worker waits for it."""

    def __init__(self, parts: Parts, batches: Callable[[], Any], directory: RunDirectory) -> None:
        self.engine = SingleEngine(parts.run, copy.deepcopy(parts.engine.task), parts.engine.device, 1)
        self.batches = batches
        self.draw = sampler(Parts(parts.run, parts.data, self.engine, parts.feed), directory)
        self.verdicts: queue.Queue[tuple[int, dict[str, float], str]] = queue.Queue()
        self._waiting: deque[tuple[int, dict[str, Tensor]]] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Evaluations that are not done yet."""
        with self._lock:
            return len(self._waiting) + (self._thread is not None)

    def begin(self, step: int, weights: dict[str, Tensor]) -> None:
        with self._lock:
            self._waiting.append((step, weights))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="judge", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                step, weights = self._waiting.popleft()
            with torch.no_grad():
                self.engine.load_weights(weights)
            self._judge(step)

    def _judge(self, step: int) -> None:
        problem = ""
        metrics: dict[str, float] = {}
        try:
            metrics = self.engine.evaluate(self.batches())
            self.draw(step)
        except (ShoalError, OSError) as error:
            problem = f"warning: no evaluation or sample at step {step}: {error}"
        self.verdicts.put((step, metrics, problem))

    def wait(self) -> None:
        """Until all are done."""
        thread = self._thread
        if thread is not None:
            thread.join()
