"""The coordinator at work: requests in, effects carried out, and the run's records, evaluations and checkpoints kept."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from shoal import data
from shoal.coordinator import Coordinator
from shoal.coordinator.effects import Effect, Entry, Issue, Note, Persist, Published, Reply, Stop
from shoal.coordinator.machine import Called, Passed, Tick
from shoal.coordinator.policies import Quorum
from shoal.coordinator.publisher import Bulletin, Notice
from shoal.coordinator.scribe import Scribe
from shoal.engines import StepResult
from shoal.errors import ShoalError
from shoal.runs.agreement import Length
from shoal.runs.assembly import Parts, held_out
from shoal.runs.checkpoint import Saved, save_weights
from shoal.runs.judging import Judge
from shoal.runs.keeping import Board, Files, Store
from shoal.runs.learners import EngineLearner
from shoal.runs.loop import Loop
from shoal.runs.reporter import Reporter
from shoal.runs.run_directory import RunDirectory
from shoal.runs.snapshot_writer import Photographs
from shoal.transports import Message, Request, Server
from shoal.updates import privacy
from shoal.updates.messages import BadMessage, parse, parse_from_leases

_TICK_S = 0.1
_CROWD_S = 1.0
_GOODBYE_S, _PARTING_S = 120.0, 15.0
"""How long a coordinator that is done waits for its workers to hear of it: the last weights may take long over a slow link. One that was
interrupted waits less."""
_LEAST_JOURNAL_BYTES = 128 << 20
_JOURNAL_STATES = 4
"""A snapshot is taken when the journal is this many times as large as what a snapshot holds. Up to three journals are there at a time, and
to write over one is cheap only while the system has it in memory."""
_MOST_RECORDS = 8000
_MOST_UNJUDGED = 4
"""Evaluations that may wait for each other, where rounds are long and few and each is to be judged."""


class SharedFeed:
    """The data as the coordinator sees it: it knows how long an epoch is, and workers do the reading."""

    def __init__(self, batches_per_epoch: int | None) -> None:
        self.batches_per_epoch = batches_per_epoch
        self.at_epoch_end = False

    def __next__(self) -> data.Batch:
        raise NotImplementedError("workers read the data")

    def close(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


def _oldest_first(request: Request) -> int:
    """Of what is there at once, what was computed on the oldest weights goes first: the longer it waits, the less it is worth."""
    base = request.message.header.get("base")
    return base if isinstance(base, int) else -1


class ClusterLoop(Loop):
    """The loop of a coordinator: a step is a new version, made by workers."""

    def __init__(
        self,
        parts: Parts,
        length: Length,
        coordinator: Coordinator,
        server: Server,
        store: Store,
        directory: RunDirectory,
        reporters: list[Reporter],
        welcome: Message,
        judging: torch.device,
    ) -> None:
        """`judging`: the device that evaluates; the weights are stepped on the CPU."""
        super().__init__(parts.run, parts.engine, SharedFeed(length.batches_per_epoch), None, directory, reporters)
        self.coordinator, self.server, self.welcome = coordinator, server, welcome
        self.learner = cast(EngineLearner, coordinator.learner)
        self.store, self.journal, self.ledger, self.snapshots = store, store.journal, store.ledger, store.snapshots
        self.board: Board | None = cast(Board, server) if length.cut is not None else None
        """Where units are leased, if they are."""
        self.bulletin = Bulletin(coordinator.publisher)
        batches = held_out(parts.run, parts.data.eval)
        self.judge = Judge(parts, batches, directory, judging) if batches is not None and parts.run.evaluation.batches != 0 else None
        self.sampling_rate = min(1.0, length.batches_per_contribution / length.batches_per_shard) if length.batches_per_shard else 1.0
        self.scribe = Scribe(self._write, self._keep, server.wake) if isinstance(store, Files) else None
        """Files can be written beside the work; in a database what belongs together is one transaction."""
        self.photographs = Photographs(store)
        self.beside: Callable[[], None] = lambda: None
        """Called now and then: who started worker processes looks after them here."""
        self.goodbye_s = _GOODBYE_S
        """How long to wait at the end until all have heard that it is over."""
        self._unwritten: list[Effect] = []
        self._unconsumed: list[Request] = []
        """What was taken from the leases for a round that is open: the database has it until the round closes."""
        self._over = False
        """Whether the weights that hang out say that the run is over."""
        self.crowd: list[dict[str, Any]] = []
        """Who leases units, as it was a moment ago."""
        self._crowd_at = 0.0
        self._replaying = False
        self._state_bytes = 16 * parts.engine.vector.numel()

    # --- the service -------------------------------------------------------------------------------

    def _steps(self) -> None:
        try:
            self._coordinate()
        finally:
            if self.scribe is not None:
                self.scribe.close()
            self.photographs.close()
            self.journal.close()
            self.ledger.close()

    def _coordinate(self) -> None:
        if not self.snapshots.all():
            self.snapshot()
        if self.board is not None:
            self._open_board(self.board)
        tick_at = 0.0
        while not (self.coordinator.finished or self.stopping):
            self._serve_all(self.server.poll(_TICK_S))
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + _TICK_S
                self._tick()
        if self.coordinator.stopped:
            raise ShoalError(self.coordinator.stopped)
        self._carry_out(self.coordinator.stop(self.stopping) if self.stopping else self.coordinator.conclude())
        self._say_goodbye()
        self._finish_evaluation()
        self.finish(not self.stopping)
        self.snapshot()

    def _tick(self) -> None:
        self._carry_out(self.coordinator.handle(Tick(), time.monotonic()))
        self._take_verdicts()
        self.beside()
        if self.board is not None and time.monotonic() >= self._crowd_at:
            self.crowd, self._crowd_at = self.board.workers(), time.monotonic() + _CROWD_S
        if self._journal_is_long() and not self.photographs.under_way:
            self.snapshot(wait=False)

    def _journal_is_long(self) -> bool:
        """Long enough to be worth a snapshot, and short enough to be taken again in a second or two."""
        long = max(_LEAST_JOURNAL_BYTES, _JOURNAL_STATES * self._state_bytes)
        return self.journal.bytes_since_snapshot > long or self.journal.records_since_snapshot > _MOST_RECORDS

    def lost(self, name: str) -> None:
        """Who started a worker has seen it die."""
        self._carry_out(self.coordinator.lost(name, time.monotonic()))

    def _serve_all(self, requests: list[Request]) -> None:
        if self.scribe is not None:
            self.scribe.go_on()
        passed = [request for request in requests if self.board is not None and self.board.is_from_leases(request)]
        for request in sorted(requests, key=_oldest_first):
            if request not in passed:
                self._serve(request)
        for request in passed:
            self._take_from_leases(request, more=request is not passed[-1])

    def _serve(self, request: Request) -> None:
        try:
            asked = parse(request.message.header)
        except BadMessage as error:
            self.server.traffic.refuse("malformed")
            return self.server.reply(request, Message({"kind": "refused", "reason": "malformed", "detail": str(error)}))
        event = Called(request, asked, request.message.frames, secrets.token_hex(16))
        return self._carry_out(self.coordinator.handle(event, time.monotonic()))

    def _take_from_leases(self, request: Request, more: bool) -> None:
        """It counts, and is not passed on again: both or neither. Until its round closes, the database holds it for us."""
        header = request.message.header
        fields = {name: value for name, value in header.items() if name not in ("unit", "seq")}
        if header["kind"] == "delivered":
            fields["seq"] = header["unit"]  # which is handed in once, so it serves as the number of the contribution
        else:
            del fields["base"]
        try:
            event = Passed(parse_from_leases(fields), request.message.frames, more)
        except BadMessage as error:  # the figures in it are a worker's
            effects = self.coordinator.spoil(header["epoch"], header["start"], f"what {header.get('worker')} sent cannot be used: {error}")
        else:
            effects = self.coordinator.handle(event, time.monotonic())
        self._unwritten += effects
        self._unconsumed.append(request)
        if any(isinstance(effect, (Published, Issue)) for effect in effects):
            self._settle_leases()

    def _settle_leases(self) -> None:
        """Write down what was taken from the leases, and let them go, all together."""
        effects, requests = self._unwritten, self._unconsumed
        self._unwritten, self._unconsumed = [], []

        def consume() -> None:
            assert self.board is not None
            for request in requests:
                self.board.consume(request)

        self._carry_out(effects, consume if requests else None)

    def _carry_out(self, effects: list[Effect], also: Callable[[], None] | None = None) -> None:
        """First what must survive and what others see, all together, and again where a database was gone for a moment. Then the rest."""

        def keep() -> None:
            for effect in sorted(effects, key=lambda effect: not isinstance(effect, Published)):  # weights take the longest: they go first
                self._keep(effect)
            if also is not None:
                also()
            for effect in effects:
                if isinstance(effect, Issue) and self.board is not None:
                    self._issue(self.board, effect)

        if self.scribe is not None:
            self.scribe.take([effect for effect in effects if not isinstance(effect, (Published, Note, Stop))])
        elif effects or also is not None:
            self.store.carry_out(keep)
        for effect in effects:
            if isinstance(effect, Published):
                self._published(effect)
            elif isinstance(effect, (Note, Stop)):
                self.message(effect.text if isinstance(effect, Note) else f"warning: {effect.reason}")

    def _keep(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self._reply(effect)
        elif isinstance(effect, Persist):
            self._write(effect)
        elif isinstance(effect, Entry):
            self.ledger.append(effect.line)
        elif isinstance(effect, Published) and self.board is not None:
            self._publish(self.board)

    def _write(self, effect: Persist) -> None:
        self.journal.append(effect.record, effect.frames)

    def _reply(self, effect: Reply) -> None:
        header, frames = effect.header, tuple(effect.frames)
        if header["kind"] == "welcome":
            header, frames = header | self.welcome.header, self.welcome.frames
        self.server.reply(effect.caller, Message(header, frames))

    def _published(self, effect: Published) -> None:
        figures: dict[str, Any] = dict(effect.metrics)  # plain numbers serve as well as tensors, and cost less
        self.advance(StepResult(figures, max(1, round(effect.weight)), effect.samples), effect.batches, self.coordinator.finished)

    # --- units that are leased -----------------------------------------------------------------------

    def _open_board(self, board: Board) -> None:
        """Begin, or go on: what was on offer when the coordinator ended still is."""
        offer = self.coordinator.offer()

        def begin() -> None:
            self._publish(board)
            if board.iteration() != offer.version or not board.has_open_units():
                self._issue(board, offer)

        self.store.carry_out(begin)

    def _publish(self, board: Board) -> None:
        """Hang out the newest weights, for all who lease units."""
        if not self._replaying:
            self._hang_out(board, self.coordinator.state.version, self.bulletin.notices(), self.coordinator.finished)

    def _hang_out(self, board: Board, version: int, notices: list[Notice], done: bool) -> None:
        for kind, header, frames in notices:
            board.publish(version, kind, header | {"step": self.coordinator.step, "done": done}, frames)
        self._over = done

    def _issue(self, board: Board, effect: Issue) -> None:
        cut, rounds = self.coordinator.plan.cut, self.coordinator.policy.rounds
        if cut is not None and isinstance(rounds, Quorum) and not self._replaying:
            units = [cut.unit(number) for number in effect.units]
            quorum = rounds.contributions if self.coordinator.plan.needed <= 1 else None  # a rule may need results of more workers
            board.issue(effect.version, units, rounds.lease_s, rounds.max_retries, quorum)

    def _say_goodbye(self) -> None:
        """Let every worker hear that it is over. Who leases units hears it with new weights, or with the last ones once more."""
        interrupted, board = self.stopping == "interrupted", self.board
        until = time.monotonic() + (_PARTING_S if interrupted else self.goodbye_s)
        ends = board is not None and not interrupted
        if board is not None and ends and not self._over:
            last = [Notice("full", {"weights": "full"}, self.coordinator.publisher.everything())]
            self.store.carry_out(lambda: self._hang_out(board, self.coordinator.state.version + 1, last, True))

        def some_are_here() -> bool:
            return any(one["alive"] for one in board.workers()) if board is not None and ends else bool(self.coordinator.members.by_name)

        while some_are_here() and time.monotonic() < until:
            self._serve_all(self.server.poll(_TICK_S))
            self._carry_out(self.coordinator.handle(Tick(), time.monotonic()))
            self.beside()

    # --- what the loop does otherwise ----------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        if self.judge is None or self._replaying:
            return {}
        most = _MOST_UNJUDGED if self.coordinator.policy.inner is not None else 1
        if self.judge.pending >= most:
            self.message(f"warning: no evaluation at step {self.step}: the one before is still under way")
            return {}
        self.judge.begin(self.step, {name: value.detach().clone() for name, value in self.engine.weights().items()})
        return {}

    def _take_verdicts(self) -> None:
        while self.judge is not None and not self.judge.verdicts.empty():
            step, metrics, problem = self.judge.verdicts.get()
            if problem:
                self.message(problem)
            if metrics:
                self.judged(metrics, step)

    def _emit(self, split: str, metrics: dict[str, float], step: int | None = None) -> None:
        if split == "train" and self.run.updates.privacy.enabled:
            metrics["epsilon"] = self.epsilon()
        if self.coordinator.policy.inner is not None:
            metrics.pop("learning_rate", None)  # of an optimizer that nobody uses here: the workers tell theirs, the outer one its own
        super()._emit(split, metrics, step)

    def epsilon(self) -> float:
        """What the run has told about any one sample so far. What was sent counts, whether it was taken or not."""
        settings, state = self.run.updates.privacy, self.coordinator.state
        by_sample = settings.unit == "sample"
        multiplier = settings.noise_multiplier if by_sample else privacy.sample_level_multiplier(settings.noise_multiplier)
        accountant = privacy.Accountant(multiplier, self.sampling_rate, settings.delta)
        for name, seat in state.seats.items():
            accountant.record(f"seat {seat}", state.sequences.get(name, -1) + 1)
        if self.board is not None:  # all units are of the same data
            late = sum(one["late"] + one["cancelled"] for one in self.board.workers())
            accountant.record("units", sum(state.contributions.values()) + late)
        return accountant.spent()

    def _finish_evaluation(self) -> None:
        """The final weights are always judged."""
        if self.judge is None or self.stopping == "interrupted":
            return
        self.judge.wait()
        self._take_verdicts()
        if self.latest["eval"].get("step") != self.step:
            self.evaluate()
            self.judge.wait()
            self._take_verdicts()

    def advance(self, result: Any, batches: int, last: bool) -> None:
        if not self._replaying:
            super().advance(result, batches, last)
            return
        self.batches += batches
        self.samples += result.samples
        self.window.add(result)
        if self.passed(self.run.logging.every_steps):
            self.window.take(self.engine.world)

    def passed(self, every: int) -> bool:
        """Settings count the steps of a worker. Where it takes many for one of ours, ours is the first at or after each of theirs."""
        inner = self.coordinator.policy.inner
        return super().passed(every) if inner is None else inner.passes(self.step, every)

    # --- what survives -----------------------------------------------------------------------------

    def snapshot(self, wait: bool = True) -> None:
        """All there is now; the journal starts over. The new journal is there first, so that no moment is without one."""
        self._settle_leases()
        self._drain()
        self.photographs.take(self.coordinator.pending(), self.engine.weights(), self.state_dict())
        if wait:
            self.photographs.finish()

    def _drain(self) -> None:
        if self.scribe is not None:
            self.scribe.drain()

    def save(self) -> None:
        self._drain()  # a checkpoint holds nothing that a crash could undo
        super().save()
        path = self.run.coordinator.checkpoint_path
        if path is not None:
            save_weights(Path(path), self.engine.weights())

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "coordinator": self.coordinator.state_dict(),
            "ledger": self.ledger.length,
            "learner": self.learner.state_dict(),
        }

    def restore(self, checkpoint: Saved) -> None:
        super().restore(checkpoint)
        self.learner.load_state_dict(checkpoint.state.get("learner", {}))

    def recover(self, snapshot: Saved) -> None:
        """Become what the coordinator was when it ended, however it ended."""
        self.restore(snapshot)
        self.coordinator.load_state_dict(snapshot.state["coordinator"])
        self.ledger.cut(snapshot.state["ledger"])
        self._replaying = True
        for record, frames in self.journal.recover(snapshot.step):
            self._carry_out(self.coordinator.replay(record, frames))
        self._replaying = False
        self.directory.forget_after(self.step)
        self.resumed_from = str(snapshot.path)

    def summary(self, status: str, error: str) -> dict[str, Any]:
        traffic, state = self.server.traffic, self.coordinator.state
        return super().summary(status, error) | {
            "contributions": dict(state.contributions),
            "refused": self.coordinator.refused | traffic.refused,
            "received_bytes": traffic.received_bytes,
            "sent_bytes": traffic.sent_bytes,
        }
