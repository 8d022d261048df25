"""A relay: a coordinator whose rounds are contributions to another one. It is a worker whose engine is a coordinator."""

from __future__ import annotations

from concurrent.futures import Future

from shoal.coordinator.state import UpstreamAnswered, UpstreamState
from shoal.engines.learners.apply import AdoptingLearner
from shoal.runs.coordinator_run import CoordinatorLoop
from shoal.runs.worker_run import JoinedWorker
from shoal.worker.receipts import ReceiptsFile
from shoal.worker.relay import UpstreamSession
from shoal.worker.session import SessionEvent


class Relay:
    """Passes on what the rounds of a loop make, and has the loop go on with the answer."""

    def __init__(self, joined: JoinedWorker, loop: CoordinatorLoop) -> None:
        """Take up the run where the coordinator above has it, or where this relay's journal ends."""
        self.joined, self.loop, self.protocol = joined, loop, joined.protocol
        learner, self.coordinator = loop.learner, loop.coordinator
        self.receipts = ReceiptsFile(loop.directory.path / "upstream.jsonl")
        codec = self.coordinator.plan.updates.codec
        self.climber = UpstreamSession(self.protocol, learner.vector.numel(), learner.buffers.numel(), self.receipts, codec)
        self._under_way: Future[list[SessionEvent]] | None = None
        self.protocol.ready, joined.doing = True, "relaying"
        self.climber.hear(joined.sender.exchange())
        if not self.coordinator.state.upstream:
            assert isinstance(learner, AdoptingLearner)
            learner.begin(self.climber.weights, self.climber.statistics)
            self.coordinator.begin_below(self._upstream(self._learned()))

    def look(self) -> None:
        """Pass on what a round made, once it is written down; or take what came of it."""
        if self._under_way is not None:
            if self._under_way.done():
                self._hear(self._under_way.result())
            return
        upward = self.coordinator.book.upward
        if upward is None:
            if self.protocol.done:
                self.coordinator.end_here()
            return
        self.loop.driver.drain()  # it has its number for good, before anybody is told
        if self.climber.offer(upward.asked, upward.frames):
            self._under_way = self.joined.sender.begin()
            self._under_way.add_done_callback(lambda future: self.loop.server.wake())

    def leave(self) -> None:
        """Go. What is not answered yet is said again by the relay that goes on with this run."""
        self.joined.sender.leave_early("")
        self.joined.close()
        self.receipts.close()

    def _hear(self, events: list[SessionEvent]) -> None:
        self._under_way = None
        answered = self.climber.hear(events)
        if answered is None:
            return
        if answered.status not in ("accepted", "finished"):
            self.loop.message(f"warning: the coordinator above did not take a round of this relay: {answered.status}")
        upstream = self._upstream(self.coordinator.state.upstream["begun_at"])
        self.loop.driver.happen(UpstreamAnswered(upstream, answered.status, answered.frames, self.protocol.done))

    def _upstream(self, begun_at: int) -> UpstreamState:
        climber = self.climber
        return UpstreamState(self.protocol.name, climber.version, climber.step, climber.inner_steps, self.protocol.seq, begun_at)

    def _learned(self) -> int:
        """Batches of the relay's seat that were learned from before."""
        epoch, position = self.protocol.place
        above = self.coordinator.plan.above
        return epoch * ((above and above.batches_per_shard) or 0) + position
