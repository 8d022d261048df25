"""A run alone: data → engine → record, evaluate, save. Of the several processes of one engine each has such a loop, and they go in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal.data import Feed
from shoal.engines import Engine
from shoal.errors import ShoalError
from shoal.runs.folder.checkpoint import Checkpoint
from shoal.runs.monitoring.recorder import INTERRUPTED, STOPPED_EARLY, Recorder
from shoal.tasks import Batch


class _Interrupted(Exception):
    """The run is to end, and an evaluation with it."""


class TrainingLoop:
    """One worker's training, without others."""

    def __init__(
        self,
        recorder: Recorder,
        engine: Engine,
        feed: Feed,
        held_out: Callable[[], Iterator[Batch]] | None,
        samples: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`held_out`: batches to judge by, from the start at each call; `samples` shows what the model makes at a step."""
        self.recorder, self.run, self.directory, self.message = recorder, recorder.run, recorder.directory, recorder.message
        self.engine, self.feed, self.held_out, self.draw_samples = engine, feed, held_out, samples
        recorder.owner = self

    @property
    def step(self) -> int:
        return self.engine.step_count

    def train(self) -> dict[str, Any]:
        """Run to the end, and return the summary."""
        try:
            return self.recorder.record_run(self._steps)
        finally:
            self.feed.close()  # processes that load ahead end with the run

    def interrupt(self) -> bool:
        """End after this step. Return whether that was asked for before."""
        before, self.recorder.stopping = self.recorder.stopping, INTERRUPTED
        return before == INTERRUPTED

    def _steps(self) -> None:
        accumulation, total = self.run.training.gradient_accumulation_steps, self.engine.total_steps
        while not (complete := self.step >= total or self._epochs_are_over) and not self._ends():
            result = self.engine.step([next(self.feed) for _ in range(accumulation)])
            self.recorder.advance(result, accumulation, self.step >= total or self._epochs_are_over)
        self.recorder.finish(complete)

    @property
    def _epochs_are_over(self) -> bool:
        """Whether a stream was read as often as the run is to read it. How many steps that takes is not known beforehand."""
        epochs = self.run.training.epochs if self.feed.epochs is None else self.feed.epochs
        if epochs is None or self.feed.batches_per_epoch is not None:
            return False
        return self.feed.epoch + self.feed.at_epoch_end >= epochs

    def _ends(self) -> bool:
        """Is it to end before its time? Several processes end after the same step, whichever of them was asked to."""
        world, recorder = self.engine.world, self.recorder
        if world.size == 1:
            return bool(recorder.stopping)
        if world.all_leave:
            recorder.stopping = INTERRUPTED
        world.leaving = recorder.stopping == INTERRUPTED
        return world.all_leave or recorder.stopping == STOPPED_EARLY

    # --- what the recorder asks ----------------------------------------------------------------------

    def passes(self, step: int, every: int) -> bool:
        return step % every == 0

    def more_figures(self) -> dict[str, float]:
        """What the feed has found out about its own batches, where it makes them itself."""
        return dict(self.feed.figures)

    def totals(self) -> dict[str, int]:
        return {}

    def evaluate(self) -> dict[str, float]:
        """Judge the model on held-out data, and stop early if it no longer gets better."""
        if self.held_out is None or self.run.evaluation.batches == 0:
            return {}
        try:
            metrics = self.engine.evaluate(self._until_interrupted(self.held_out()))
        except _Interrupted:
            self.message(f"the evaluation at step {self.step} was not finished: the run is to end")
            return {}
        try:
            self.draw_samples(self.step)
        except (ShoalError, OSError) as error:
            self.message(f"warning: no sample at step {self.step}: {error}")
        self.recorder.judged(metrics, self.step)
        return metrics

    def _until_interrupted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Batches to judge by, until somebody wants the run to end. Several processes judge together: none leaves the others waiting."""
        for batch in batches:
            if self.recorder.stopping == INTERRUPTED and self.engine.world.size == 1:
                raise _Interrupted
            yield batch

    def save(self) -> None:
        self.recorder.save()

    def state_dict(self) -> dict[str, Any]:
        return self.recorder.state_dict() | {"feed": self.feed.state_dict()}

    def resume(self, checkpoint: Checkpoint, *, same_run: bool) -> None:
        """Continue from a checkpoint, to the same numbers as if there had been no break."""
        if not same_run:
            self.recorder.check_left(checkpoint)
        self.recorder.restore(checkpoint)
        self.feed.load_state_dict(checkpoint.state["feed"])
        if same_run:
            self.recorder.resumed(checkpoint)
