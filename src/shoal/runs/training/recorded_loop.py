"""The base class of the loops of a run alone and of a coordinator: after a step they record, evaluate and save when that is due."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shoal.config.schema.output import Checkpoint as CheckpointSettings
from shoal.config.schema.output import Evaluation
from shoal.engines import Engine
from shoal.errors import ShoalError
from shoal.protocol.messages import INTERRUPTED
from shoal.runs.monitoring.best_weights import BestWeights, newest_best
from shoal.runs.monitoring.recorder import Recorder
from shoal.tasks import StepResult


class RecordedLoop(ABC):
    """A run whose steps go to a `Recorder`. `TrainingLoop` and `CoordinatorLoop` differ in where steps come from."""

    def __init__(self, recorder: Recorder, engine: Engine, evaluated: bool) -> None:
        """`evaluated`: whether the run has evaluations."""
        self.recorder, self.engine, self.run, self.directory = recorder, engine, recorder.run, recorder.directory
        self.message = recorder.message
        engine.keep_average(self.run.training.ema)
        self.best = BestWeights(self.run, engine.task, self.directory.path, engine.world, evaluated)

    @property
    def step(self) -> int:
        return self.engine.step_count

    def interrupt(self) -> bool:
        """End the run before the next step. Return whether it had already been interrupted."""
        before, self.recorder.stopping = self.recorder.stopping, INTERRUPTED
        return before == INTERRUPTED

    # --- what differs ------------------------------------------------------------------------------

    @abstractmethod
    def passes(self, step: int, every: int) -> bool:
        """Whether this step is the first at or after a multiple of `every` steps of a worker."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Evaluate the model on held-out data. Return its figures, or none where the evaluation runs in the background."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides the weights."""

    def more_figures(self) -> dict[str, float]:
        """Figures for a record besides those of the steps and the engine."""
        return {}

    def totals(self) -> dict[str, int]:
        """Counts since the run began, over all its starts; every record of figures contains them."""
        return {}

    def save(self, wait: bool = True) -> None:
        """Save a checkpoint. `wait`: until it is written."""
        self.recorder.save(self.state_dict(), wait)

    def record_evaluation(self, metrics: dict[str, float], step: int, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Record the evaluation of the weights of a step, and keep them if they are the best so far."""
        self.recorder.record_evaluation(metrics, step)
        if not self.best.is_improved_by(metrics):
            return
        try:
            self.best.keep(metrics, step, weights())
        except ShoalError as error:
            self.message(f"warning: the best weights are not kept: {error}; training goes on")

    def load_result(self) -> None:
        """Give the networks the weights to use: the best if they are kept, else the average if there is one."""
        best, average = newest_best(self.directory.path, self.message) if self.best.kept else None, self.engine.average
        if best is not None:
            self.engine.load_weights(best.weights)
        elif average is not None:
            average.exchange()
            self.engine.changed()

    # --- after a step ------------------------------------------------------------------------------

    def advance(self, result: StepResult, batches: int, last: bool) -> None:
        """A step was taken: count it, then record, evaluate and save what is due. `last`: the run ends with this step."""
        recorder, before = self.recorder, self.recorder.batches
        recorder.count(result, batches)
        if self.passes(self.step, self.run.logging.every_steps) or last:
            recorder.record_figures(self.more_figures(), self.totals())
        for reporter in recorder.reporters:
            reporter.step(recorder)
        if self._due(self.run.evaluation, before):
            with self.engine.phases.on_host("evaluation"):
                self.evaluate()
        if self._due(self.run.checkpoint, before):
            try:
                with self.engine.phases.on_host("checkpoint"):
                    self.save(wait=False)
            except ShoalError as error:
                self.message(f"warning: {error}; training goes on")

    def count_replayed(self, result: StepResult, batches: int) -> None:
        """Count a step that was recorded before a crash."""
        self.recorder.count(result, batches)
        if self.passes(self.step, self.run.logging.every_steps):
            self.recorder.window.take(self.engine.world.total)

    def finish(self, complete: bool) -> None:
        """Make the last evaluation and the last checkpoint. `complete`: the run was not interrupted or stopped early."""
        recorder = self.recorder
        if not complete:
            self.message(f"{recorder.stopping} at {recorder.at(self.step)}")
        evaluated = complete and recorder.latest["eval"].get("step") != self.step and self.evaluate()
        if self.best.kept:
            self.message(self.best.describe(recorder.step_name))
        recorder.wait_for_checkpoint()
        if evaluated or recorder.saved_at != self.step:  # the state contains the last evaluation
            self.save()

    def _due(self, settings: Evaluation | CheckpointSettings, before: int) -> bool:
        """Whether it is time, by steps or by epochs. `before`: number of batches before this step."""
        if settings.strategy == "steps":
            assert settings.every_steps is not None  # derived with the configuration
            return self.passes(self.step, settings.every_steps)
        if settings.strategy != "epoch":
            return False
        epochs = self.recorder.epochs
        if epochs.batches_per_epoch is None:
            return epochs.at_epoch_end
        return self.recorder.batches // epochs.batches_per_epoch > before // epochs.batches_per_epoch
