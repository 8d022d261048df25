"""A coordinator's run: the driver serves the workers, the recorder records the versions, and an evaluator runs in the background."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.coordinator import Coordinator
from shoal.coordinator.driver import CoordinatorDriver, DriverDeps, SnapshotContent
from shoal.coordinator.effects import Published
from shoal.coordinator.events import Interrupted, RunConcluded, WorkerExited
from shoal.coordinator.run_plan import RelayPlace
from shoal.engines import StepResult
from shoal.engines.learners.apply import EngineLearner
from shoal.errors import ShoalError
from shoal.protocol.messages import INTERRUPTED, Message
from shoal.runs.build_run import RunParts, evaluation_batches
from shoal.runs.folder.checkpoint import save_weights
from shoal.runs.folder.measured_rounds import keep_round
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.folder.run_reader import WAITS_FOR_DATABASE, complete_status
from shoal.runs.monitoring.members import MemberOverview
from shoal.runs.monitoring.privacy_budget import PrivacyBudget
from shoal.runs.monitoring.prometheus import metrics_page
from shoal.runs.monitoring.recorder import Recorder, Reporter, SharedDataProgress
from shoal.runs.monitoring.status import StatusWriter, TrafficTotals
from shoal.runs.monitoring.throughput import WorkerReports
from shoal.runs.relay import Relay
from shoal.runs.storage import OpenedStorage
from shoal.runs.training.background_eval import BackgroundEvaluator
from shoal.runs.training.recorded_loop import RecordedLoop
from shoal.strategies import Policies, RunLength
from shoal.updates.fragments import Span
from shoal.updates.state_packing import Checkpoint

_GOODBYE_S, _PARTING_S = 120.0, 15.0
"""How long a coordinator waits at the end until its workers know: the last weights may take long over a slow link. The second value is
for a run that was interrupted."""
_MOST_PENDING = 4
"""Evaluations that may be pending where rounds are long and few, and each is evaluated."""


class RunAgreement(NamedTuple):
    """The parts of a run with workers, and what the coordinator and all workers agree on."""

    parts: RunParts
    policies: Policies
    length: RunLength
    spans: tuple[Span, ...]
    """Fragments of the weights that rounds update in turn; empty: every round updates all of them."""
    expected: int
    """Workers that the run was begun for, which is the number of shards of the data."""
    above: RelayPlace | None = None
    """For a relay: its place at the coordinator above."""

    @property
    def shards(self) -> int:
        """Shards of the data. A relay's workers divide the shard that the relay has."""
        return self.expected * (1 if self.above is None else self.above.shards)


class CoordinatorLoop(RecordedLoop):
    """A run whose steps are new versions of the weights, made of the contributions of workers."""

    relay: Relay | None = None
    """Where this coordinator is a relay: the connection to the coordinator above."""

    def __init__(
        self,
        agreed: RunAgreement,
        coordinator: Coordinator,
        learner: EngineLearner,
        directory: RunDirectory,
        storage: OpenedStorage,
        reporters: list[Reporter],
        welcome: Message,
        device: torch.device,
    ) -> None:
        """`device`: evaluates; the weights are stepped on the CPU."""
        parts, length, policies = agreed.parts, agreed.length, agreed.policies
        self.data = SharedDataProgress(length.batches_per_epoch, lambda: coordinator.state.positions.values())
        step_name = "round" if policies.contribution.takes_inner_steps else "step"
        recorder = Recorder(parts.run, parts.engine, self.data, directory, reporters, learner.meaningless, step_name, length.batches)
        batches = evaluation_batches(parts)
        super().__init__(recorder, parts.engine, batches is not None)
        self.policies, self.coordinator, self.learner = policies, coordinator, learner
        self.server, self.store, self.board = storage.server, storage.store, storage.board
        self.members = MemberOverview(coordinator, storage.board, self.message)
        self.recorder.members, self.recorder.blackboard = lambda: self.members.latest, storage.server
        recorder.throughput.workers = WorkerReports(self.members.figures, parts.run.transport.kind == "in-process")
        self.traffic = TrafficTotals(storage.server.traffic, coordinator)
        self.privacy = PrivacyBudget(parts.run, coordinator, policies, length, storage.board)
        self.status = StatusWriter(self.recorder, coordinator, length, self.members, self.traffic)
        self.driver = self._driver(storage, welcome)
        storage.report_to(self._on_storage_trouble)
        self.evaluator = BackgroundEvaluator(parts, batches, directory, device, step_name) if batches is not None else None
        self.on_open: Callable[[], None] = lambda: None
        """Called when the coordinator answers."""
        self.on_tick: Callable[[], None] = lambda: None
        """Called regularly: the launcher checks the worker processes that it started."""
        self.goodbye_s = _GOODBYE_S
        """How long to wait at the end until all workers know that the run is over."""

    def _driver(self, storage: OpenedStorage, welcome: Message) -> CoordinatorDriver:
        around = DriverDeps(
            server=storage.server,
            store=storage.store,
            published=self.published,
            say=self.message,
            welcome=welcome,
            capture=lambda: SnapshotContent(self.engine.weights(), self.state_dict()),
            clock=time.monotonic,
            new_session=lambda: secrets.token_hex(16),
            database=storage.board,
            status=lambda: self.status.as_json(),
            measured=lambda one: keep_round(self.directory.path, one, self.run.updates.scorer.kept),
        )
        return CoordinatorDriver(self.coordinator, around)

    # --- the run -----------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Coordinate to the end, and return the summary."""
        return self.recorder.record_run(self._work, self._summary)

    def report_exit(self, name: str) -> None:
        """The launcher saw this worker's process exit."""
        self.driver.handle(WorkerExited(name))

    def _work(self) -> None:
        try:
            with metrics_page(self.run.coordinator, self.directory.path, lambda: complete_status(self.status.latest), self.message):
                self._coordinate()
        finally:
            self.driver.close()
            if self.relay is not None:
                self.relay.leave()

    def _coordinate(self) -> None:
        coordinator, recorder = self.coordinator, self.recorder
        self.best.open()
        self.driver.open()
        self.on_open()
        self._show_untrained()
        while not (coordinator.finished or recorder.stopping):
            if self.driver.step():
                self._record_evaluations()
                self._tick()
            if self.relay is not None:
                self.relay.tick()
                if self.relay.is_interrupted and not self.recorder.stopping:
                    self.message("the coordinator above was stopped: this relay saves and ends, and can go on later")
                    self.interrupt()
        self.status.update("ending")  # workers may leave before the next tick
        if coordinator.completion.stopped:
            raise ShoalError(coordinator.completion.stopped)
        self.driver.handle(Interrupted(recorder.stopping) if recorder.stopping else RunConcluded())
        interrupted = recorder.stopping == INTERRUPTED
        self.driver.say_goodbye(time.monotonic() + (_PARTING_S if interrupted else self.goodbye_s), interrupted, self._tick)
        self._finish_evaluation()
        self.finish(not recorder.stopping)
        self.driver.snapshot()

    def _on_storage_trouble(self, text: str) -> None:
        """The database does not answer, which the run waits for; or it answers again, and the next tick writes the status."""
        self.message(text)
        if text.startswith("warning"):
            self.status.show_waiting(WAITS_FOR_DATABASE)

    def _tick(self) -> None:
        if self.coordinator.owner_commands.stops:
            self.interrupt()
        ending = self.coordinator.finished or self.recorder.stopping
        self.status.update("ending" if ending else "paused" if self.coordinator.state.paused else "running")
        self.on_tick()

    # --- called by the driver ------------------------------------------------------------------------

    def published(self, version: Published, replaying: bool) -> None:
        figures: dict[str, Any] = dict(version.metrics)  # plain numbers serve as well as tensors, and cost less
        result = StepResult(figures, max(1, round(version.weight)), version.samples)
        self.data.update()
        if self.data.batches_per_epoch is None and self.run.training.epochs and self.data.epochs >= self.run.training.epochs:
            self.coordinator.completion.end_here()
        if replaying:
            self.count_replayed(result, version.batches)
        else:
            self.advance(result, version.batches, self.coordinator.finished)

    # --- evaluation, figures and checkpoints -----------------------------------------------------------

    def passes(self, step: int, every: int) -> bool:
        return self.policies.contribution.passes(step, every)

    def evaluate(self) -> dict[str, float]:
        """Start to evaluate a copy of the weights in the background."""
        if self.evaluator is None:
            return {}
        if self.evaluator.pending >= (_MOST_PENDING if self.policies.contribution.takes_inner_steps else 1):
            self.message(f"warning: no evaluation at {self.recorder.step_name} {self.step}: the one before is still under way")
            return {}
        self.recorder.begin_evaluation()
        self.evaluator.begin(self.step, self.engine.averaged_weights())
        return {}

    def _show_untrained(self) -> None:
        """Show a class pictures of the untrained model."""
        if self.evaluator is not None and self.board is not None and self.step == 0 and self.engine.task.draws_images:
            self.evaluator.begin(0, self.engine.weights(), only_sample=True)

    def _record_evaluations(self) -> None:
        while self.evaluator is not None and not self.evaluator.results.empty():
            step, metrics, problem, weights = self.evaluator.results.get()
            if problem:
                self.message(problem)
            if metrics:
                self.record_evaluation(metrics, step, partial(dict, weights))
            else:
                for reporter in self.recorder.reporters:
                    reporter.drawn()

    def _is_interrupted(self) -> bool:
        return self.recorder.stopping == INTERRUPTED

    def _finish_evaluation(self) -> None:
        """Evaluate the final weights, unless the run is interrupted."""
        if self.evaluator is None or self._is_interrupted():
            return
        self.evaluator.wait(self._is_interrupted)
        self._record_evaluations()
        if self.recorder.latest["eval"].get("step") != self.step:
            self.evaluate()
            self.evaluator.wait(self._is_interrupted)
            self._record_evaluations()

    def more_figures(self) -> dict[str, float]:
        self.members.read()  # a record is shown with the workers of its time, also of a run that is over within a second
        return {"epsilon": self.privacy.epsilon()} if self.run.updates.privacy.enabled else {}

    def totals(self) -> dict[str, int]:
        return self.traffic.bytes

    def save(self, wait: bool = True) -> None:
        self.driver.drain()
        super().save(wait)
        path = self.run.coordinator.checkpoint_path
        if path is not None:
            save_weights(Path(path), self.engine.weights())

    # --- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.recorder.state_dict() | {
            "feed": {},
            "coordinator": self.coordinator.replayed.state_dict(),
            "ledger": self.store.ledger.length,
            "learner": self.learner.state_dict(),
            "totals": self.traffic.state_dict(),
        }

    def _restore(self, saved: Checkpoint) -> None:
        self.recorder.restore(saved)
        self.learner.load_state_dict(saved.state.get("learner", {}))  # a run alone has none

    def recover(self, snapshot: Checkpoint) -> None:
        """Restore the coordinator from its last snapshot and the journal since then."""
        self._restore(snapshot)
        self.driver.recover(snapshot)
        self.data.update()
        self.directory.forget_after(self.step)
        last = next(iter(self.directory.metrics()[-1:]), {})
        self.recorder.catch_up(last)
        self.traffic.restore(snapshot.state["totals"], last)

    def begin_from(self, checkpoint: Checkpoint) -> None:
        """Continue another run from its checkpoint."""
        self.recorder.check_left(checkpoint)
        self._restore(checkpoint)
        self.coordinator.go_on_from(self.step, checkpoint.state.get("coordinator", {}))
        self.coordinator.publisher.publish(self.step, self.learner.vector, self.learner.buffers)

    def _summary(self) -> dict[str, Any]:
        by_owner = {"ended_by": "owner"} if self.coordinator.owner_commands.stops else {}
        return self.best.summary | {"contributions": dict(self.coordinator.state.contributions), **self.traffic.state_dict(), **by_owner}
