"""The loop: feed → engine → record, evaluate, save. Everything a resume needs is in its state."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.config import Run
from shoal.errors import ShoalError
from shoal.runs.checkpoint import Checkpoint, Checkpoints, Saved
from shoal.runs.reporter import Reporter
from shoal.runs.run_directory import RunDirectory
from shoal.tasks import Batch, Task
from shoal.worker.interfaces import Feed, StepResult, Window, World


class Engine(Protocol):
    """What the loop asks of an engine."""

    @property
    def world(self) -> World: ...

    task: Task
    device: torch.device
    step_count: int
    total_steps: int

    def step(self, batches: list[Batch]) -> StepResult: ...
    def evaluate(self, batches: Iterator[Batch]) -> dict[str, float]: ...
    def figures(self) -> dict[str, float]:
        """What to record besides the losses: learning rates, health, gradient norms."""
        ...

    @property
    def skips_bad_steps(self) -> bool: ...
    @property
    def size(self) -> int:
        """Parameters in all networks."""
        ...

    def finite(self) -> bool: ...
    def weights(self) -> dict[str, Tensor]: ...
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loop:
    """One worker's training. Of the several processes of one engine each has such a loop, and they go through it in step."""

    def __init__(
        self,
        run: Run,
        engine: Engine,
        feed: Feed,
        held_out: Callable[[], Iterator[Batch]] | None,
        directory: RunDirectory,
        reporters: list[Reporter],
        samples: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.run = run
        self.engine = engine
        self.feed = feed
        self.held_out = held_out
        self.directory = directory
        self.reporters = reporters
        self.draw_samples = samples
        self.checkpoints = Checkpoints(directory.path / "checkpoints", run.checkpoint.keep_last)
        self.window = Window()
        self.samples = 0
        self.batches = 0
        self.best: float | None = None
        self.without_progress = 0
        self.stopping = ""
        """Why it ends before its time: `interrupted`, `stopped early`."""
        self.latest: dict[str, dict[str, float]] = {"train": {}, "eval": {}}
        self.resumed_from: str | None = None
        self._saved_at = -1
        self._started = time.monotonic()
        self._wall_before = 0.0
        self._speed_mark = (time.monotonic(), 0)

    # --- the run -----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.engine.step_count

    @property
    def wall_s(self) -> float:
        return self._wall_before + time.monotonic() - self._started

    def train(self) -> dict[str, Any]:
        """Run to the end. The summary is written whatever happens."""
        status, error = "failed", ""
        try:
            for reporter in self.reporters:
                reporter.start(self)
            self._steps()
            status = self.stopping or "completed"
        except ShoalError as problem:
            error = str(problem)
            raise
        except BaseException as problem:
            error = repr(problem)
            raise
        finally:
            summary = self.summary(status, error)
            self.directory.write_summary(summary)
            for reporter in self.reporters:
                reporter.close(summary)
            self.directory.close()
        return summary

    def _steps(self) -> None:
        accumulation = self.run.training.gradient_accumulation_steps
        while self.step < self.engine.total_steps and not self._ends():
            result = self.engine.step([next(self.feed) for _ in range(accumulation)])
            self.advance(result, accumulation, self.step >= self.engine.total_steps)
        self.finish(self.step >= self.engine.total_steps)

    def _ends(self) -> bool:
        """Is it to end before its time? Several processes end after the same step, whoever of them was asked to."""
        world = self.engine.world
        if world.size == 1:
            return bool(self.stopping)
        if world.all_leave:
            self.stopping = "interrupted"
        world.leaving = self.stopping == "interrupted"
        return world.all_leave or self.stopping == "stopped early"

    def advance(self, result: StepResult, batches: int, last: bool) -> None:
        """A step was taken: count it, and record, evaluate and save where it is time to."""
        before = self.batches
        self.batches += batches
        self.samples += result.samples
        self.window.add(result)
        if self.passed(self.run.logging.every_steps) or last:
            self._record()
        for reporter in self.reporters:
            reporter.step(self)
        if self._due(self.run.evaluation, before):
            self.evaluate()
        if self._due(self.run.checkpoint, before):
            self._save_or_warn()

    def finish(self, complete: bool) -> None:
        """The last judgement, and the last checkpoint."""
        if not complete:
            self.message(f"{self.stopping} at step {self.step} of {self.engine.total_steps}")
        if complete and self.latest["eval"].get("step") != self.step and self.evaluate():
            self._saved_at = -1  # what was judged is part of the state
        if self._saved_at != self.step:
            self.save()

    def _due(self, settings: Any, before: int) -> bool:
        """Is it time, by steps or by epochs? `before`: batches until this step."""
        if settings.strategy == "steps":
            return self.passed(settings.every_steps)
        if settings.strategy != "epoch":
            return False
        per_epoch = self.feed.batches_per_epoch
        if per_epoch is None:
            return self.feed.at_epoch_end
        return self.batches // per_epoch > before // per_epoch

    def passed(self, every: int) -> bool:
        """Whether this step is one of every so many."""
        return self.step % every == 0

    # --- what is recorded --------------------------------------------------------------------------

    def _record(self) -> None:
        metrics = self.window.take(self.engine.world)
        self._check_finite(metrics)
        metrics |= self.engine.figures()
        self.latest["train"] = metrics
        self._emit("train", metrics)

    def _check_finite(self, metrics: dict[str, float]) -> None:
        bad = [name for name, value in metrics.items() if name.endswith("loss") and value != value]
        if bad and not self.engine.skips_bad_steps:
            saved = self.checkpoints.all()
            where = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was saved before"
            raise ShoalError(
                f"{bad[0]} is not a number at step {self.step}: {where}. Lower training.optimizer.learning_rate, "
                "set training.clipping.max_norm, or switch training.gradient_health on"
            )

    def evaluate(self) -> dict[str, float]:
        """Judge the model on held-out data, and stop early if it no longer gets better."""
        if self.held_out is None or self.run.evaluation.batches == 0:
            return {}
        metrics = self.engine.evaluate(self.held_out())
        try:
            self.draw_samples(self.step)
        except (ShoalError, OSError) as error:
            self.message(f"warning: no sample at step {self.step}: {error}")
        self.judged(metrics, self.step)
        return metrics

    def judged(self, metrics: dict[str, float], step: int) -> None:
        """Record a judgement of the weights at a step."""
        self.latest["eval"] = metrics | {"step": step}
        self._emit("eval", metrics, step)
        self._consider_stopping(metrics)

    def _consider_stopping(self, metrics: dict[str, float]) -> None:
        settings, task = self.run.training.early_stopping, self.engine.task
        value = metrics.get(task.headline)
        if value is None:
            return
        gain = float("inf") if self.best is None else (value - self.best if task.higher_is_better else self.best - value)
        if gain > settings.threshold:
            self.best, self.without_progress = value, 0
            return
        self.without_progress += 1
        if settings.patience is not None and self.without_progress >= settings.patience and not self.stopping:
            self.stopping = "stopped early"

    def _emit(self, split: str, metrics: dict[str, float], step: int | None = None) -> None:
        now, (then, before) = time.monotonic(), self._speed_mark
        speed = (self.samples - before) / (now - then) if now > then else 0.0
        if split == "train":
            self._speed_mark = (now, self.samples)
        record: dict[str, Any] = {"step": self.step if step is None else step, "split": split, "samples": self.samples}
        if self.feed.batches_per_epoch:
            record["epoch"] = self.batches / self.feed.batches_per_epoch
        record |= metrics | {"wall_s": round(self.wall_s, 3)}
        if split == "train":
            record["samples_per_s"] = round(speed, 2)
        self.directory.record(record)
        for reporter in self.reporters:
            reporter.record(record)

    def message(self, text: str) -> None:
        for reporter in self.reporters:
            reporter.message(text)

    # --- state -------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint. One with weights that are not finite is never written over a good one."""
        if not self.engine.finite():
            raise ShoalError(f"the weights are not finite at step {self.step}; the checkpoints before it are untouched")
        weights, state, world = self.engine.weights(), self.state_dict(), self.engine.world
        if world.talk is None:
            self.checkpoints.save(self.step, weights, state)
        else:
            self.checkpoints.save_together(self.step, weights, state, world)
        self._saved_at = self.step

    def _save_or_warn(self) -> None:
        try:
            self.save()
        except ShoalError as error:
            self.message(f"warning: {error}; training goes on")

    def state_dict(self) -> dict[str, Any]:
        world, on_gpu = self.engine.world, self.engine.device.type == "cuda"
        return {
            "engine": self.engine.state_dict(),
            "feed": self.feed.state_dict(),
            "random": {
                "torch": world.each(torch.get_rng_state()),
                "cuda": world.each(torch.cuda.get_rng_state(self.engine.device)) if on_gpu else [],
            },
            "window": {"sums": world.total(dict(self.window.sums)), "weight": self.window.weight},
            "loop": {
                "samples": self.samples,
                "batches": self.batches,
                "best": self.best,
                "without_progress": self.without_progress,
                "stopped_early": self.stopping == "stopped early",
                "wall_s": self.wall_s,
                "latest": self.latest,
            },
        }

    def resume(self, checkpoint: Checkpoint, *, same_run: bool) -> None:
        """Continue from a checkpoint, to the same numbers as if there had been no break."""
        if not same_run and checkpoint.step >= self.engine.total_steps:
            raise ShoalError(
                f"{checkpoint.path} is at step {checkpoint.step}, and this run ends at {self.engine.total_steps}: nothing is left to train"
            )
        self.restore(checkpoint)
        self.stopping = "stopped early" if same_run and checkpoint.state["loop"]["stopped_early"] else ""
        if same_run:
            self.directory.forget_after(checkpoint.step)
            if self.engine.world.first:
                self.checkpoints.forget_after(checkpoint.step)
            self._saved_at = checkpoint.step

    def restore(self, checkpoint: Saved) -> None:
        """Take over what a checkpoint holds."""
        self.engine.load_weights(checkpoint.weights)
        state = checkpoint.state
        self.engine.load_state_dict(state["engine"])
        self.feed.load_state_dict(state["feed"])
        self._restore_random(state["random"])
        device, own = self.engine.device, float(self.engine.world.first)  # the sums of all are in the first one's hands
        self.window.sums = {name: torch.as_tensor(value, device=device) * own for name, value in state["window"]["sums"].items()}
        self.window.weight = state["window"]["weight"]
        loop = state["loop"]
        self.samples, self.batches = loop["samples"], loop["batches"]
        self.best, self.without_progress = loop["best"], loop["without_progress"]
        self._wall_before, self.latest = loop["wall_s"], loop["latest"]
        self._speed_mark = (time.monotonic(), self.samples)
        self.resumed_from = str(checkpoint.path)

    def _restore_random(self, states: dict[str, list[Tensor]]) -> None:
        """Every process its own. Where there are more now than there were, the new ones have what their seed gives."""
        rank = self.engine.world.rank
        if rank < len(states["torch"]):
            torch.set_rng_state(states["torch"][rank])
        if rank < len(states["cuda"]) and self.engine.device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"][rank], self.engine.device)

    def summary(self, status: str, error: str) -> dict[str, Any]:
        result = {
            "status": status,
            "metrics": self.latest,
            "steps": self.step,
            "samples": self.samples,
            "wall_s": round(self.wall_s, 3),
            "peak_memory_bytes": peak_memory(self.engine.device),
            "resumed_from": self.resumed_from,
        }
        return result | ({"error": error} if error else {})


def peak_memory(device: torch.device) -> int | None:
    """The most memory this process has used: on the GPU if it has one, else in main memory (not known on Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
