"""A worker joins a run whose units are leased: all it needs is the address of the database."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from shoal import data
from shoal.config.ranks import Place
from shoal.config.schema.cluster import Postgres
from shoal.config.schema.strategy import WorkUnits
from shoal.errors import ShoalError
from shoal.runs.assembly import Parts, Progress
from shoal.runs.given import NOTHING, Given
from shoal.runs.joining import Joined, Way, about_here, configuration, parts_for
from shoal.transports import Message
from shoal.transports.postgres import UnitDesk
from shoal.worker.courier import Pulse
from shoal.worker.leased import Leased
from shoal.worker.member import Receipts


def join(way: Way, tell: Callable[[str], None]) -> Joined | Leasing:
    """Join the run in a database, in the way it is run."""
    desk = UnitDesk(way.address, poll_interval_s=1.0, patience_s=way.patience_s, tell=tell)
    try:
        welcome = desk.welcome(wait_s=way.patience_s)
        run = configuration(welcome.header, ())
        if isinstance(run.strategy, WorkUnits):
            assert isinstance(run.transport, Postgres)
            desk.poll_interval_s = run.transport.poll_interval_s
            return Leasing(way, desk, welcome, tell)
    except BaseException:
        desk.close()
        raise
    desk.close()
    return Joined(way, tell)


class Leasing:
    """A worker that takes part, from its joining to its end."""

    def __init__(self, way: Way, desk: UnitDesk, welcome: Message, tell: Callable[[str], None]) -> None:
        self.way, self.desk, self.welcome, self.tell = way, desk, welcome, tell
        self.run = configuration(welcome.header, way.overrides)
        if self.run.engine.kind != "single":
            raise ShoalError("engine.kind: a unit of work is for one process: leave it at single")
        self.member: Leased | None = None
        self.stopping = False
        self.name: str = desk.enter(way.name, about_here())
        self.pulse = Pulse(self._beat, welcome.header["heartbeat_s"])

    def prepare(self, progress: Progress | None = None, here: Place | None = None, given: Given = NOTHING) -> None:
        """Put together what the work takes."""
        assert here is None  # several processes were refused
        try:
            self._work_on(parts_for(self.welcome.header, self.welcome.frames, self.way.overrides, progress, given=given))
        except BaseException:
            self.close()
            raise

    def _work_on(self, parts: Parts) -> None:
        run = parts.run
        if not isinstance(parts.data.train, data.Samples):
            raise ShoalError("work units are pieces of data that has an end")
        self.pieces = data.Pieces(
            parts.data.train,
            batch_size=run.training.batch_size or 1,
            seed=run.data.shuffle_seed or 0,
            reshuffle=run.data.reshuffle_each_epoch,
            loader=run.data.loader,
        )
        torch.seed()  # every worker draws noise of its own
        self.member = Leased(
            self.name,
            self.desk,
            parts.single,
            self.pieces.read,
            run.updates,
            tell=self.tell,
            receipts=Receipts(self.way.receipts),
            slowdown=self.way.slowdown,
        )

    def _beat(self) -> None:
        """A sign of life. One that is lost is no matter: the next is on its way."""
        with contextlib.suppress(ShoalError):
            self.desk.beat(self.member.state if self.member else "preparing", self.member.figures if self.member else {})

    def work(self) -> None:
        """Until the run is over, or `stop` is called."""
        assert self.member is not None
        try:
            if not self.stopping:
                self.member.work()
        finally:
            self.close()

    def stop(self) -> None:
        """Leave after this batch."""
        self.stopping = True
        if self.member is not None:
            self.member.stop()

    def part(self) -> None:
        """There are no other processes to let go of."""

    def close(self) -> None:
        self.pulse.close()
        self.desk.close()

    def summary(self) -> str:
        """What came of it, for people."""
        assert self.member is not None
        counts, poisoned = self.member.counts, self.member.outgoing.poisoned
        late = counts["rejected"] + counts["abandoned"]
        rejected = f", {late} came too late" if late else ""
        kept = f", {poisoned} were not finite and stayed here" if poisoned else ""
        return f"{counts['accepted']} units of work taken ({self.member.samples:,} samples){rejected}{kept}"
