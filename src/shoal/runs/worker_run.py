"""A worker from joining to leaving. It needs an address, a token and the coordinator's key; the coordinator sends the rest."""

from __future__ import annotations

import contextlib
import json
import platform
import secrets
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal import data, strategies
from shoal.config.load import Override
from shoal.config.ranks import RankPlace, batch_share
from shoal.config.received import Redactor
from shoal.data.images.transfer import ImageOffer, fetch_images, is_without_images
from shoal.data.interfaces import Progress
from shoal.engines import Rendezvous, World
from shoal.engines.island import Island, IslandFollower
from shoal.engines.single import free_memory
from shoal.errors import ShoalError
from shoal.protocol.messages import PROTOCOL, Gone, Message, header_of
from shoal.runs.build_run import RunParts, feed_for_seat
from shoal.runs.connections import DatabaseConnection, JoinOptions, TransportConnection, connect_worker
from shoal.runs.folder.resume_rules import settings_digest
from shoal.runs.folder.worker_checkpoint import SaveSchedule, WorkerCheckpoints
from shoal.runs.join_summary import JoinSummary, summary_of
from shoal.runs.live_objects import NO_LIVE_OBJECTS, LiveObjects
from shoal.runs.monitoring.throughput import WorkerSpeed
from shoal.runs.welcome import check_welcome, configuration, parts_for
from shoal.strategies import Policies
from shoal.updates.worker_state import WorkerCheckpoint
from shoal.worker.receipts import ReceiptsFile
from shoal.worker.sender import ConnectionLostError, HeartbeatThread, Sender
from shoal.worker.session import SessionEndedError, WorkerSession, how_it_ended
from shoal.worker.worker import Worker, WorkerPolicies

_FOLLOWER_EXTRA_S = 60.0
"""A follower process waits this much longer for the first process than that one waits for the coordinator."""
_GONE_S = 2.0
_STOP_CHECK_S, _PROBE_S = 0.5, 5.0
"""A worker that was asked to stop checks at this interval whether it waits for an answer, and if so probes with this timeout."""
_PROGRESS_EVERY_S = 30.0


class JoinedWorker:
    def __init__(self, options: JoinOptions, tell: Callable[[str], None]) -> None:
        self.options, identity = options, options.own_key()
        self.overrides = list(options.overrides)
        """This machine's own settings."""
        self.connections = connect_worker(options, tell)
        self.redact = Redactor()
        self.protocol = WorkerSession(
            options.name, describe_machine(), PROTOCOL, secrets.token_hex(8), options.patience_s, identity, self.redact, options.workers
        )
        self.sender = Sender(self.connections[0], self.protocol, tell)
        self.worker: Worker | None = None
        self.island: Island | None = None
        self.doing = "preparing"
        """Its reported state before the worker is built."""
        self._stopping, self._closed = threading.Event(), threading.Event()
        try:
            if options.name:
                self._save_key(options.name)
            self.welcome = self._join()
            self.redact.sent = json.dumps(self.welcome.header, ensure_ascii=False)
            self.run = configuration(self.welcome.header, options.overrides, options.permissions)
            if self.run.alone:
                raise ShoalError("the coordinator sent settings of a run without workers (strategy.kind local): nothing to join")
            if self.run.engine.experts is not None:
                self._announce_experts(self.run.engine.experts)
        except BaseException as problem:
            self._report_failure(problem)
            for connection in self.connections:
                connection.close()
            raise
        threading.Thread(target=self._watch_stop, name="stop watch", daemon=True).start()
        self._reported_at, self._reported = time.monotonic(), ""
        self.heartbeats = HeartbeatThread(self._heartbeat, self._heartbeat_s)

    def _heartbeat(self) -> None:
        """Send a heartbeat; and, every 30 s, report progress to the user if it has changed."""
        self.sender.send_heartbeat(self.connections[1], self.state, self._figures())
        if self.worker is not None and time.monotonic() - self._reported_at >= _PROGRESS_EVERY_S:
            self._reported_at, before, self._reported = time.monotonic(), self._reported, self.progress()
            if self._reported != before:
                self.sender.report(self._reported)

    def _figures(self) -> dict[str, float]:
        """This worker's figures for the dashboard, which heartbeats carry."""
        worker = self.worker  # another thread may set it to None meanwhile
        if worker is None:
            return {}
        figures = worker.figures
        speed = self.speed.figures(figures.pop("weight_per_s"))
        return figures | self.sender.link.figures | speed

    def progress(self) -> str:
        """The progress of this worker and of the run, as a line of text."""
        assert self.worker is not None
        return f"{self._outcomes(self.worker)}; {self.worker.doing}, at version {self.worker.weights.version}"

    def _outcomes(self, worker: Worker) -> str:
        counts, what = worker.counts, "unit{} of work" if worker.policies.feed.leased else "contribution{}"
        late, accepted = counts["rejected"] + counts["abandoned"], counts["accepted"]
        return f"{accepted} {what.format('s' * (accepted != 1))} accepted ({worker.samples:,} samples)" + (
            f", {late} came too late" if late else ""
        )

    def _join(self) -> Message:
        self.sender.exchange()
        check_welcome(self.protocol.welcome, self._usable_memory())
        self.connections[0].allow(4 * self.protocol.welcome["size"] + (1 << 20))
        if self.options.name is None:
            self._save_key(self.name)
        elif self.name != self.options.name:
            self.sender.report(f"another worker of this run is called {self.options.name}, so this one is {self.name}")
        return Message(self.protocol.welcome, tuple(self.protocol.welcome_frames))

    def _usable_memory(self) -> int | None:
        """Memory that this worker may use."""
        known = [amount for amount in (free_memory(torch.device("cpu")), self.options.memory_bytes) if amount is not None]
        return min(known, default=None)

    def _announce_experts(self, experts: tuple[int, ...]) -> None:
        """Announce the experts that this worker holds. The coordinator's answer gives the size of this worker's weights."""
        if not isinstance(self.connections[0], TransportConnection):
            raise ShoalError("engine.experts: through a database all workers read the same weights, with all experts; leave it out")
        self.protocol.experts = experts
        self.sender.exchange()
        self.welcome = self.welcome._replace(header=self.welcome.header | {"size": self.protocol.size})

    def _save_key(self, name: str) -> None:
        """Save the key, so that the worker is recognized when it rejoins under this name."""
        if self.options.identity is not None or not isinstance(self.connections[0], TransportConnection):  # a database has its own users
            return
        try:
            self.options.key_file(name).write(self.protocol.identity)
        except ShoalError as error:
            self.sender.report(f"warning: this worker's key cannot be saved ({error}): if it is started again, it gets another name")

    @property
    def name(self) -> str:
        return self.protocol.name

    @property
    def _heartbeat_s(self) -> float:
        """Seconds between heartbeats: at most a third of a lease, which heartbeats renew."""
        interval_s: float = self.welcome.header["heartbeat_s"]
        feed = strategies.policies_for(self.run, self.welcome.header["shards"]).feed
        return min(interval_s, feed.lease_s / 3) if feed.leased else interval_s

    def prepare(self, progress: Progress | None = None, here: RankPlace | None = None, live: LiveObjects = NO_LIVE_OBJECTS) -> None:
        """Build the worker. `here`: the place of this process as the first of several, which are built at the same time."""
        try:
            self._fetch_images(progress)
            self.worker = self._worker(progress, here, live)
        except BaseException as problem:
            self.refuse(problem)
            raise

    def _fetch_images(self, progress: Progress | None) -> None:
        """Download images that this machine lacks from the class's database. All processes then read them where they are."""
        connection, header = self.connections[0], self.welcome.header
        if self._is_sent_images and isinstance(connection, DatabaseConnection):
            offer = ImageOffer.of(header["images"])
            found = fetch_images(offer, connection.desk.read_piece, self.options.folder / "images", progress)
            fetched = Override("data.source.path", json.dumps(str(found)), "images of the class")
            self.overrides = [*self.overrides, fetched]
            self.run = configuration(header, self.overrides, self.options.permissions)

    @property
    def state(self) -> str:
        return self.worker.doing if self.worker else self.doing

    def _worker(self, progress: Progress | None, here: RankPlace | None, live: LiveObjects) -> Worker:
        rendezvous = self._share_welcome(here) if here is not None else None
        parts = parts_for(self.welcome, self.run, rendezvous, progress, live)
        share = WorkerParts.of(parts, self.welcome.header, self.options, self.sender.report)
        engine: Any = share.parts.engine
        engine.phases.enabled, self.speed = True, WorkerSpeed(self.run, engine)
        feed_for: Callable[[int, int, int], Any] = share.feed_for
        checkpoint: WorkerCheckpoint = share.checkpoints
        if rendezvous is not None:
            engine = checkpoint = self.island = Island(share.parts.engine, share.feed_for, share.checkpoints, batch_part(share.parts)[1])
            feed_for = self.island.open_feed
        strategy = share.strategy
        return Worker(
            self.sender,
            engine,
            feed_for,
            WorkerPolicies(strategy.feed, strategy.contribution, strategy.pull, strategy.rounds.window, strategy.spans(engine.layouts)),
            self.run.updates,
            accumulation=self.run.training.gradient_accumulation_steps,
            ranks=1 if rendezvous is None else batch_share(self.run, 0, rendezvous.here.size)[1],
            receipts=ReceiptsFile(self.options.receipts),
            checkpoint=checkpoint,
            slowdown=self.options.slowdown,
        )

    def _share_welcome(self, here: RankPlace) -> Rendezvous:
        """Pass the coordinator's welcome, and this machine's own settings, to the other processes of this worker."""
        rendezvous = Rendezvous(here)
        parts = [json.dumps(self.welcome.header).encode(), *(bytes(frame) for frame in self.welcome.frames)]
        rendezvous.put("words", str(len(parts)))
        rendezvous.put("own settings", json.dumps(self.overrides))
        for number, part in enumerate(parts):
            rendezvous.put(f"word {number}", part)
        return rendezvous

    def asked(self) -> JoinSummary:
        """What the coordinator asks of this machine."""
        size, free = self.welcome.header["size"], self._usable_memory()
        return summary_of(self.run, size, free, self.options.written, sent=self._is_sent_images)

    @property
    def _is_sent_images(self) -> bool:
        return "images" in self.welcome.header and isinstance(self.connections[0], DatabaseConnection) and is_without_images(self.run)

    def work(self, tells_end: bool = True) -> None:
        """Work until the run is over, or `stop` is called. `tells_end`: whether the user learns from this worker how the run ended."""
        assert self.worker is not None
        try:
            if not self.protocol.stopping:
                self.worker.work()
            else:
                self._say_goodbye()
            if self.protocol.done and tells_end:
                self.sender.report(how_it_ended(self.protocol.outcome, lesson=isinstance(self.connections[0], DatabaseConnection)))
            if self.island is not None:
                self.island.leave()
        except BaseException as problem:
            self._report_failure(problem)
            raise
        finally:
            self.close()

    def leave(self) -> None:
        """Leave the run without having worked."""
        self._say_goodbye()
        self.close()

    def _say_goodbye(self) -> None:
        self.protocol.leave()
        self.sender.exchange()

    def refuse(self, problem: BaseException) -> None:
        """Leave the run, and report the problem to the coordinator."""
        self._report_failure(problem)
        self.close()

    def _report_failure(self, problem: BaseException) -> None:
        """Report to the coordinator why this worker stops, unless the coordinator has ended the session."""
        if self.protocol.session and isinstance(problem, Exception) and not isinstance(problem, SessionEndedError):
            self.sender.leave_early(str(problem) if isinstance(problem, ShoalError) else repr(problem))

    def close_ranks(self) -> None:
        """Release the other processes of this worker, when its figures are not needed any more."""
        if self.island is not None:
            worker_world = self.island.worker_world
            self.island = self.worker = None
            worker_world.close()

    def leave_at_once(self) -> None:
        """Leave while this worker's thread computes or sends: what it holds goes back to the run. The process must end now. Any thread may
        call this."""
        farewell, connection = self.protocol.farewell(), self.connections[0]
        with contextlib.suppress(ShoalError, ConnectionLostError):
            if isinstance(connection, DatabaseConnection):
                return connection.leave_beside(farewell.reason)
            beside = TransportConnection(self.options.route(self.options.address), self.options.token, self.options.key)
            try:
                beside.call(header_of(farewell), (), _GONE_S)
            finally:
                beside.close()

    def has_left(self, within_s: float) -> bool:
        """Wait until the worker has left and closed its connections; whether it did within this time."""
        return self._closed.wait(within_s)

    def stop(self, reason: str = "") -> None:
        """Leave after this step; within seconds, if the coordinator does not answer any more. `reason`: for the run's owner."""
        self.protocol.stop(reason)
        self.connections[0].wake()
        self._stopping.set()

    @property
    def waits(self) -> bool:
        """Whether the worker waits for an answer of the coordinator, or of its database."""
        connection = self.connections[0]
        return self.protocol.waits or (isinstance(connection, DatabaseConnection) and connection.desk.asks_for_lease)

    def _watch_stop(self) -> None:
        """After `stop`: while the worker waits for an answer, probe the coordinator, and leave if it does not answer."""
        self._stopping.wait()
        while not self._closed.wait(_STOP_CHECK_S):
            if self.waits and not self._is_answered():
                self.sender.report("the coordinator does not answer: leaving without a message to it")
                self.protocol.give_up()
                self.connections[0].close()
                return

    def _is_answered(self) -> bool:
        """Whether the coordinator, or its database, answers over a new connection; the existing ones may be stuck."""
        connection = self.connections[0]
        if isinstance(connection, DatabaseConnection):
            return connection.desk.is_answered()
        probe = TransportConnection(self.options.route(self.options.address), self.options.token, self.options.key)
        heartbeat = self.protocol.heartbeat("leaving", self._figures())
        try:
            probe.call(header_of(heartbeat), (), _PROBE_S)
        except ConnectionLostError:
            return False
        except ShoalError:  # a refusal is an answer, too
            return True
        finally:
            probe.close()
        return True

    def close(self) -> None:
        self._closed.set()
        self._stopping.set()
        self.connections[1].close()
        self.heartbeats.close()
        self.sender.close()

    def summary(self) -> str:
        """The result of the work, as a line of text."""
        assert self.worker is not None
        worker, poisoned = self.worker, self.worker.encoder.poisoned
        dropped = f", {poisoned} were not finite and stayed here" if poisoned else ""
        sent = sum(connection.sent_bytes for connection in dict.fromkeys(self.connections))
        computing = f", computing {worker.busy:.0%} of the time" if worker.samples else ""
        return f"{self._outcomes(worker)}{dropped}; {sent / 1e6:.1f} MB sent{computing}"


class WorkerParts(NamedTuple):
    parts: RunParts
    strategy: Policies
    shards: int
    checkpoints: WorkerCheckpoints
    pieces: data.UnitBatches | None
    """The units of the data, where they are leased."""

    @classmethod
    def of(cls, parts: RunParts, header: dict[str, Any], options: JoinOptions, tell: Callable[[str], None]) -> WorkerParts:
        strategy = strategies.policies_for(parts.run, header["shards"])
        if strategy.feed.leased:
            torch.seed()  # each worker needs its own noise
        else:
            torch.manual_seed(parts.run.seed + header["seat"] + 1_000_003 * parts.engine.worker_world.rank)
        checkpoints = _checkpoints(parts, strategy, options, header["name"], tell)
        pieces = unit_pieces(parts, strategy) if strategy.feed.leased and not strategy.feed.given else None
        return cls(parts, strategy, header["shards"], checkpoints, pieces)

    def feed_for(self, seat: int, epoch: int, position: int) -> data.Feed:
        """The batches of a seat, from a position that counts batches of one process; or those of a leased unit."""
        part = batch_part(self.parts)
        if self.pieces is not None:
            return self.pieces.at(epoch, position)
        if self.strategy.feed.given:  # nothing is read here
            return self.parts.feed
        feed = feed_for_seat(self.parts.run, self.parts.data, seat, self.shards, part)
        _seek(feed, epoch, -(-position // part[1]))
        return feed


def batch_part(parts: RunParts) -> tuple[int, int]:
    """The index of the part of every batch that this process reads, and the number of parts."""
    worker_world = parts.engine.worker_world
    return batch_share(parts.run, worker_world.rank, worker_world.size)


def unit_pieces(parts: RunParts, strategy: Policies) -> data.UnitBatches:
    """The data as units to lease. Each process of a worker reads its part of every batch."""
    run = parts.run
    if not isinstance(parts.data.train, data.Samples):
        raise ShoalError("work units need data of known length, and this data is a stream")
    return data.UnitBatches(
        parts.data.train,
        batch_size=run.training.batch_size or 1,
        seed=run.data.shuffle_seed or 0,
        reshuffle=run.data.reshuffle_each_epoch,
        loader=run.data.loader,
        batches_per_unit=strategy.feed.batches,
        part=batch_part(parts),
    )


def _checkpoints(parts: RunParts, strategy: Policies, options: JoinOptions, name: str, tell: Callable[[str], None]) -> WorkerCheckpoints:
    """Worker checkpoints: saved when the coordinator saves one, and also within a round if the settings ask for it."""
    settings, contribution = parts.run.checkpoint, strategy.contribution
    every = settings.every_steps if settings.strategy == "steps" and contribution.takes_inner_steps else None
    earlier = Path(settings.resume_from) if settings.resume_from else None
    if earlier is not None and (earlier / "state.json").exists():
        earlier = earlier.parent.parent
    worker_world = parts.engine.worker_world
    # Processes that step separately save separate checkpoints
    own = "" if worker_world is parts.engine.world else f"process-{worker_world.rank}"
    if (held := parts.run.engine.experts) is not None:  # the checkpoint of other experts does not fit
        own = f"experts-{zlib.crc32(str(held).encode()):08x}"
    due = SaveSchedule(
        lambda version: every is not None and contribution.passes(version, every),
        every,
        f"{settings_digest(parts.run)} {parts.engine.worker_world.size}",
    )
    return WorkerCheckpoints(
        parts.engine,
        place / own if (place := options.checkpoints or options.state) else None,
        earlier / "workers" / name / own if earlier else None,
        due,
        settings.keep_last,
        tell,
    )


def follow_first_process(here: RankPlace, options: JoinOptions) -> None:
    """Work as one of several processes, of which only the first is connected to the coordinator."""
    _follow(Rendezvous(here), options).close()  # after the model is released


def _follow(rendezvous: Rendezvous, options: JoinOptions) -> World:
    count = int(rendezvous.wait_for("words", options.patience_s + _FOLLOWER_EXTRA_S))
    header, *frames = [rendezvous.wait_for(f"word {number}", options.patience_s + _FOLLOWER_EXTRA_S) for number in range(count)]
    welcome = Message(json.loads(header), tuple(frames))
    overrides = [Override(*given) for given in json.loads(rendezvous.wait_for("own settings", options.patience_s))]
    run = configuration(welcome.header, overrides, options.permissions)
    share = WorkerParts.of(parts_for(welcome, run, rendezvous), welcome.header, options, lambda text: None)
    IslandFollower(share.parts.engine, share.feed_for, share.checkpoints).work()
    return share.parts.engine.worker_world


def report_gone(options: JoinOptions) -> None:
    """Report that the processes of a worker have ended. If the message is lost, the coordinator notices by the missing heartbeats."""
    with contextlib.suppress(ShoalError, ConnectionLostError):
        identity, name = options.own_key(), options.name or ""
        connection = TransportConnection(options.route(options.address), options.token, options.key)
        try:
            gone = Gone(name, identity.key)
            nonce = connection.call(header_of(gone), (), _GONE_S).header.get("nonce", "")
            connection.call(header_of(gone._replace(nonce=nonce, proof=identity.prove("gone", name, nonce))), (), _GONE_S)
        finally:
            connection.close()


def describe_machine() -> dict[str, str]:
    return {"host": platform.node()[:100] or "?", "system": platform.system() or "?", "python": platform.python_version()}


def _seek(feed: data.ShardFeed, epoch: int, position: int) -> None:
    """Move a feed to this position. A stream is read up to it."""
    if feed.batches_per_epoch is not None:
        feed.load_state_dict(feed.state_dict() | {"epoch": epoch, "position": position})
        return
    while feed.epoch < epoch or (feed.epoch == epoch and feed.position < position):
        next(feed)
