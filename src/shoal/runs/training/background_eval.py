"""Evaluates copies of the weights in a background thread, so that the run does not wait."""

from __future__ import annotations

import copy
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.engines import SingleEngine
from shoal.errors import ShoalError, out_of_memory
from shoal.runs.build_run import RunParts, sample_writer
from shoal.runs.folder.run_directory import RunDirectory

_NO_MEMORY = "warning: the GPU has too little free memory for an evaluation while workers use it: from now on evaluations run on the CPU"

_CHECK_INTERVAL_S = 0.2
"""How often `wait` checks whether the run is interrupted."""


class BackgroundEvaluator:
    """Evaluates copies of the weights one after the other; `results` holds step, metrics, a message for the user, and the weights."""

    def __init__(self, parts: RunParts, batches: Callable[[], Any], directory: RunDirectory, device: torch.device, step_name: str) -> None:
        self.directory, self.device, self.step_name = directory, device, step_name
        self.task = copy.deepcopy(parts.engine.task)
        self.parts = parts._replace(feed=parts.feed.for_copy(self.task))
        self.batches = self.parts.feed.evaluation_batches(batches) or batches
        self.results: queue.Queue[tuple[int, dict[str, float], str, dict[str, Tensor]]] = queue.Queue()
        self._engine: SingleEngine | None = None
        self._waiting: deque[tuple[int, dict[str, Tensor], bool]] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Number of evaluations that are not finished."""
        with self._lock:
            return len(self._waiting) + (self._thread is not None)

    def begin(self, step: int, weights: Mapping[str, Tensor], *, only_sample: bool = False) -> None:
        """Evaluate a copy of these weights. `only_sample`: write a sample of the model without evaluating it."""
        copies = {name: value.detach().clone() for name, value in weights.items()}
        with self._lock:
            self._waiting.append((step, copies, only_sample))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="evaluation", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                step, weights, only_sample = self._waiting.popleft()
            self._evaluate(step, weights, only_sample)

    def _evaluate(self, step: int, weights: dict[str, Tensor], only_sample: bool) -> None:
        metrics, problem, full = dict[str, float](), "", False
        try:
            if self._engine is None:
                self._engine = SingleEngine(self.parts.run, self.task, self.device, 1)
            self._engine.load_weights(weights)
            metrics = {} if only_sample else self._engine.evaluate(self.batches())
            sample_writer(self.parts._replace(engine=self._engine), self.directory)(step)
        except (ShoalError, OSError, RuntimeError, ValueError) as error:
            full = self.device.type != "cpu" and out_of_memory(error)
            problem = f"warning: no evaluation or sample at {self.step_name} {step}: {error}"
        if full:
            self._leave_gpu()
            self.results.put((step, {}, _NO_MEMORY, weights))
            self._evaluate(step, weights, only_sample)
            return
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # workers may need it
        self.results.put((step, metrics, problem, weights))

    def _leave_gpu(self) -> None:
        """Leave the GPU's memory to the workers, and evaluate on the CPU from now on."""
        self._engine, self.device = None, torch.device("cpu")
        for player in self.task.players.values():
            player.to(self.device)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def wait(self, ends: Callable[[], bool]) -> None:
        """Wait until all evaluations are finished, or `ends` returns True."""
        thread = self._thread
        while thread is not None and thread.is_alive() and not ends():
            thread.join(_CHECK_INTERVAL_S)
