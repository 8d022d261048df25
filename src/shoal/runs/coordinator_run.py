"""A coordinator's run: its driver serves the workers, its recorder keeps the records, and a judge evaluates beside both."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from shoal.coordinator import Coordinator
from shoal.coordinator.driver import CoordinatorDriver, DriverDeps, SnapshotContent
from shoal.coordinator.driver_interfaces import SavedState
from shoal.coordinator.effects import Published
from shoal.coordinator.state import Interrupted, RelayPlace, RunConcluded, WorkerExited
from shoal.engines import StepResult
from shoal.engines.learners.apply import EngineLearner
from shoal.errors import ShoalError
from shoal.protocol.messages import Message
from shoal.runs.build_run import RunParts, held_out_batches
from shoal.runs.folder.checkpoint import Checkpoint, save_weights
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.folder.run_reader import complete_status
from shoal.runs.monitoring.class_arrivals import ArrivalNotices
from shoal.runs.monitoring.prometheus import shown_to_prometheus
from shoal.runs.monitoring.recorder import INTERRUPTED, Members, Recorder, Reporter
from shoal.runs.monitoring.status import StatusWriter
from shoal.runs.monitoring.traffic_totals import TrafficTotals
from shoal.runs.storage import OpenedStorage
from shoal.runs.training.background_eval import BackgroundEvaluator
from shoal.strategies import Policies, RunLength
from shoal.updates import privacy
from shoal.updates.fragments import Span

_LOOK_EVERY_S = 1.0
_GOODBYE_S, _PARTING_S = 120.0, 15.0
"""How long a coordinator that is done waits for its workers to hear of it: the last weights may take long over a slow link. One that was
interrupted waits less."""
_MOST_UNJUDGED = 4
"""Evaluations that may wait for each other, where rounds are long and few and each is to be judged."""


class SharedDataProgress:
    """The data as the coordinator sees it: workers do the reading. How long an epoch of a stream is shows when all have begun the next."""

    def __init__(self, batches_per_epoch: int | None, places: Callable[[], Iterable[Sequence[int]]]) -> None:
        """`places`: epoch and batch of each seat."""
        self.batches_per_epoch, self._places = batches_per_epoch, places
        self.epochs = 0
        """Epochs of a stream that every seat has behind it."""
        self.at_epoch_end = False

    def look(self) -> None:
        """There is a new version."""
        if self.batches_per_epoch is None:
            epochs = min((place[0] for place in self._places()), default=0)
            self.epochs, self.at_epoch_end = epochs, epochs > self.epochs


class Higher(Protocol):
    """The coordinator that this one is a worker of."""

    def look(self) -> None:
        """See whether there is something to pass on, or an answer."""
        ...

    def leave(self) -> None: ...


class RunAgreement(NamedTuple):
    """What a run with workers is made of, and what all of them must agree on."""

    parts: RunParts
    policies: Policies
    length: RunLength
    spans: tuple[Span, ...]
    """The parts of the weights that rounds take in turn; none: every round moves all of them."""
    expected: int
    """Workers that the run was begun for: the data is cut into so many shards."""
    above: RelayPlace | None = None
    """For a relay: its place at the coordinator above."""

    @property
    def shards(self) -> int:
        """Shards of the data. A relay's workers divide the shard that the relay has."""
        return self.expected * (1 if self.above is None else self.above.shards)


class CoordinatorLoop:
    """A run whose steps are new versions, made by workers."""

    higher: Higher | None = None
    """The coordinator that this one is a worker of, where it is a relay."""

    def __init__(
        self,
        agreed: RunAgreement,
        coordinator: Coordinator,
        learner: EngineLearner,
        directory: RunDirectory,
        storage: OpenedStorage,
        reporters: list[Reporter],
        welcome: Message,
        judging: torch.device,
    ) -> None:
        """`judging`: the device that evaluates; the weights are stepped on the CPU."""
        parts, length = agreed.parts, agreed.length
        self.run, self.engine, self.policies, self.length = parts.run, parts.engine, agreed.policies, length
        self.coordinator, self.learner = coordinator, learner
        self.server, self.store, self.directory, self.board = storage.server, storage.store, directory, storage.board
        self.data = SharedDataProgress(length.batches_per_epoch, lambda: coordinator.state.positions.values())
        self.recorder = Recorder(parts.run, parts.engine, self.data, directory, reporters, learner.meaningless)
        self.recorder.owner, self.recorder.members, self.recorder.blackboard = self, self.members, storage.server
        self.recorder.total_batches = length.batches
        self.recorder.step_name = "round" if agreed.policies.contribution.takes_inner_steps else "step"
        self.message = self.recorder.message
        self._totals = TrafficTotals(storage.server.traffic, coordinator)
        self.driver = self._driver(storage, welcome)
        batches = self._judged_by(parts)
        self.judge = BackgroundEvaluator(parts, batches, directory, judging, self.recorder.step_name) if batches is not None else None
        self.sampling_rate = min(1.0, length.batches_per_contribution / length.batches_per_shard) if length.batches_per_shard else 1.0
        self.on_tick: Callable[[], None] = lambda: None
        """Called now and then: the launcher looks after the worker processes that it started here."""
        self.goodbye_s = _GOODBYE_S
        """How long to wait at the end until all have heard that it is over."""
        self._lessees: list[dict[str, Any]] = []
        """Workers that lease units, as they were a moment ago."""
        self._lessees_at, self.attendance = 0.0, ArrivalNotices()
        self.status = StatusWriter(self)

    def _judged_by(self, parts: RunParts) -> Callable[[], Any] | None:
        """What the weights are judged by: held-out data, or answers to held-out prompts. None: nothing."""
        if parts.run.evaluation.batches == 0:
            return None
        return parts.feed.evaluation_batches(held_out_batches(parts.run, parts.data.eval))

    def _driver(self, storage: OpenedStorage, welcome: Message) -> CoordinatorDriver:
        around = DriverDeps(
            server=storage.server,
            store=storage.store,
            watcher=self,
            welcome=welcome,
            capture=lambda: SnapshotContent(self.engine.weights(), self.state_dict()),
            clock=time.monotonic,
            new_session=lambda: secrets.token_hex(16),
            board=storage.board,
            status=lambda: self.status.as_json(),
        )
        return CoordinatorDriver(self.coordinator, around)

    @property
    def step(self) -> int:
        return self.engine.step_count

    # --- the run -----------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Coordinate to the end, and return the summary."""
        return self.recorder.record_run(self._work, self._summary)

    def interrupt(self) -> bool:
        """End before the next version. Return whether that was asked for before."""
        before, self.recorder.stopping = self.recorder.stopping, INTERRUPTED
        return before == INTERRUPTED

    def report_exit(self, name: str) -> None:
        """The launcher saw this worker's process exit."""
        self.driver.happen(WorkerExited(name))

    def _work(self) -> None:
        try:
            with shown_to_prometheus(self.run.coordinator, self.directory.path, self._told, self.message):
                self._coordinate()
        finally:
            self.driver.close()
            if self.higher is not None:
                self.higher.leave()

    def _told(self) -> dict[str, Any]:
        return complete_status(self.status.latest)

    def _coordinate(self) -> None:
        coordinator, recorder = self.coordinator, self.recorder
        self.driver.open()
        self._draw_untrained()
        while not (coordinator.finished or recorder.stopping):
            if self.driver.step():
                self._hear_verdicts()
                self._look_around()
            if self.higher is not None:
                self.higher.look()
        self.status.look("ending")  # workers may leave before anybody looks again
        if coordinator.stopped:
            raise ShoalError(coordinator.stopped)
        self.driver.happen(Interrupted(recorder.stopping) if recorder.stopping else RunConcluded())
        interrupted = recorder.stopping == INTERRUPTED
        self.driver.say_goodbye(time.monotonic() + (_PARTING_S if interrupted else self.goodbye_s), interrupted, self._look_around)
        self._finish_evaluation()
        recorder.finish(not recorder.stopping)
        self.driver.snapshot()

    def _look_around(self) -> None:
        if self.coordinator.orders.stops:
            self.interrupt()
        ending = self.coordinator.finished or self.recorder.stopping
        self.status.look("ending" if ending else "paused" if self.coordinator.state.paused else "running")
        self.on_tick()

    def members(self) -> Members:
        """Who takes part: workers that lease units in a database, or the coordinator's own members."""
        if self.board is None:
            return Members(self._member_rows(), in_database=False)
        if time.monotonic() >= self._lessees_at:
            self._lessees, self._lessees_at = self.board.workers(), time.monotonic() + _LOOK_EVERY_S
            for sentence in self.attendance.look(self._lessees):
                self.message(sentence)
        return Members(self._lessees, in_database=True)

    def _member_rows(self) -> list[dict[str, Any]]:
        """The coordinator's members, and the task of each where a scheduler gives out tasks."""
        rows, tasks = self.coordinator.members.table(), self.coordinator.tasks
        if tasks is None:
            return rows
        here = self.coordinator.members.by_name
        return [row | {"task": tasks.task_of(here[row["worker"]])} for row in rows]

    # --- what the driver tells -----------------------------------------------------------------------

    def published(self, version: Published, replaying: bool) -> None:
        figures: dict[str, Any] = dict(version.metrics)  # plain numbers serve as well as tensors, and cost less
        result = StepResult(figures, max(1, round(version.weight)), version.samples)
        self.data.look()
        if self.data.batches_per_epoch is None and self.run.training.epochs and self.data.epochs >= self.run.training.epochs:
            self.coordinator.end_here()
        if replaying:
            self.recorder.count_again(result, version.batches)
        else:
            self.recorder.advance(result, version.batches, self.coordinator.finished)

    def say(self, text: str) -> None:
        self.message(text)

    # --- what the recorder asks ----------------------------------------------------------------------

    def passes(self, step: int, every: int) -> bool:
        return self.policies.contribution.passes(step, every)

    def evaluate(self) -> dict[str, float]:
        """Have a copy of the weights judged beside the run."""
        if self.judge is None:
            return {}
        if self.judge.pending >= (_MOST_UNJUDGED if self.policies.contribution.takes_inner_steps else 1):
            self.message(f"warning: no evaluation at {self.recorder.step_name} {self.step}: the one before is still under way")
            return {}
        self.recorder.begin_judging()
        self.judge.begin(self.step, {name: value.detach().clone() for name, value in self.engine.weights().items()})
        return {}

    def _draw_untrained(self) -> None:
        """A class sees pictures from the beginning."""
        if self.judge is not None and self.board is not None and self.step == 0 and self.engine.task.draws_images:
            weights = {name: value.detach().clone() for name, value in self.engine.weights().items()}
            self.judge.begin(0, weights, only_draw=True)

    def _hear_verdicts(self) -> None:
        while self.judge is not None and not self.judge.verdicts.empty():
            step, metrics, problem = self.judge.verdicts.get()
            if problem:
                self.message(problem)
            if metrics:
                self.recorder.judged(metrics, step)
            else:
                for reporter in self.recorder.reporters:
                    reporter.drawn()

    def _is_interrupted(self) -> bool:
        return self.recorder.stopping == INTERRUPTED

    def _finish_evaluation(self) -> None:
        """The final weights are always judged, unless somebody wants the run to end before that is done."""
        if self.judge is None or self._is_interrupted():
            return
        self.judge.wait(self._is_interrupted)
        self._hear_verdicts()
        if self.recorder.latest["eval"].get("step") != self.step:
            self.evaluate()
            self.judge.wait(self._is_interrupted)
            self._hear_verdicts()

    def more_figures(self) -> dict[str, float]:
        return {"epsilon": self.epsilon()} if self.run.updates.privacy.enabled else {}

    def totals(self) -> dict[str, int]:
        return self._totals.bytes

    def traffic_totals(self) -> dict[str, Any]:
        """Bytes, and what was turned away by reason, over all starts of the coordinator."""
        return {"refused": self._totals.refused, **self._totals.bytes}

    def warn_of_epsilon(self, setting: str) -> None:
        """Say what the whole run will have told about any one sample, where that protects nobody. `setting`: the user's word for noise."""
        spent = self._accountant()
        length = self.length
        contributions = length.steps * length.batches_per_step / length.batches_per_contribution
        spent.record("whole run", max(1, round(contributions / (1 if self._shares_data else self.coordinator.plan.expected))))
        settings = self.run.updates.privacy
        if not settings.protects(spent.spent()):
            self.message(
                f"warning: at its end this run will have spent ε ≈ {spent.spent():.4g} at δ = {spent.delta:g}, which protects nobody "
                f"(ε up to {settings.protects_up_to:g} does): raise {setting}, or train for fewer steps"
            )

    @property
    def _shares_data(self) -> bool:
        """Whether contributions of all workers are of the same data, and not each of a shard of its own."""
        return self.policies.feed.leased or self.coordinator.tasks is not None

    def _accountant(self) -> privacy.Accountant:
        settings = self.run.updates.privacy
        by_sample = settings.unit == "sample"
        multiplier = settings.noise_multiplier if by_sample else privacy.sample_level_multiplier(settings.noise_multiplier)
        return privacy.Accountant(multiplier, self.sampling_rate, settings.delta)

    def epsilon(self) -> float:
        """What the run has told about any one sample so far. What was sent counts, whether it was taken or not."""
        state, accountant = self.coordinator.state, self._accountant()
        if self.policies.feed.leased:  # all units are of the same data
            late = sum(one["late"] + one["cancelled"] for one in self.board.workers()) if self.board is not None else 0
            accountant.record("units", sum(state.contributions.values()) + late)
        elif self._shares_data:
            accountant.record("tasks", sum(last + 1 for last in state.sequences.values()))
        else:
            for name, seat in state.seats.items():
                accountant.record(f"seat {seat}", state.sequences.get(name, -1) + 1)
        return accountant.spent()

    def save(self) -> None:
        self.driver.drain()
        self.recorder.save()
        path = self.run.coordinator.checkpoint_path
        if path is not None:
            save_weights(Path(path), self.engine.weights())

    # --- what survives -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.recorder.state_dict() | {
            "feed": {},
            "coordinator": self.coordinator.state_dict(),
            "ledger": self.store.ledger.length,
            "learner": self.learner.state_dict(),
            "totals": self._totals.state_dict(),
        }

    def _restore(self, saved: SavedState) -> None:
        self.recorder.restore(saved)
        self.learner.load_state_dict(saved.state.get("learner", {}))

    def recover(self, snapshot: SavedState) -> None:
        """Become what the coordinator was when it ended, however it ended."""
        self._restore(snapshot)
        self.driver.recover(snapshot)
        self.data.look()
        self.directory.forget_after(self.step)
        last = next(iter(self.directory.metrics()[-1:]), {})
        self.recorder.catch_up(last)
        self._totals.restore(snapshot.state.get("totals", {}), last)

    def begin_from(self, checkpoint: Checkpoint) -> None:
        """Continue another run from its checkpoint."""
        self.recorder.check_left(checkpoint)
        self._restore(checkpoint)
        self.coordinator.go_on_from(self.step, checkpoint.state.get("coordinator", {}))
        self.coordinator.publisher.publish(self.step, self.learner.vector, self.learner.buffers)

    def _summary(self) -> dict[str, Any]:
        by_owner = {"ended_by": "owner"} if self.coordinator.orders.stops else {}
        return {"contributions": dict(self.coordinator.state.contributions), **self.traffic_totals(), **by_owner}
