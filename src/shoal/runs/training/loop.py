"""Trains one run without a coordinator. Each process of an engine runs such a loop, and all of them take the same steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from shoal.data import Feed
from shoal.engines import Engine
from shoal.engines.health import NonFiniteLossError
from shoal.errors import ShoalError
from shoal.protocol.messages import INTERRUPTED
from shoal.runs.monitoring.recorder import STOPPED_EARLY, Recorder
from shoal.runs.training.recorded_loop import RecordedLoop
from shoal.tasks import Batch
from shoal.updates.state_packing import Checkpoint

_TOLD_EVERY_S = 20.0
"""Interval at which an evaluation that takes long says how far it has come."""


class _Interrupted(Exception):
    """The run was interrupted during an evaluation."""


class TrainingLoop(RecordedLoop):
    """Takes steps with batches of its own feed."""

    def __init__(
        self,
        recorder: Recorder,
        engine: Engine,
        feed: Feed,
        held_out: Callable[[], Iterator[Batch]] | None,
        write_sample: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`held_out`: batches to evaluate on, from the start at each call; `write_sample`: writes what the model makes at a step."""
        super().__init__(recorder, engine, held_out is not None)
        engine.phases.enabled = True
        self.feed, self.held_out, self.write_sample = feed, held_out, write_sample
        engine.loss_check.enabled = engine.health is None and self.run.training.precision.kind != "fp16"  # else such steps are skipped

    def train(self) -> dict[str, Any]:
        """Train to the end, and return the summary."""
        try:
            return self.recorder.record_run(self._steps, lambda: self.best.summary)
        finally:
            self.feed.close()  # ends the processes that load ahead

    def _steps(self) -> None:
        self.recorder.prepare_checkpoints()
        accumulation, total = self.run.training.gradient_accumulation_steps, self.engine.total_steps
        self.best.open()
        while not (complete := self.step >= total or self._epochs_are_over) and not self._ends_early():
            try:
                with self.engine.phases.on_host("data"):
                    batches = [next(self.feed) for _ in range(accumulation)]
                result = self.engine.step(batches)
            except NonFiniteLossError as error:
                raise self._kept_last_good(error) from None
            self.advance(result, accumulation, self.step >= total or self._epochs_are_over)
        self.finish(complete)

    def _kept_last_good(self, error: NonFiniteLossError) -> ShoalError:
        """What to tell the user of a step that was not taken, after the weights before it were saved."""
        kept = "no step was taken before"
        if self.step:
            try:
                self.recorder.wait_for_checkpoint()
                if self.recorder.saved_at != self.step:
                    self.save()
                kept = f"the weights of step {self.step} are kept in {self.recorder.checkpoints.folder / f'step-{self.step:08d}'}"
            except ShoalError as problem:
                kept = str(problem)
        return ShoalError(
            f"{error} at step {self.step + 1}, which was not taken: {kept}. Lower training.optimizer.learning_rate, set "
            "training.clipping.max_norm, look for unusual values in the data, or skip such steps with training.gradient_health.enabled. "
            "With --resume the run goes on after the batch of this step"
        )

    @property
    def _epochs_are_over(self) -> bool:
        """Whether a stream was read as often as the settings say. The number of its steps is not known beforehand."""
        epochs = self.run.training.epochs if self.feed.epochs is None else self.feed.epochs
        if epochs is None or self.feed.batches_per_epoch is not None:
            return False
        return self.feed.epoch + self.feed.at_epoch_end >= epochs

    def _ends_early(self) -> bool:
        """Whether the run was interrupted or stopped early. All processes end after the same step, even if only one was interrupted."""
        world, recorder = self.engine.world, self.recorder
        if world.size == 1:
            return bool(recorder.stopping)
        if world.all_leave:
            recorder.stopping = INTERRUPTED
        world.leaving = recorder.stopping == INTERRUPTED
        return world.all_leave or recorder.stopping == STOPPED_EARLY

    def passes(self, step: int, every: int) -> bool:
        return step % every == 0

    def more_figures(self) -> dict[str, float]:
        """Figures of a feed that makes its own batches."""
        return dict(self.feed.figures)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the model on held-out data, and stop early if it no longer improves."""
        if self.held_out is None:
            return {}
        try:
            with self.engine.averaged():
                metrics = self.engine.evaluate(self._until_interrupted(self.held_out()))
                self._write_sample()
        except _Interrupted:
            self.message(f"the evaluation at {self.recorder.step_name} {self.step} was not finished: the run is to end")
            return {}
        self.record_evaluation(metrics, self.step, self.engine.averaged_weights)
        return metrics

    def _write_sample(self) -> None:
        try:
            self.write_sample(self.step)
        except (ShoalError, OSError) as error:
            self.message(f"warning: no sample at {self.recorder.step_name} {self.step}: {error}")

    def _until_interrupted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Batches until the run is interrupted. Several processes evaluate to the end, since each waits for the others."""
        began = told_at = time.monotonic()
        for number, batch in enumerate(batches):
            if (now := time.monotonic()) - told_at >= _TOLD_EVERY_S:
                told_at = now
                self.message(f"evaluating: {number} batches in {now - began:.0f} s (evaluation.batches sets how many)")
            if self.recorder.stopping == INTERRUPTED and self.engine.world.size == 1:
                raise _Interrupted
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.recorder.state_dict() | {"feed": self.feed.state_dict()}

    def resume(self, checkpoint: Checkpoint, *, same_run: bool) -> None:
        """Continue from a checkpoint. Holds: the run computes the same numbers as without a break."""
        if not same_run:
            self.recorder.check_left(checkpoint)
        self.recorder.restore(checkpoint)
        self.feed.load_state_dict(checkpoint.state["feed"])
        if same_run:
            self.recorder.resumed(checkpoint)
