"""A relay: a coordinator whose rounds are contributions to a coordinator above."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from shoal.coordinator import Coordinator
from shoal.coordinator.driver import CoordinatorDriver
from shoal.coordinator.events import UpstreamAnswered, UpstreamState
from shoal.engines.learners.apply import AdoptingLearner, EngineLearner
from shoal.protocol.messages import INTERRUPTED
from shoal.runs.worker_run import JoinedWorker
from shoal.worker.receipts import ReceiptsFile
from shoal.worker.relay import UpstreamSession
from shoal.worker.session import SessionEvent


class Relay:
    """Sends the rounds of a coordinator upward as contributions, and lets the coordinator adopt the answers."""

    def __init__(
        self,
        joined: JoinedWorker,
        coordinator: Coordinator,
        learner: EngineLearner,
        driver: CoordinatorDriver,
        folder: Path,
        wake: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        """Take up the run where the coordinator above has it, or where this relay's journal ends. `wake`: wakes the driver's server."""
        self.joined, self.coordinator, self.driver, self.protocol = joined, coordinator, driver, joined.protocol
        self.wake, self.tell = wake, tell
        self.receipts = ReceiptsFile(folder / "upstream.jsonl")
        codec = coordinator.plan.updates.codec
        self.climber = UpstreamSession(self.protocol, learner.vector.numel(), learner.buffers.numel(), self.receipts, codec)
        self._pending: Future[list[SessionEvent]] | None = None
        self.protocol.ready, joined.doing = True, "relaying"
        self.climber.on_events(joined.sender.exchange())
        if not coordinator.state.upstream:
            assert isinstance(learner, AdoptingLearner)
            learner.begin(self.climber.weights, self.climber.statistics)
            coordinator.begin_below(self._upstream(self._batches_learned()))

    @property
    def is_interrupted(self) -> bool:
        """Whether the coordinator above was stopped, and may go on later."""
        return self.protocol.done and self.protocol.outcome == INTERRUPTED

    def tick(self) -> None:
        """Send a round that is in the journal, or take the answer to the last one."""
        if self._pending is not None:
            if self._pending.done():
                self._on_answer(self._pending.result())
            return
        upward = self.coordinator.replayed.relayed
        if upward is None:
            if self.protocol.done and not self.is_interrupted:
                self.coordinator.completion.end_here()
            return
        self.driver.drain()  # the round's number must be durable before it is sent
        if self.climber.offer(upward.asked, upward.frames):
            self._pending = self.joined.sender.begin()
            self._pending.add_done_callback(lambda future: self.wake())

    def leave(self) -> None:
        """Leave the coordinator above. A relay that resumes this run sends unanswered requests again."""
        self.joined.sender.leave_early("")
        self.joined.close()
        self.receipts.close()

    def _on_answer(self, events: list[SessionEvent]) -> None:
        self._pending = None
        answered = self.climber.on_events(events)
        if answered is None:
            return
        if answered.status not in ("accepted", "finished"):
            self.tell(f"warning: the coordinator above did not take a round of this relay: {answered.status}")
        upstream = self._upstream(self.coordinator.state.upstream["begun_at"])
        done = self.protocol.done and not self.is_interrupted
        self.driver.handle(UpstreamAnswered(upstream, answered.status, answered.frames, done))

    def _upstream(self, begun_at: int) -> UpstreamState:
        climber = self.climber
        return UpstreamState(
            self.protocol.name, climber.version, climber.step, climber.inner_steps, self.protocol.seq, begun_at, climber.task
        )

    def _batches_learned(self) -> int:
        """Batches of the relay's seat that were already learned from."""
        epoch, position = self.protocol.place
        above = self.coordinator.plan.above
        return epoch * ((above and above.batches_per_shard) or 0) + position
