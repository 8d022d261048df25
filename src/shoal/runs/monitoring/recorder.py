"""Records a run: figures, evaluations, checkpoints and messages, to its folder and to reporters.

A run alone and a coordinator each have a `Recorder`. Its state is part of their checkpoints.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shoal.config import Run
from shoal.data import Feed
from shoal.engines import Engine
from shoal.errors import ShoalError
from shoal.protocol.messages import INTERRUPTED
from shoal.runs.folder.checkpoint import Checkpoints, may_save_behind, random_states, restore_random_states
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.monitoring.best_weights import metric_of
from shoal.runs.monitoring.loss_progress import LossProgress
from shoal.runs.monitoring.members import Members
from shoal.runs.monitoring.throughput import Throughput, peak_memory
from shoal.tasks import MetricMeans, StepResult
from shoal.updates.state_packing import Checkpoint

STOPPED_EARLY = "stopped early"
_LEAST_STEPS = 2
"""Steps after which a loss can be expected to have moved."""
_BYTES_PER_WEIGHT, _BYTES_BESIDE = 12, 16 << 20
"""Of a checkpoint: a weight and its two moments in float32; about what random numbers and rounded addresses take."""
_RECENT_EVENTS, _LONGEST_EVENT = 50, 1000


class SharedDataProgress:
    """Progress through data that the workers read. The length of a stream's epoch is known when all seats have begun the next."""

    def __init__(self, batches_per_epoch: int | None, places: Callable[[], Iterable[Sequence[int]]]) -> None:
        """`places`: epoch and batch of each seat."""
        self.batches_per_epoch, self._places = batches_per_epoch, places
        self.epochs = 0
        """Epochs of a stream that every seat has completed."""
        self.at_epoch_end = False

    def update(self) -> None:
        """Called after each new version."""
        if self.batches_per_epoch is None:
            epochs = min((place[0] for place in self._places()), default=0)
            self.epochs, self.at_epoch_end = epochs, epochs > self.epochs


class Reporter:
    """Watches a run: a progress bar, TensorBoard, W&B. Override the methods that you need; the others do nothing.

    `recorder.step`, `recorder.engine.total_steps`, `recorder.samples` and `recorder.directory.path` say where the run is. To end it after
    this step, set `recorder.stopping` to the reason.
    """

    def start(self, recorder: Recorder) -> None:
        """The run begins, or resumes."""

    def step(self, recorder: Recorder) -> None:
        """A step was taken."""

    def record(self, record: dict[str, Any]) -> None:
        """Figures at a step: `step`, `split` (`train` or `eval`), `samples`, and the metrics by name."""

    def drawn(self) -> None:
        """A sample was drawn that belongs to no record: one of the untrained model."""

    def message(self, text: str) -> None:
        """A message for the user. A warning begins with `warning:`."""

    def close(self, summary: dict[str, Any]) -> None:
        """The run has ended, successfully or not: the content of `summary.json`."""


class Recorder:
    """Counts the steps of one run, and records its figures, evaluations and checkpoints."""

    dashboard = ""
    """Address of the dashboard that this run shows, without its password."""

    def __init__(
        self,
        run: Run,
        engine: Engine,
        epochs: Feed | SharedDataProgress,
        directory: RunDirectory,
        reporters: list[Reporter],
        omitted: tuple[str, ...] = (),
        step_name: str = "step",
        total_batches: int | None = None,
    ) -> None:
        """`omitted`: figures of the engine that are meaningless in this run. `step_name`: what users call a step; a `round` where it is
        many steps of each worker. `total_batches`: batches after which the run ends, where these decide and not the number of steps."""
        self.run, self.engine, self.epochs, self.directory = run, engine, epochs, directory
        self.reporters, self.omitted, self.step_name, self.total_batches = reporters, omitted, step_name, total_batches
        self.checkpoints = Checkpoints(directory.path / "checkpoints", run.checkpoint.keep_last)
        self.window = MetricMeans()
        self.samples = self.batches = 0
        self.best: float | None = None
        self.without_progress = 0
        self.stopping = ""
        """Why the run ends before its time: `interrupted`, `stopped early`."""
        self.latest: dict[str, dict[str, float]] = {"train": {}, "eval": {}}
        self.loss = LossProgress()
        self.resumed_from: str | None = None
        self.members: Callable[[], Members] | None = None
        """The workers of a run with workers, as they were a second ago at most. Any thread may ask."""
        self.blackboard: Any = None
        """The server of a run with workers; a database among them shows the run's figures to all workers."""
        self.events: deque[dict[str, Any]] = deque(maxlen=_RECENT_EVENTS)
        """Recent messages, with their times."""
        self.saved_at = -1
        """Step of the last checkpoint."""
        self._evaluating: dict[int, tuple[int, int]] = {}
        """By step of a background evaluation: samples and batches that its weights had learned from."""
        self._started = time.monotonic()
        self._wall_before = 0.0
        self.throughput = Throughput(run, engine)
        self._telling = threading.RLock()

    @property
    def step(self) -> int:
        return self.engine.step_count

    @property
    def completed(self) -> int:
        """Progress of the run, between 0 and `engine.total_steps`."""
        if self.total_batches is None:
            return self.step
        return min(self.engine.total_steps, self.engine.total_steps * self.batches // max(1, self.total_batches))

    @property
    def known_steps(self) -> int | None:
        """The number of steps of the whole run; None where batches decide when it ends, and several of them may come in one step."""
        return self.engine.total_steps if self.total_batches is None else None

    def at(self, step: int) -> str:
        """A step and the whole run, for the user: a percentage where the number of steps is not known."""
        if self.total_batches is None:
            return f"{self.step_name} {step}/{self.engine.total_steps}"
        done = self.batches / max(1, self.total_batches) * step / max(1, self.step)  # `step` may be earlier than the run's
        return f"{self.step_name} {step} ({min(1.0, done):.0%})"

    @property
    def wall_s(self) -> float:
        return self._wall_before + time.monotonic() - self._started

    def record_run(self, work: Callable[[], None], more_summary: Callable[[], dict[str, Any]] = dict) -> dict[str, Any]:
        """Call `work`, which trains to the end. The summary is written and reporters are closed whatever happens."""
        status, error = "failed", ""
        try:
            for reporter in self.reporters:
                reporter.start(self)
            work()
            status = self.stopping or "completed"
            self._report_loss()
        except KeyboardInterrupt:
            status = INTERRUPTED
            raise
        except BaseException as problem:
            error = str(problem) if isinstance(problem, ShoalError) else repr(problem)
            raise
        finally:
            summary = self.summary(status, error) | more_summary()
            unwritten = self._conclude(summary)
        if unwritten is not None:
            raise unwritten
        return summary

    def _report_loss(self) -> None:
        """Tell the user at the end if the loss has not fallen."""
        if warning := self._loss_warning():
            self.message(warning)

    def _loss_warning(self) -> str:
        if self.stopping == INTERRUPTED or self.step < _LEAST_STEPS:
            return ""
        return self.loss.warning(self.run.training, _phase_settings(self.run))

    def _conclude(self, summary: dict[str, Any]) -> ShoalError | None:
        """Write the summary and close the reporters. Return why the summary cannot be written; a reporter's problem is a warning."""
        unwritten = None
        try:
            self.directory.write_summary(summary)
        except ShoalError as error:
            unwritten = error
        for reporter in self.reporters:
            try:
                reporter.close(summary)
            except ShoalError as error:
                self.message(f"warning: {error}")
        self.directory.close()
        return unwritten

    # --- steps -------------------------------------------------------------------------------------

    def count(self, result: StepResult, batches: int) -> None:
        if not self.batches and "loss" not in self.omitted:
            self.loss.note("step", self.engine.world.total(result.metrics))  # each process has its part of the sum
        self.batches += batches
        self.samples += result.samples
        self.window.add(result.metrics, result.weight)
        self.throughput.count(result)

    # --- figures and messages -----------------------------------------------------------------------

    def record_figures(self, more: Mapping[str, float], totals: Mapping[str, int]) -> None:
        """Record the mean figures since the last record. `more`: figures of neither steps nor engine; `totals`: counts since the start."""
        metrics = self.window.take(self.engine.world.total)
        self._check_finite(metrics)
        metrics |= {**self.engine.figures(), **more}
        for name in self.omitted:
            metrics.pop(name, None)
        self.latest["train"] = metrics
        self.loss.note("train", metrics)
        self._emit("train", self.step, (self.samples, self.batches), metrics, {**self.throughput.take(), **totals})

    def _check_finite(self, metrics: dict[str, float]) -> None:
        bad = [name for name, value in metrics.items() if name.endswith("loss") and value != value]
        if bad and self.engine.health is None:
            saved = self.checkpoints.all()
            where = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was saved before"
            raise ShoalError(
                f"{bad[0]} is not a number at {self.step_name} {self.step}: {where}. Lower training.optimizer.learning_rate, "
                "set training.clipping.max_norm, or switch training.gradient_health on"
            )

    def begin_evaluation(self) -> None:
        """The current weights are evaluated in the background: their record will show the current number of samples."""
        self._evaluating[self.step] = self.samples, self.batches

    def record_evaluation(self, metrics: dict[str, float], step: int) -> None:
        """Record the evaluation of the weights of a step, and stop early if the model no longer improves."""
        self.latest["eval"] = metrics | {"step": step}
        self.loss.note("eval", metrics)
        self._emit("eval", step, self._evaluating.pop(step, (self.samples, self.batches)), metrics, {})
        self._consider_stopping(metrics)

    def _consider_stopping(self, metrics: dict[str, float]) -> None:
        settings = self.run.training.early_stopping
        metric, higher = metric_of(self.run, self.engine.task)
        value = metrics.get(metric)
        if value is None:
            return
        gain = float("inf") if self.best is None else (value - self.best if higher else self.best - value)
        if gain > settings.threshold:
            self.best, self.without_progress = value, 0
            return
        self.without_progress += 1
        if settings.patience is not None and self.without_progress >= settings.patience and not self.stopping:
            self.stopping = STOPPED_EARLY

    def _emit(self, split: str, step: int, counts: tuple[int, int], figures: Mapping[str, float], more: Mapping[str, float]) -> None:
        """Write a record, and pass it to the reporters. `counts`: the samples and batches that its figures belong to."""
        samples, batches = counts
        record: dict[str, Any] = {"step": step, "split": split, "samples": samples}
        if self.epochs.batches_per_epoch:
            record["epoch"] = batches / self.epochs.batches_per_epoch
        record |= {**figures, "wall_s": round(self.wall_s, 3), **more}
        self.directory.record(record)
        for reporter in self.reporters:
            reporter.record(record)

    def message(self, text: str) -> None:
        """Show a message to the user, and record it. Any thread may call this."""
        event = {"at": round(time.time(), 3), "wall_s": round(self.wall_s, 3), "step": self.step, "text": text[:_LONGEST_EVENT]}
        with self._telling:
            self.events.append(event)
            self.directory.record_event(event)
            for reporter in self.reporters:
                reporter.message(text)

    # --- state -------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any], wait: bool = True) -> None:
        """Write a checkpoint with this state. Weights that are not finite are never saved. `wait`: until it is written; else, where a GPU
        trains in one process, a thread writes it while the run goes on."""
        if not self.engine.finite():
            raise ShoalError(f"the weights are not finite at {self.step_name} {self.step}; the checkpoints before it are untouched")
        if not wait and may_save_behind(self.engine):
            self.wait_for_checkpoint()
            self.checkpoints.save_behind(self.step, self.engine.weights(), state)
        else:
            self.checkpoints.save(self.step, self.engine.weights(), state, self.engine.world)
        self.saved_at = self.step

    def prepare_checkpoints(self) -> None:
        """Reserve the memory that a GPU copies checkpoints to: weights, and two moments of each."""
        if may_save_behind(self.engine) and self.run.checkpoint.strategy != "never":
            self.checkpoints.prepare(_BYTES_PER_WEIGHT * self.engine.size + _BYTES_BESIDE)

    def wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint that a thread writes. Where it failed, the user is told, and the step counts as not saved."""
        try:
            self.checkpoints.wait()
        except ShoalError as error:
            self.message(f"warning: {error}")
            self.saved_at = -1

    def state_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine.state_dict(),
            "random": random_states(self.engine),
            "window": {"sums": self.engine.world.total(dict(self.window.sums)), "weight": self.window.weight},
            "loop": {
                "samples": self.samples,
                "batches": self.batches,
                "best": self.best,
                "without_progress": self.without_progress,
                "stopped_early": self.stopping == STOPPED_EARLY,
                "wall_s": self.wall_s,
                "latest": self.latest,
                "losses": self.loss.state_dict(),
            },
        }

    def catch_up(self, record: Mapping[str, Any]) -> None:
        """Take over the time of a resumed run's last record, which may be newer than its snapshot."""
        self._wall_before = max(self._wall_before, float(record.get("wall_s", 0.0)))

    def resumed(self, checkpoint: Checkpoint) -> None:
        """The same run resumes: delete what it recorded and saved after the checkpoint, since it will repeat those steps."""
        self.stopping = STOPPED_EARLY if checkpoint.state["loop"]["stopped_early"] else ""
        self.directory.forget_after(checkpoint.step)
        if self.engine.world.first:
            self.checkpoints.forget_after(checkpoint.step)
        self.saved_at = checkpoint.step

    def check_left(self, checkpoint: Checkpoint) -> None:
        """Raises ShoalError where nothing is left to train after another run's checkpoint, or it has weights alone."""
        if "engine" not in checkpoint.state:
            raise ShoalError(f"{checkpoint.path} has weights, and no state of an optimizer to go on with: name a folder in `checkpoints`")
        if checkpoint.step >= self.engine.total_steps:
            raise ShoalError(
                f"{checkpoint.path} is at step {checkpoint.step}, and this run ends at {self.engine.total_steps}: nothing is left to train"
            )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load the weights, the engine's state and the counts of a checkpoint."""
        self.engine.load_weights(checkpoint.weights)
        state = checkpoint.state
        self.engine.load_state_dict(state["engine"])
        restore_random_states(self.engine, state["random"])
        device, own = self.engine.device, float(self.engine.world.first)  # the first process takes over the sums of all
        self.window.sums = {name: torch.as_tensor(value, device=device) * own for name, value in state["window"]["sums"].items()}
        self.window.weight = state["window"]["weight"]
        loop = state["loop"]
        self.samples, self.batches = loop["samples"], loop["batches"]
        self.best, self.without_progress = loop["best"], loop["without_progress"]
        self._wall_before, self.latest = loop["wall_s"], loop["latest"]
        self.loss.load_state_dict(loop["losses"])
        self.throughput.restart()
        self.resumed_from = str(checkpoint.path)

    def summary(self, status: str, error: str) -> dict[str, Any]:
        result = {
            "status": status,
            "metrics": self.latest,
            "steps": self.step,
            "samples": self.samples,
            "loss_fell": not self._loss_warning(),
            "wall_s": round(self.wall_s, 3),
            "peak_memory_bytes": peak_memory(self.engine.device),
            "resumed_from": self.resumed_from,
        }
        return result | ({"error": error} if error else {})


def _phase_settings(run: Run) -> str:
    """The setting whose learning rate, epochs and batch size a phase before the policy's takes; empty: the run is no such phase."""
    if run.rlhf is None:
        return ""
    if run.chosen_task.kind == "language-modelling" and run.rlhf.fine_tune is not None:
        return "rlhf.fine_tune"
    if run.chosen_task.kind == "reward" and run.rlhf.reward.untrained:
        return "rlhf.reward" if run.rlhf.reward.kind == "trained" else "rlhf.reward.parts.reward"
    return ""
