"""One worker among many: feed → gradient → contribution → pull.

Uploads and downloads go on beside the computing where the strategy allows it. A gradient that is not finite is never sent.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor

from shoal.config.schema.updates import NoCodec, Updates
from shoal.updates import codecs
from shoal.updates.messages import Contribute, Leave, Pull
from shoal.worker.courier import Answer, Courier, Pending
from shoal.worker.interfaces import Feed, StepResult
from shoal.worker.outgoing import Engine, Outgoing

_PLAIN = NoCodec()
_WORTH_OVERLAPPING = 0.1
"""Share of a step's time that an answer must take before computing goes on without it: fresh weights are worth a short wait."""
_LAG_TO_SPEND = 0.5
"""Share of the allowed lag that may be given away for speed, and at most so much:"""
_MOST_LAG_SPENT = 3.0
"""On MNIST five versions of lag cost a point of accuracy, two a quarter."""
_SOON_S = 0.05
"""A step that takes longer leaves the courier time to come back from a lost connection beside it. And only the courier can tell how long an
answer took that nobody waited for."""
_MOST_AHEAD = 3.0
"""Versions that a worker looks ahead. Further than that the way does not go on straight."""


class Ways(Protocol):
    """The worker's side of a strategy."""

    @property
    def pull_every(self) -> int: ...
    @property
    def blend(self) -> float: ...
    @property
    def worker_steps(self) -> bool: ...
    @property
    def look_ahead(self) -> bool: ...
    @property
    def inner(self) -> Any:
        """What is done between two contributions; None: each is one gradient."""
        ...

    @property
    def window(self) -> int:
        """Rounds that may be open at once; 0: there are no rounds to wait for."""
        ...


class Receipts:
    """What the coordinator confirmed, in the worker's own hand, for `shoal audit`."""

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, worker: str, seq: int, status: str, version: int) -> None:
        if self._file is not None:
            self._file.write(json.dumps([worker, seq, status, version]) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Member:
    """A worker that has joined."""

    def __init__(
        self,
        courier: Courier,
        engine: Engine,
        feed_for: Callable[[int, int, int], Feed],
        ways: Ways,
        updates: Updates,
        *,
        accumulation: int = 1,
        ranks: int = 1,
        receipts: Receipts | None = None,
        slowdown: float = 1.0,
    ) -> None:
        self.courier, self.engine, self.ways, self.updates = courier, engine, ways, updates
        self.feed_for, self.accumulation, self.ranks, self.slowdown = feed_for, accumulation, ranks, slowdown
        self.batches = accumulation * ranks
        """Batches that the next contribution is made of."""
        self.receipts = receipts or Receipts(None)
        self.stopping = False
        self.done = False
        self.busy = 1.0
        """At the end: the share of the time in which it did not wait for an answer."""
        self.state = "starting"
        self.counts = {"sent": 0, "accepted": 0, "rejected": 0}
        self.version, self.round, self.server_step, self.most_lag = -1, 0, 0.0, math.inf
        self.seq = courier.welcome["last_seq"] + 1
        self.seat = courier.welcome["seat"]
        self.feed = feed_for(self.seat, courier.welcome["epoch"], courier.welcome["position"])
        self.steps = 0
        self.extra = engine.buffers.numel()
        size = engine.vector.numel()
        moved_by_others = not (ways.worker_steps or ways.look_ahead) and ways.inner is None and ways.blend == 1
        in_place = engine.vector.device.type == "cpu" and engine.vector.dtype == torch.float32 and moved_by_others
        self.base = engine.vector if in_place else torch.empty(size)
        """The weights as the coordinator sent them; the engine's own vector where nothing else moves that."""
        self._before = torch.empty(size) if ways.look_ahead or (ways.inner is None and len(engine.layouts) > 1) else None
        """The weights that it had before those."""
        self._vectors = [torch.empty(size), torch.empty(size)]
        """One is on its way while the other is filled."""
        self.outgoing = Outgoing(engine, updates)
        self._under_way: tuple[Pending, Contribute, Any] | None = None
        self._waited_s = 0.0
        self._step_s = 0.0
        self._versions_per_step = 1.0
        self._lag = 0.0
        """Versions that others make between weights and the gradient that they lead to, as it was lately."""

    # --- the work ----------------------------------------------------------------------------------

    def work(self) -> None:
        """Until the run is over, or somebody says stop."""
        self._pull()
        began = time.monotonic()
        while not (self.done or self.stopping):
            self._step()
        self._settle()
        self.busy = 1.0 - self._waited_s / max(1e-9, time.monotonic() - began)
        self.state = "leaving"
        self.courier.ask(Leave("", 0)).result()
        self.receipts.close()

    def _step(self) -> None:
        self.state = "computing"
        started = time.monotonic()
        feed = self.feed
        result = self.outgoing.gradients([next(feed) for _ in range(self.accumulation)])
        vector = self._vectors[self.steps % 2]
        vector.copy_(self.engine.gradient)
        if not self.outgoing.limit(vector):
            return
        base = self.version
        if self.ways.worker_steps:
            self.engine.apply_own(self.server_step)
        frames = self.outgoing.frames(vector, result.samples)
        if self.slowdown > 1:
            time.sleep((self.slowdown - 1) * (time.monotonic() - started))
        self._step_s = time.monotonic() - started
        self.steps += 1
        self._settle()
        if self.feed is not feed:  # the coordinator has given us another place at the data meanwhile: this is somebody else's to send
            return
        overlaps = self._may_overlap()
        self._send(result, base, frames, soon=self._step_s < _SOON_S and (self.ways.worker_steps or not overlaps))
        if not overlaps:
            self._settle()

    def _may_overlap(self) -> bool:
        """May the next step begin before this one is answered? Only where that does not make it too late, and where it pays."""
        if self.ways.window:
            return self.ways.window > 1
        if self.ways.worker_steps:
            return self.ways.pull_every > 1  # who pulls at every step wants fresh weights
        pays = self.courier.round_trip_s > _WORTH_OVERLAPPING * self._step_s
        return pays and 2 * self._versions_per_step - 1 <= min(_MOST_LAG_SPENT, _LAG_TO_SPEND * self.most_lag)

    # --- sending and receiving -----------------------------------------------------------------------

    def _send(self, result: StepResult, base: int, frames: list[memoryview], soon: bool = False) -> None:
        pulls = self.steps % self.ways.pull_every == 0
        metrics = {name: float(value) for name, value in result.metrics.items()}
        feed = self.feed.state_dict()
        contribution = Contribute(
            session="",
            number=0,
            seq=self.seq,
            base=base,
            round=self.round,
            weight=float(result.weight),
            samples=result.samples,
            epoch=feed["epoch"],
            position=feed["position"],
            batches=self.batches,
            have=self.version if pulls else -1,
            metrics=metrics,
        )
        self.seq += 1
        self.round += 1
        self.counts["sent"] += 1
        self._under_way = (self.courier.ask(contribution, frames, soon), contribution, frames)

    def _settle(self) -> None:
        """Take the answer to what is under way, and do as it says."""
        while self._under_way is not None:
            future, contribution, frames = self._under_way
            self.state, asked_at = "waiting", time.monotonic()
            answer = future.result()
            self._waited_s += time.monotonic() - asked_at
            self._under_way = None
            if answer.header["kind"] == "rejoined":
                self._rejoined(contribution, frames, answer.header["taken"])
                continue
            status = answer.header["status"]
            if status == "wait" and not self.stopping:  # it was taken; ask again when its round has closed, without sending it again
                self._under_way = (self.courier.ask(contribution, soon=True), contribution, ())
                continue
            status = "accepted" if status == "wait" else status
            self._note(contribution, status, answer.header["version"])
            if status == "accepted":
                self._lag += 0.2 * (min(_MOST_AHEAD, max(0, answer.header["version"] - contribution.base - 1)) - self._lag)
            self._turn(contribution.round, status, answer.header["round"])
            self._take(answer)

    def _turn(self, sent: int, status: str, open_round: int) -> None:
        """The round to send to next: the one after, unless this one was not taken; never one that has closed."""
        if status == "ahead":
            self.round = open_round
        else:
            self.round = max(sent + (status == "accepted"), open_round)

    def _rejoined(self, contribution: Contribute, frames: Any, taken: bool) -> None:
        """The coordinator had lost sight of us. What it had not taken is sent again, unless others learned from that data."""
        feed = self.feed
        self._sit(None if taken else contribution)
        if taken:  # its round may still be open: ask for it again, as if nothing had happened
            self._under_way = (self.courier.ask(contribution), contribution, ())
            return
        self._pull()
        if frames and self.feed is feed:
            self._under_way = (self.courier.ask(contribution, frames), contribution, frames)

    def _sit(self, untaken: Contribute | None = None) -> None:
        """Go to the place at the data that we were given: the one we have, unless somebody took it while we were gone."""
        welcome, feed = self.courier.welcome, self.feed.state_dict()
        place, here = (welcome["epoch"], welcome["position"]), (feed["epoch"], feed["position"])
        if untaken is not None:
            here = (untaken.epoch, untaken.position - untaken.batches)
        self.seq = max(self.seq, welcome["last_seq"] + 1)
        if welcome["seat"] != self.seat or place > here:
            self.seat = welcome["seat"]
            self.feed.close()
            self.feed = self.feed_for(self.seat, *place)

    def _note(self, contribution: Contribute, status: str, version: int) -> None:
        if status != "finished":
            self.counts["accepted" if status == "accepted" else "rejected"] += 1
        self.receipts.write(self.courier.welcome["name"], contribution.seq, status, version)

    def _pull(self) -> None:
        answer = self.courier.ask(Pull("", 0, -1)).result()
        self._sit()  # to be answered it may have had to join again
        self.version = -1
        self._take(answer)
        self.round = answer.header["version"]

    def _take(self, answer: Answer) -> None:
        """New weights, and where the run stands."""
        header = answer.header
        self.done, self.server_step, self.most_lag = header["done"], header["step"], header["most_lag"]
        if self.version >= 0:
            passed = header["version"] - self.version
            self._versions_per_step = 0.8 * self._versions_per_step + 0.2 * max(1, passed / self.ways.pull_every)
        kind = header.get("weights", "same")
        if kind == "same":
            return
        span = slice(*header.get("span", (0, self.base.numel())))
        base = self.base[span]
        if self._before is not None:
            self._before.copy_(self.base)
        body = answer.frames[:-1] if self.extra else answer.frames
        codecs.renew(base, kind, self.updates.codec, body)
        if self.extra:
            self.engine.load_buffers(codecs.decode(_PLAIN, self.extra, answer.frames[-1:]))
        before, self.version = self.version, header["version"]
        pulled = self.base[span]
        if self._before is not None and before >= 0:
            pulled = self._look_ahead(self._before, max(1, self.version - before))
        self._blend(1.0 if before < 0 else self.ways.blend, pulled, span)

    def _blend(self, share: float, pulled: Tensor, span: slice) -> None:
        """The worker's weights become the coordinator's, or a mixture of both."""
        vector = self.engine.vector
        if vector is not self.base:
            own = vector[span]
            own.copy_(pulled) if share == 1 else own.lerp_(pulled.to(own), share)
        self.engine.changed()

    def _look_ahead(self, before: Tensor, versions: int) -> Tensor:
        """Where the weights will be when the next gradient arrives, if they go on as they did lately."""
        if len(self.engine.layouts) > 1:
            self.engine.expect((self.base - before) / versions)
        ahead = min(self._lag, _MOST_AHEAD) / versions if self.ways.look_ahead else 0.0
        return torch.lerp(before, self.base, 1 + ahead) if ahead > 0 else self.base
