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
from shoal.errors import ShoalError, out_of_memory
from shoal.runs.build_run import RunParts, sample_writer
from shoal.runs.folder.run_directory import RunDirectory

_NO_ROOM = "warning: the GPU has no room for an evaluation beside what workers have on it: from now on it is done on the CPU"

_LOOK_EVERY_S = 0.2
"""How often who waits for an evaluation looks whether the run is to end."""


class BackgroundEvaluator:
    """Evaluates copies of the weights beside everything else, so that no worker waits for it, where workers would compute here."""

    def __init__(self, parts: RunParts, batches: Callable[[], Any], directory: RunDirectory, device: torch.device, step_name: str) -> None:
        self.directory, self.device, self.step_name = directory, device, step_name
        self.task = copy.deepcopy(parts.engine.task)
        self.parts = parts._replace(feed=parts.feed.for_copy(self.task))
        self.batches = self.parts.feed.evaluation_batches(batches) or batches
        self.verdicts: queue.Queue[tuple[int, dict[str, float], str]] = queue.Queue()
        self._engine: SingleEngine | None = None
        self._waiting: deque[tuple[int, dict[str, Tensor], bool]] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Evaluations that are not done yet."""
        with self._lock:
            return len(self._waiting) + (self._thread is not None)

    def begin(self, step: int, weights: dict[str, Tensor], *, only_draw: bool = False) -> None:
        """`only_draw`: show what the model does, without judging it."""
        with self._lock:
            self._waiting.append((step, weights, only_draw))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="judge", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                step, weights, only_draw = self._waiting.popleft()
            self._judge(step, weights, only_draw)

    def _judge(self, step: int, weights: dict[str, Tensor], only_draw: bool) -> None:
        metrics, problem, full = dict[str, float](), "", False
        try:
            engine = self._engine_with(weights)
            metrics = {} if only_draw else engine.evaluate(self.batches())
            self._draw(step)
        except (ShoalError, OSError, RuntimeError, ValueError) as error:
            full = self.device.type != "cpu" and out_of_memory(error)
            problem = f"warning: no evaluation or sample at {self.step_name} {step}: {error}"
        if full:
            self._leave_gpu()
            self.verdicts.put((step, {}, _NO_ROOM))
            self._judge(step, weights, only_draw)
            return
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # workers may need it
        self.verdicts.put((step, metrics, problem))

    def _engine_with(self, weights: dict[str, Tensor]) -> SingleEngine:
        if self._engine is None:
            self._engine = SingleEngine(self.parts.run, self.task, self.device, 1)
        self._engine.load_weights(weights)
        return self._engine

    def _draw(self, step: int) -> None:
        assert self._engine is not None
        sample_writer(RunParts(self.parts.run, self.parts.data, self._engine, self.parts.feed), self.directory)(step)

    def _leave_gpu(self) -> None:
        """All that is there is the workers' from now on."""
        self._engine, self.device = None, torch.device("cpu")
        for player in self.task.players.values():
            player.to(self.device)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def wait(self, ends: Callable[[], bool]) -> None:
        """Until all are done, or nobody wants them any more."""
        thread = self._thread
        while thread is not None and thread.is_alive() and not ends():
            thread.join(_LOOK_EVERY_S)
