"""The worker's main loop: data → engine → contribution → new weights, until the run is over.

What differs between strategies is in their policies. Uploads and downloads overlap with computing where the strategy allows it. A gradient
that is not finite is never sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from shoal.config.schema.updates import Updates
from shoal.data import Feed
from shoal.errors import ShoalError
from shoal.protocol.messages import Contribute, SeatAssigned
from shoal.updates.fragments import Span
from shoal.updates.worker_state import NoWorkerCheckpoint, WorkerCheckpoint
from shoal.worker.producers import ProducedContribution, WorkerContribution
from shoal.worker.receipts import ReceiptsFile
from shoal.worker.sender import Sender
from shoal.worker.session import COMPUTING, STUCK, ContributionReceipt, LeasedUnit, RunNews, SessionEvent
from shoal.worker.step_policies import FeedPolicy, PullPolicy
from shoal.worker.timing import WorkerTimes
from shoal.worker.update_encoding import UpdateEncoder, WorkerEngine
from shoal.worker.weights import WorkerWeights

_WORTH_OVERLAPPING = 0.1
"""Overlap is used only if an answer takes at least this share of a step's time: fresh weights are worth a short wait."""
_LAG_TO_SPEND = 0.5
"""Share of the allowed lag that overlap may use up, limited to `_MOST_LAG_SPENT` versions."""
_MOST_LAG_SPENT = 3.0
"""Versions. Measured on MNIST: five versions of lag cost a point of accuracy, two a quarter of a point."""
_STUCK_AFTER_LEASES = 10
_WAITING, _SENDING = "waiting", "sending"
_SOON_S = 0.05
"""Seconds. For longer steps the sender thread does the sending: it can reconnect while the worker computes, and only it can measure the
time of an answer that the worker does not wait for."""


class WorkerPolicies(NamedTuple):
    """The worker's share of a strategy."""

    feed: FeedPolicy
    contribution: WorkerContribution
    pull: PullPolicy
    window: int = 0
    """Rounds that may be open at once; 0: there are no rounds to wait for."""
    spans: tuple[Span, ...] = ()
    """Parts of the weights that rounds take in turn; none: each round moves all of them."""


class WorkerPace(NamedTuple):
    """Recent times and lag of a worker."""

    round_trip_s: float
    step_s: float
    versions_per_step: float
    most_lag: float
    """Versions that its contributions may lag."""


def may_overlap(policies: WorkerPolicies, overlap: int, pace: WorkerPace) -> bool:
    """Whether the next step may begin before the answer, if that saves time and is not too late. `overlap`: the producer's own delay."""
    if policies.contribution.takes_inner_steps or policies.feed.leased:
        return overlap > 0
    if policies.window:
        return policies.window > 1
    if policies.contribution.own_steps:
        return policies.pull.every > 1  # a worker that pulls at every step wants fresh weights
    pays = pace.round_trip_s > _WORTH_OVERLAPPING * pace.step_s
    return pays and 2 * pace.versions_per_step - 1 <= min(_MOST_LAG_SPENT, _LAG_TO_SPEND * pace.most_lag)


class Worker:
    """A worker that has joined."""

    def __init__(
        self,
        sender: Sender,
        engine: WorkerEngine,
        feed_for: Callable[[int, int, int], Feed],
        policies: WorkerPolicies,
        updates: Updates,
        *,
        accumulation: int = 1,
        ranks: int = 1,
        receipts: ReceiptsFile | None = None,
        checkpoint: WorkerCheckpoint | None = None,
        slowdown: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`feed_for(seat, epoch, position)` returns the feed that begins at that place."""
        self.sender, self.protocol, self.engine, self.policies = sender, sender.protocol, engine, policies
        self.repeat_number = sender.protocol.repeat_number
        self.feed_for, self.accumulation, self.ranks, self.slowdown = feed_for, accumulation, ranks, slowdown
        self.receipts, self.clock = receipts or ReceiptsFile(None), clock
        self.encoder = UpdateEncoder(engine, updates)
        contribution = policies.contribution
        self.weights = WorkerWeights(engine, updates.codec, policies.pull, contribution)
        self.producer = contribution.producer(self, checkpoint or NoWorkerCheckpoint(), policies.spans)
        self.state = "starting"
        self.counts = {"sent": 0, "accepted": 0, "rejected": 0, "abandoned": 0}
        self.samples, self.weight = 0, 0.0
        """Of the contributions that were accepted. The weight counts tokens, where the task does."""
        self.unit: LeasedUnit | None = None
        """The unit that the worker has leased."""
        self.steps, self.server_step = 0, 0.0
        self.busy = 1.0
        """Set at the end: the share of the time in which the worker did not wait for an answer."""
        self._feed: Feed | None = None
        self._under_way: Callable[[], list[SessionEvent]] | None = None
        self._most_lag, self._versions_per_step = math.inf, 1.0
        self._step_s = 0.0
        self.times = WorkerTimes(clock)
        self._began = self._progress_at = clock()

    # --- the work ----------------------------------------------------------------------------------

    def work(self) -> None:
        """Work until the run is over or `stop` is called."""
        try:
            self._work()
        finally:
            self.receipts.close()
            if self._feed is not None:
                self._feed.close()  # processes that load ahead end with the work

    def _work(self) -> None:
        welcome = self.protocol.welcome
        if not self.policies.feed.leased:
            self.move_to(SeatAssigned(welcome["seat"], welcome["epoch"], welcome["position"]))
        self.protocol.ready = True
        self._send_all()
        self._began = self.clock()
        while not self.over:
            if not self.policies.feed.leased or self._claim():
                self._step()
        self.await_answer()
        self.busy = 1.0 - self.times.spent(_WAITING) / max(1e-9, self.clock() - self._began)
        self.state = "leaving"
        self.protocol.leave()
        self._send_all()

    def stop(self) -> None:
        """Ask the worker to leave soon. Any thread may call this."""
        self.protocol.stop()
        self.sender.connection.wake()

    @property
    def doing(self) -> str:
        """The worker's state for heartbeats. A worker at the same batch of a unit for many lease periods is stuck, not slow."""
        feed = self.policies.feed
        stuck = feed.leased and self.state == COMPUTING and self.clock() - self._progress_at > _STUCK_AFTER_LEASES * feed.lease_s
        return STUCK if stuck else self.state

    @property
    def over(self) -> bool:
        return self.protocol.done or self.protocol.stopping

    @property
    def stopping(self) -> bool:
        return self.protocol.stopping and not self.protocol.done

    @property
    def feed(self) -> Feed:
        assert self._feed is not None
        return self._feed

    @property
    def round(self) -> int:
        return self.protocol.round

    @property
    def next_seat(self) -> SeatAssigned:
        return SeatAssigned(self.protocol.seat, *self.protocol.place)

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of the worker for the dashboard and reports."""
        whole = self.clock() - self._began
        return {
            "samples": self.samples,
            "samples_per_s": self.samples / whole if whole else 0.0,
            "weight_per_s": self.weight / whole if whole else 0.0,
            **{f"{phase}_s": seconds for phase, seconds in self.times.phases.items()},
            "computing_s": self.times.spent(COMPUTING),
            "idle_s": self.times.spent(_WAITING),
            "sending_s": self.times.spent(_SENDING),
            "accepted": self.counts["accepted"],
            "rejected": self.counts["rejected"] + self.counts["abandoned"],
        }

    def report(self, text: str) -> None:
        self.sender.report(text)

    def _step(self) -> None:
        self.state, started = COMPUTING, self.times.begin(COMPUTING)
        self._progress_at = started
        try:
            made = self.producer.make()
        except ShoalError:
            self._return_unit()
            raise
        self.times.add_phases(self.engine.phases.take())
        if made is None:
            self.times.begin("")
            return self._return_unit()
        feed, frames = self.feed, made.frames
        if frames is None:
            self.times.begin(_SENDING)
            frames = self.encoder.frames(made.vector, made.samples, made.span)
        now = self.times.begin(COMPUTING)
        if self.slowdown > 1:
            time.sleep((self.slowdown - 1) * (now - started))
        self._step_s = self.times.begin("") - started
        self.steps += 1
        self.await_answer()
        if self.feed is not feed:  # the coordinator has moved this worker meanwhile: another worker sends this part
            return None
        pace = WorkerPace(self.sender.round_trip_s, self._step_s, self._versions_per_step, self._most_lag)
        overlaps = not self._is_through and may_overlap(self.policies, self.producer.sync_delay, pace)
        soon = self._step_s < _SOON_S and (self.policies.contribution.own_steps or not overlaps)
        self._send(made, frames, soon and not self.policies.contribution.takes_inner_steps)
        if not overlaps:
            self.await_answer()
        return None

    @property
    def _is_through(self) -> bool:
        """Whether the worker has reached the end of its part of the data: the coordinator decides what comes next."""
        until = self.protocol.until
        return until is not None and self.feed.state_dict()["position"] >= until

    # --- units on lease ----------------------------------------------------------------------------

    def _claim(self) -> bool:
        """Lease one unit: a second unit that waits in this worker would delay a round. Returns whether there is work."""
        self.unit, self.state = None, _WAITING
        self.times.begin(_WAITING)
        self.protocol.claim()
        self._send_all()
        self.times.begin("")
        unit: LeasedUnit | None = self.unit
        if unit is None or self.over:
            return False
        if unit.version != self.weights.version:
            self.protocol.give_back(unit.number)
            return False
        self.move_to(SeatAssigned(0, unit.epoch, unit.start))
        return True

    def still_wanted(self, unit: LeasedUnit) -> bool:
        self._progress_at = self.clock()  # a batch of the unit is done
        wanted = self.protocol.oldest <= unit.version and self.sender.connection.still_wanted(unit.number)
        self.counts["abandoned"] += not wanted
        return wanted

    def _return_unit(self) -> None:
        """Return a unit without a result, with the reason if it failed here, so that other workers may take it."""
        if self.unit is None:
            return
        if self.producer.failure:
            self.protocol.fail(self.unit.number, self.producer.failure)
            self.producer.failure = ""
        else:
            self.protocol.give_back(self.unit.number)
        self._send_all()

    # --- sending and receiving -----------------------------------------------------------------------

    def _send(self, made: ProducedContribution, frames: list[memoryview], soon: bool) -> None:
        unit = self.unit
        place = {"epoch": unit.epoch, "position": unit.start + unit.batches} if unit is not None else self.feed.state_dict()
        contribution = Contribute(
            session="",
            number=0,
            seq=0,
            base=made.base,
            round=0,
            weight=float(made.weight),
            samples=made.samples,
            epoch=place["epoch"],
            position=place["position"],
            batches=made.batches,
            have=-1,
            metrics={name: float(value) for name, value in made.metrics.items()},
            unit=-1 if unit is None else unit.number,
        )
        self.protocol.contribute(contribution, frames, pulls=unit is None and self.steps % self.policies.pull.every == 0)
        self.counts["sent"] += 1
        self.times.begin(_SENDING)
        self._under_way = self.sender.send(soon)
        self.times.begin("")

    def await_answer(self) -> None:
        """Wait for the answer to the contribution that is under way, and apply it."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self.state, before = _WAITING, self.times.doing
            self.times.begin(_WAITING)
            events = under_way()
            self.times.begin(before)
            self._apply(events)

    def _send_all(self) -> None:
        self._apply(self.sender.exchange())

    def _apply(self, events: list[SessionEvent]) -> None:
        status: str | None = None
        for event in events:
            if isinstance(event, ContributionReceipt):
                status = event.status
                self._note(event)
            elif isinstance(event, RunNews):
                self._refresh(event, status)
            elif isinstance(event, LeasedUnit):
                self.unit = event
            elif not self.policies.feed.leased:
                self.move_to(event)

    def move_to(self, place: SeatAssigned) -> None:
        """Continue at another place in the data."""
        if self._feed is not None:
            self._feed.close()
        self._feed = self.feed_for(*place)

    def _note(self, receipt: ContributionReceipt) -> None:
        taken, sent = receipt.status == "accepted", receipt.contribution
        if receipt.status != "finished":
            self.counts["accepted" if taken else "rejected"] += 1
        if taken:
            self.samples += sent.samples
            self.weight += sent.weight
            self.weights.note_lag(receipt.version - sent.base - 1)
        self.receipts.write(self.protocol.name, receipt)

    def _refresh(self, news: RunNews, status: str | None) -> None:
        """Load new weights and the run's progress from an answer."""
        header = news.header
        self.server_step, self._most_lag = header["step"], header["most_lag"]
        if not news.afresh:
            passed = header["version"] - self.weights.version
            self._versions_per_step = 0.8 * self._versions_per_step + 0.2 * max(1, passed / self.policies.pull.every)
        self.weights.load(news)
        self.producer.on_answer(news, status)
