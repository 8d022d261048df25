"""What is recorded of a run: figures, evaluations, checkpoints, and word of them to those who watch.

A run alone and a coordinator each have a `Recorder`. What a resumed run needs of it is in its state.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.config import Run
from shoal.coordinator.driver_interfaces import SavedState
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.runs.folder.checkpoint import Checkpoint, Checkpoints
from shoal.runs.folder.run_directory import RunDirectory
from shoal.tasks import Batch, MetricMeans, StepResult, Task

INTERRUPTED, STOPPED_EARLY = "interrupted", "stopped early"
_RECENT_EVENTS, _LONGEST_EVENT = 50, 1000


class Engine(Protocol):
    """What is recorded of an engine."""

    @property
    def world(self) -> World: ...

    task: Task
    device: torch.device
    step_count: int
    total_steps: int

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


class EpochProgress(Protocol):
    """Where a run stands in its data."""

    @property
    def batches_per_epoch(self) -> int | None: ...
    @property
    def at_epoch_end(self) -> bool: ...


class Owner(Protocol):
    """The run that is recorded: what differs between a run alone and a coordinator."""

    def passes(self, step: int, every: int) -> bool:
        """Whether this step is the first at or after one of every so many of a worker's."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Judge the model on held-out data, now or beside the run: then `judged` is called later. Return the figures there are now."""
        ...

    def more_figures(self) -> dict[str, float]:
        """Figures for a record besides those of the steps and the engine."""
        ...

    def totals(self) -> dict[str, int]:
        """Counts since the run began, over all its starts, which stand in every record of figures."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        ...

    def save(self) -> None:
        """Write a checkpoint."""
        ...


class Members(NamedTuple):
    """Who takes part: a row for each worker."""

    rows: list[dict[str, Any]]
    in_database: bool
    """Whether these are workers that lease units in a database, of which it knows other things than a coordinator of its members."""


class Reporter:
    """Somebody who watches a run: a progress bar, TensorBoard, W&B. Override what you want to hear of; the rest does nothing.

    `recorder.step`, `recorder.engine.total_steps`, `recorder.samples` and `recorder.directory.path` say where the run is. To end it after
    this step, set `recorder.stopping` to a word that says why.
    """

    def start(self, recorder: Recorder) -> None:
        """The run begins, or goes on."""

    def step(self, recorder: Recorder) -> None:
        """A step was taken."""

    def record(self, record: dict[str, Any]) -> None:
        """Figures at a step: `step`, `split` (`train` or `eval`), `samples`, and the metrics by name."""

    def drawn(self) -> None:
        """A sample was drawn that belongs to no record: what the untrained model shows."""

    def message(self, text: str) -> None:
        """Something to tell people. A warning begins with `warning:`."""

    def close(self, summary: dict[str, Any]) -> None:
        """The run is over, well or not: what `summary.json` has."""


class Recorder:
    """Counts, records, judges and saves one run."""

    def __init__(
        self,
        run: Run,
        engine: Engine,
        epochs: EpochProgress,
        directory: RunDirectory,
        reporters: list[Reporter],
        meaningless: tuple[str, ...] = (),
    ) -> None:
        """`meaningless`: figures of the engine that say nothing in this run."""
        self.run, self.engine, self.epochs, self.directory = run, engine, epochs, directory
        self.reporters, self.meaningless = reporters, meaningless
        self.checkpoints = Checkpoints(directory.path / "checkpoints", run.checkpoint.keep_last)
        self.owner: Owner | None = None
        self.window = MetricMeans()
        self.samples = self.batches = 0
        self.best: float | None = None
        self.without_progress = 0
        self.stopping = ""
        """Why the run ends before its time: `interrupted`, `stopped early`."""
        self.step_name = "step"
        """What people call a step of this run; where a step is made of many steps of each worker, it is a `round`."""
        self.total_batches: int | None = None
        """Batches after which the run ends, where these decide and not the number of steps."""
        self.latest: dict[str, dict[str, float]] = {"train": {}, "eval": {}}
        self.resumed_from: str | None = None
        self.members: Callable[[], Members] | None = None
        """Who takes part, where several do."""
        self.blackboard: Any = None
        """Where the run's figures are shown to all who take part, where there is such a place."""
        self.events: deque[dict[str, Any]] = deque(maxlen=_RECENT_EVENTS)
        """What people were told lately, and when."""
        self._judging: dict[int, tuple[int, int]] = {}
        """Samples and batches that led to the weights that are being judged, by their step."""
        self._saved_at = -1
        self._started = time.monotonic()
        self._wall_before = 0.0
        self._speed_mark = (time.monotonic(), 0)

    @property
    def step(self) -> int:
        return self.engine.step_count

    @property
    def completed(self) -> int:
        """How far the run is, as a number of `engine.total_steps`."""
        if self.total_batches is None:
            return self.step
        return min(self.engine.total_steps, self.engine.total_steps * self.batches // max(1, self.total_batches))

    def at(self, step: int) -> str:
        """Where a step is in the run, for people. Where batches decide, rounds with few workers make more steps than were planned."""
        if self.total_batches is None:
            return f"{self.step_name} {step}/{self.engine.total_steps}"
        done = self.batches / max(1, self.total_batches) * step / max(1, self.step)  # an evaluation is told when the run has gone on
        return f"{self.step_name} {step} ({min(1.0, done):.0%})"

    @property
    def wall_s(self) -> float:
        return self._wall_before + time.monotonic() - self._started

    @property
    def _owner(self) -> Owner:
        assert self.owner is not None
        return self.owner

    def record_run(self, work: Callable[[], None], more_summary: Callable[[], dict[str, Any]] = dict) -> dict[str, Any]:
        """Do the work of the run to its end. The summary is written whatever happens."""
        status, error = "failed", ""
        try:
            for reporter in self.reporters:
                reporter.start(self)
            work()
            status = self.stopping or "completed"
        except ShoalError as problem:
            error = str(problem)
            raise
        except BaseException as problem:
            error = repr(problem)
            raise
        finally:
            summary = self.summary(status, error) | more_summary()
            self.directory.write_summary(summary)
            for reporter in self.reporters:
                reporter.close(summary)
            self.directory.close()
        return summary

    # --- steps -------------------------------------------------------------------------------------

    def count(self, result: StepResult, batches: int) -> None:
        """A step was taken."""
        self.batches += batches
        self.samples += result.samples
        self.window.add(result.metrics, result.weight)

    def count_again(self, result: StepResult, batches: int) -> None:
        """A step that was recorded before a crash."""
        self.count(result, batches)
        if self._owner.passes(self.step, self.run.logging.every_steps):
            self.window.take(self.engine.world.total)

    def advance(self, result: StepResult, batches: int, last: bool) -> None:
        """A step was taken: count it, and record, evaluate and save where it is time to."""
        before = self.batches
        self.count(result, batches)
        if self._owner.passes(self.step, self.run.logging.every_steps) or last:
            self._record()
        for reporter in self.reporters:
            reporter.step(self)
        if self._due(self.run.evaluation, before):
            self._owner.evaluate()
        if self._due(self.run.checkpoint, before):
            self._save_or_warn()

    def finish(self, complete: bool) -> None:
        """The last judgement, and the last checkpoint."""
        if not complete:
            self.message(f"{self.stopping} at {self.at(self.step)}")
        if complete and self.latest["eval"].get("step") != self.step and self._owner.evaluate():
            self._saved_at = -1  # what was judged is part of the state
        if self._saved_at != self.step:
            self._owner.save()

    def _due(self, settings: Any, before: int) -> bool:
        """Is it time, by steps or by epochs? `before`: batches until this step."""
        if settings.strategy == "steps":
            return self._owner.passes(self.step, settings.every_steps)
        if settings.strategy != "epoch":
            return False
        per_epoch = self.epochs.batches_per_epoch
        if per_epoch is None:
            return self.epochs.at_epoch_end
        return self.batches // per_epoch > before // per_epoch

    # --- what is recorded --------------------------------------------------------------------------

    def _record(self) -> None:
        metrics = self.window.take(self.engine.world.total)
        self._check_finite(metrics)
        metrics |= self.engine.figures() | self._owner.more_figures()
        for name in self.meaningless:
            metrics.pop(name, None)
        self.latest["train"] = metrics
        self._emit("train", metrics)

    def _check_finite(self, metrics: dict[str, float]) -> None:
        bad = [name for name, value in metrics.items() if name.endswith("loss") and value != value]
        if bad and not self.engine.skips_bad_steps:
            saved = self.checkpoints.all()
            where = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was saved before"
            raise ShoalError(
                f"{bad[0]} is not a number at {self.step_name} {self.step}: {where}. Lower training.optimizer.learning_rate, "
                "set training.clipping.max_norm, or switch training.gradient_health on"
            )

    def begin_judging(self) -> None:
        """The weights of now are judged beside the run: their record is to tell the samples of now."""
        self._judging[self.step] = self.samples, self.batches

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
            self.stopping = STOPPED_EARLY

    def _emit(self, split: str, metrics: dict[str, float], step: int | None = None) -> None:
        now, (then, before) = time.monotonic(), self._speed_mark
        speed = (self.samples - before) / (now - then) if now > then else 0.0
        if split == "train":
            self._speed_mark = (now, self.samples)
        step = self.step if step is None else step
        samples, batches = self._judging.pop(step, (self.samples, self.batches)) if split == "eval" else (self.samples, self.batches)
        record: dict[str, Any] = {"step": step, "split": split, "samples": samples}
        if self.epochs.batches_per_epoch:
            record["epoch"] = batches / self.epochs.batches_per_epoch
        record |= metrics | {"wall_s": round(self.wall_s, 3)}
        if split == "train":
            record |= {"samples_per_s": round(speed, 2)} | self._owner.totals()
        self.directory.record(record)
        for reporter in self.reporters:
            reporter.record(record)

    def message(self, text: str) -> None:
        event = {"at": round(time.time(), 3), "wall_s": round(self.wall_s, 3), "step": self.step, "text": text[:_LONGEST_EVENT]}
        self.events.append(event)
        self.directory.tell(event)
        for reporter in self.reporters:
            reporter.message(text)

    # --- state -------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint. One with weights that are not finite is never written over a good one."""
        if not self.engine.finite():
            raise ShoalError(f"the weights are not finite at {self.step_name} {self.step}; the checkpoints before it are untouched")
        weights, state, world = self.engine.weights(), self._owner.state_dict(), self.engine.world
        if world.talk is None:
            self.checkpoints.save(self.step, weights, state)
        else:
            self.checkpoints.save_together(self.step, weights, state, world)
        self._saved_at = self.step

    def _save_or_warn(self) -> None:
        try:
            self._owner.save()
        except ShoalError as error:
            self.message(f"warning: {error}; training goes on")

    def state_dict(self) -> dict[str, Any]:
        world, on_gpu = self.engine.world, self.engine.device.type == "cuda"
        return {
            "engine": self.engine.state_dict(),
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
                "stopped_early": self.stopping == STOPPED_EARLY,
                "wall_s": self.wall_s,
                "latest": self.latest,
            },
        }

    def catch_up(self, record: Mapping[str, Any]) -> None:
        """The last record of a run that goes on, which may be newer than its snapshot: its time counts."""
        self._wall_before = max(self._wall_before, float(record.get("wall_s", 0.0)))

    def resumed(self, checkpoint: Checkpoint) -> None:
        """The same run goes on: what it recorded and saved after the checkpoint is forgotten, since it will do that again."""
        self.stopping = STOPPED_EARLY if checkpoint.state["loop"]["stopped_early"] else ""
        self.directory.forget_after(checkpoint.step)
        if self.engine.world.first:
            self.checkpoints.forget_after(checkpoint.step)
        self._saved_at = checkpoint.step

    def check_left(self, checkpoint: Checkpoint) -> None:
        """Raises ShoalError where nothing is left to train after another run's checkpoint."""
        if checkpoint.step >= self.engine.total_steps:
            raise ShoalError(
                f"{checkpoint.path} is at step {checkpoint.step}, and this run ends at {self.engine.total_steps}: nothing is left to train"
            )

    def restore(self, checkpoint: SavedState) -> None:
        """Go on with the weights, the engine's state and the counts of a checkpoint."""
        self.engine.load_weights(checkpoint.weights)
        state = checkpoint.state
        self.engine.load_state_dict(state["engine"])
        self._restore_random(state["random"])
        device, own = self.engine.device, float(self.engine.world.first)  # the sums of all are in the first process's hands
        self.window.sums = {name: torch.as_tensor(value, device=device) * own for name, value in state["window"]["sums"].items()}
        self.window.weight = state["window"]["weight"]
        loop = state["loop"]
        self.samples, self.batches = loop["samples"], loop["batches"]
        self.best, self.without_progress = loop["best"], loop["without_progress"]
        self._wall_before, self.latest = loop["wall_s"], loop["latest"]
        self._speed_mark = (time.monotonic(), self.samples)
        self.resumed_from = str(checkpoint.path)

    def _restore_random(self, states: dict[str, list[Tensor]]) -> None:
        """Every process gets its own. Where there are more processes than there were, the new ones have what their seed gives."""
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
