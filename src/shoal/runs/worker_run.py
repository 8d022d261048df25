"""A worker joins: all it needs to know beforehand is an address, a token and the coordinator's key."""

from __future__ import annotations

import contextlib
import json
import platform
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal import data, strategies
from shoal.config.environment import state_folder
from shoal.config.load import Override
from shoal.config.ranks import RankPlace, batch_share
from shoal.data.images.transfer import ImageOffer, fetch_images, is_without_images
from shoal.engines import Rendezvous, World
from shoal.engines.island import Island, IslandFollower
from shoal.errors import ShoalError
from shoal.protocol.identities import Identity
from shoal.protocol.messages import PROTOCOL, Gone, header_of
from shoal.runs.build_run import Progress, RunParts, feed_for_seat
from shoal.runs.connections import DatabaseConnection, TransportConnection, WorkerConnectOptions, connect_worker
from shoal.runs.folder.resume_rules import settings_digest
from shoal.runs.folder.worker_checkpoint import SaveSchedule, WorkerCheckpoints
from shoal.runs.invitation import Invitation
from shoal.runs.live_objects import NO_LIVE_OBJECTS, LiveObjects
from shoal.runs.monitoring.recorder import peak_memory
from shoal.runs.welcome import configuration, parts_for
from shoal.runs.worker_key import WorkerKeyFile
from shoal.strategies import Policies
from shoal.worker.receipts import ReceiptsFile
from shoal.worker.sender import ConnectionLostError, HeartbeatThread, Sender
from shoal.worker.session import Frames, SessionEndedError, WorkerSession
from shoal.worker.worker import Worker, WorkerPolicies

_LONGER_S = 60.0
"""A process waits so much longer for the first one's word than that one does for the coordinator."""
_GONE_S = 2.0
_LOOK_S, _SIGN_S = 0.5, 5.0
"""How often a worker that was asked to stop looks whether it waits for an answer, and how long it then waits for a sign of life."""
_TELL_EVERY_S = 30.0


class JoinOptions(NamedTuple):
    """How to reach the coordinator, and how to behave."""

    address: str
    token: str
    key: str | None
    identity: str | None = None
    """The worker's own secret key; None: the one that is kept for its name, or a new one."""
    name: str | None = None
    overrides: Sequence[Override] = ()
    receipts: Path | None = None
    slowdown: float = 1.0
    patience_s: float = 600.0
    state: Path | None = None
    """Where the worker keeps what it needs to go on after a break; None: nowhere but its key, which is kept in the user's own folder."""

    def key_file(self, name: str) -> WorkerKeyFile:
        return WorkerKeyFile(self.state, Invitation(self.address, self.token, self.key), name)

    def own_key(self) -> Identity:
        """Who this worker is."""
        if self.identity is not None:
            return Identity(self.identity)
        return (self.key_file(self.name).read() if self.name else None) or Identity.new()


class JoinedWorker:
    """A worker that takes part, from its joining to its end."""

    def __init__(self, way: JoinOptions, tell: Callable[[str], None]) -> None:
        self.way, identity = way, way.own_key()
        caller = WorkerConnectOptions(way.name, way.state or state_folder(), way.patience_s, tell)
        self.lines = connect_worker(way.address, way.token, way.key, caller)
        self.protocol = WorkerSession(way.name, describe_machine(), PROTOCOL, secrets.token_hex(8), way.patience_s, identity)
        self.sender = Sender(self.lines[0], self.protocol, tell)
        self.worker: Worker | None = None
        self.island: Island | None = None
        self.doing = "preparing"
        """What it does where no engine works here."""
        self._stopping, self._closed = threading.Event(), threading.Event()
        try:
            if way.name:
                self._keep_key(way.name)
            self.welcome = self._join()
            self.run = configuration(self.welcome.header, way.overrides)
            if self.run.engine.experts is not None:
                self._hold(self.run.engine.experts)
        except BaseException as problem:
            self._say_why(problem)
            self._close_lines()
            raise
        threading.Thread(target=self._part, name="parting", daemon=True).start()
        self._told_at, self._told = time.monotonic(), ""
        self.pulse = HeartbeatThread(self._beat, self._heartbeat_s)

    def _beat(self) -> None:
        """A sign of life; and, now and then, a line that tells whoever sits here how it goes."""
        self.sender.send_heartbeat(self.lines[1], self.state, self._figures())
        if self.worker is not None and time.monotonic() - self._told_at >= _TELL_EVERY_S:
            self._told_at, before, self._told = time.monotonic(), self._told, self.progress()
            if self._told != before:
                self.sender.report(self._told)

    def _figures(self) -> dict[str, float]:
        """What people want to see of this worker, as signs of life carry it."""
        worker = self.worker  # another thread may end the work meanwhile
        if worker is None:
            return {}
        memory = peak_memory(worker.engine.device)
        return worker.figures | self.sender.link.figures | ({} if memory is None else {"memory_bytes": memory})

    def progress(self) -> str:
        """How far this worker and the run are, for people."""
        assert self.worker is not None
        counts, what = self.worker.counts, "units of work" if self.worker.policies.feed.leased else "contributions"
        late = counts["rejected"] + counts["abandoned"]
        behind = f", {late} came too late" if late else ""
        done = f"{counts['accepted']} {what} taken ({self.worker.samples:,} samples){behind}"
        return f"{done}; {self.worker.doing}, at version {self.worker.weights.version}"

    def _join(self) -> Welcome:
        self.sender.exchange()
        self.lines[0].allow(4 * self.protocol.welcome["size"] + (1 << 20))
        if self.way.name is None:
            self._keep_key(self.name)
        elif self.name != self.way.name:
            self.sender.report(f"another worker of this run is called {self.way.name}, so this one is {self.name}")
        return Welcome(self.protocol.welcome, self.protocol.welcome_frames)

    def _hold(self, experts: tuple[int, ...]) -> None:
        """Tell the coordinator which experts are here. From then on the weights of this worker are as long as it says."""
        if not isinstance(self.lines[0], TransportConnection):
            raise ShoalError("engine.experts: through a database all workers read the same weights, with all experts; leave it out")
        self.protocol.experts = experts
        self.sender.exchange()
        self.welcome = self.welcome._replace(header=self.welcome.header | {"size": self.protocol.size})

    def _keep_key(self, name: str) -> None:
        """Once kept, the key makes this worker known again when it comes back under this name."""
        if self.way.identity is not None or not isinstance(self.lines[0], TransportConnection):  # a database knows its users
            return
        try:
            self.way.key_file(name).write(self.protocol.identity)
        except OSError as error:
            self.sender.report(f"warning: this worker's key cannot be kept ({error}): if it is started again, it gets another name")

    @property
    def name(self) -> str:
        return self.protocol.name

    @property
    def _heartbeat_s(self) -> float:
        """Often enough that leases are renewed in time, too."""
        interval_s: float = self.welcome.header["heartbeat_s"]
        feed = strategies.policies_for(self.run, self.welcome.header["shards"]).feed
        return min(interval_s, feed.lease_s / 3) if feed.leased else interval_s

    def prepare(self, progress: Progress | None = None, here: RankPlace | None = None, live: LiveObjects = NO_LIVE_OBJECTS) -> None:
        """Put together what the work takes. `here`: as the first of several processes, which all get ready with it."""
        try:
            self._fetch_images(progress)
            self.worker = self._worker(progress, here, live)
        except BaseException as problem:
            self.refuse(problem)
            raise

    def _fetch_images(self, progress: Progress | None) -> None:
        """Get the images that this machine lacks from the class's database, if it has them. All processes of this worker are told."""
        line, header = self.lines[0], self.welcome.header
        if "images" in header and isinstance(line, DatabaseConnection) and is_without_images(self.run):
            folder = (self.way.state or state_folder()) / "images"
            found = fetch_images(ImageOffer.of(header["images"]), line.desk.read_piece, folder, progress)
            self.welcome = self.welcome._replace(header=header | {"images_path": str(found)})

    @property
    def state(self) -> str:
        return self.worker.doing if self.worker else self.doing

    def _worker(self, progress: Progress | None, here: RankPlace | None, live: LiveObjects) -> Worker:
        meeting = self._meet(here) if here is not None else None
        share = WorkerParts.of(self.welcome.header, self.welcome.frames, self.way, meeting, self.sender.report, progress, live)
        engine: Any = share.parts.engine
        feed_for: Callable[[int, int, int], Any] = share.feed_for
        keeper: Any = share.keepsakes
        if meeting is not None:
            engine = keeper = self.island = Island(share.parts.engine, share.feed_for, share.keepsakes, batch_part(share.parts)[1])
            feed_for = self.island.sit
        strategy = share.strategy
        return Worker(
            self.sender,
            engine,
            feed_for,
            WorkerPolicies(strategy.feed, strategy.contribution, strategy.pull, strategy.rounds.window, strategy.spans(engine.layouts)),
            self.run.updates,
            accumulation=self.run.training.gradient_accumulation_steps,
            ranks=1 if meeting is None else batch_share(self.run, 0, meeting.here.size)[1],
            receipts=ReceiptsFile(self.way.receipts),
            checkpoint=keeper,
            slowdown=self.way.slowdown,
        )

    def _meet(self, here: RankPlace) -> Rendezvous:
        """Tell the other processes of this worker what the coordinator said."""
        meeting = Rendezvous(here)
        words = [json.dumps(self.welcome.header).encode(), *(bytes(frame) for frame in self.welcome.frames)]
        meeting.say("words", str(len(words)))
        for number, word in enumerate(words):
            meeting.say(f"word {number}", word)
        return meeting

    def work(self) -> None:
        """Until the run is over, or `stop` is called."""
        assert self.worker is not None
        try:
            if not self.protocol.stopping:
                self.worker.work()
            if self.island is not None:
                self.island.leave()
        except BaseException as problem:
            self._say_why(problem)
            raise
        finally:
            self.close()

    def leave(self) -> None:
        """Go again, without having begun."""
        self.protocol.leave()
        self.sender.exchange()
        self.close()

    def refuse(self, problem: BaseException) -> None:
        """Go again, and tell the coordinator what is wrong."""
        self._say_why(problem)
        self.close()

    def _say_why(self, problem: BaseException) -> None:
        """Tell the coordinator's people why this worker cannot go on, unless it was the coordinator that ended it."""
        if self.protocol.session and isinstance(problem, Exception) and not isinstance(problem, SessionEndedError):
            said = str(problem) if isinstance(problem, ShoalError) else repr(problem)
            self.sender.leave_early(said)

    def close_ranks(self) -> None:
        """After the work, when nobody asks about it any more: let go of the other processes of this worker."""
        if self.island is not None:
            crew = self.island.crew
            self.island = self.worker = None
            crew.close()

    def stop(self) -> None:
        """Leave after this step; soon, where the coordinator does not answer any more."""
        self.protocol.stop()
        self.lines[0].wake()
        self._stopping.set()

    def _part(self) -> None:
        """Once the worker was asked to stop: while it waits for an answer, see whether anybody is there to give it."""
        self._stopping.wait()
        while not self._closed.wait(_LOOK_S):
            if self.protocol.waits and not self._is_answered():
                self.sender.report("nobody answers: leaving without saying goodbye")
                self.protocol.give_up()
                self.lines[0].close()
                return

    def _is_answered(self) -> bool:
        """Whether the coordinator, or its database, gives a sign of life. It is asked over a new connection: others may be stuck."""
        board = self.lines[0]
        if isinstance(board, DatabaseConnection):
            return board.desk.is_answered()
        line = TransportConnection(self.way.address, self.way.token, self.way.key)
        beat = self.protocol.heartbeat("leaving", self._figures())
        try:
            line.call(header_of(beat), (), _SIGN_S)
        except ConnectionLostError:
            return False
        except ShoalError:  # to be refused is to be answered
            return True
        finally:
            line.close()
        return True

    def close(self) -> None:
        self._closed.set()
        self._stopping.set()
        self.lines[1].close()
        self.pulse.close()
        self.sender.close()

    def _close_lines(self) -> None:
        for line in self.lines:
            line.close()

    def summary(self) -> str:
        """What came of it, for people."""
        assert self.worker is not None
        worker, poisoned = self.worker, self.worker.encoder.poisoned
        late = worker.counts["rejected"] + worker.counts["abandoned"]
        rejected = f", {late} came too late" if late else ""
        kept = f", {poisoned} were not finite and stayed here" if poisoned else ""
        sent = sum(line.sent_bytes for line in dict.fromkeys(self.lines))
        what = "units of work" if worker.policies.feed.leased else "contributions"
        taken = f"{worker.counts['accepted']} {what} taken ({worker.samples:,} samples)"
        return f"{taken}{rejected}{kept}; {sent / 1e6:.1f} MB sent, computing {worker.busy:.0%} of the time"


class Welcome(NamedTuple):
    """What the coordinator told a worker that joined."""

    header: dict[str, Any]
    frames: Frames


class WorkerParts(NamedTuple):
    """What one process of a worker needs for the work. A worker of one process has all of it."""

    parts: RunParts
    strategy: Policies
    shards: int
    keepsakes: WorkerCheckpoints
    pieces: data.UnitBatches | None
    """The units of the data, where they are leased."""

    @classmethod
    def of(
        cls,
        header: dict[str, Any],
        frames: Frames,
        way: JoinOptions,
        meeting: Rendezvous | None,
        tell: Callable[[str], None],
        progress: Progress | None = None,
        live: LiveObjects = NO_LIVE_OBJECTS,
    ) -> WorkerParts:
        parts = parts_for(header, frames, way.overrides, progress, meeting, live)
        strategy = strategies.policies_for(parts.run, header["shards"])
        if strategy.feed.leased:
            torch.seed()  # every worker draws noise of its own
        else:
            torch.manual_seed(parts.run.seed + header["seat"] + 1_000_003 * parts.engine.crew.rank)
        keepsakes = _keepsakes(parts, strategy, way, header["name"], tell)
        pieces = unit_pieces(parts, strategy) if strategy.feed.leased and not strategy.feed.given else None
        return cls(parts, strategy, header["shards"], keepsakes, pieces)

    def feed_for(self, seat: int, epoch: int, position: int) -> data.Feed:
        """The batches of a seat, from a position that counts batches of one process; or those of a leased unit."""
        part = batch_part(self.parts)
        if self.pieces is not None:
            return self.pieces.at(epoch, position)
        if self.strategy.feed.given:  # nothing is read here
            return self.parts.feed
        feed = feed_for_seat(self.parts.run, self.parts.data, seat, self.shards, part)
        _go_to(feed, epoch, -(-position // part[1]))
        return feed


def batch_part(parts: RunParts) -> tuple[int, int]:
    """Which part of every batch this process reads, and of how many."""
    crew = parts.engine.crew
    return batch_share(parts.run, crew.rank, crew.size)


def unit_pieces(parts: RunParts, strategy: Policies) -> data.UnitBatches:
    """The data as units that are leased. Of a worker of several processes each takes its part of every batch."""
    run = parts.run
    if not isinstance(parts.data.train, data.Samples):
        raise ShoalError("work units are pieces of data that has an end")
    return data.UnitBatches(
        parts.data.train,
        batch_size=run.training.batch_size or 1,
        seed=run.data.shuffle_seed or 0,
        reshuffle=run.data.reshuffle_each_epoch,
        loader=run.data.loader,
        batches_per_unit=strategy.feed.batches,
        part=batch_part(parts),
    )


def _keepsakes(parts: RunParts, strategy: Policies, way: JoinOptions, name: str, tell: Callable[[str], None]) -> WorkerCheckpoints:
    """A worker keeps its own state when the coordinator saves a checkpoint, and in the middle of a round where that is asked for."""
    settings, contribution = parts.run.checkpoint, strategy.contribution
    every = settings.every_steps if settings.strategy == "steps" and contribution.takes_inner_steps else None
    earlier = Path(settings.resume_from) if settings.resume_from else None
    if earlier is not None and (earlier / "state.json").exists():
        earlier = earlier.parent.parent
    crew = parts.engine.crew
    own = "" if crew is parts.engine.world else f"process-{crew.rank}"  # where each steps by itself, each keeps its own
    if (held := parts.run.engine.experts) is not None:  # what is kept of other experts does not fit
        own = f"experts-{zlib.crc32(str(held).encode()):08x}"
    due = SaveSchedule(
        lambda version: every is not None and contribution.passes(version, every),
        every,
        f"{settings_digest(parts.run)} {parts.engine.crew.size}",
    )
    return WorkerCheckpoints(
        parts.engine,
        way.state / own if way.state else None,
        earlier / "workers" / name / own if earlier else None,
        due,
        settings.keep_last,
        tell,
    )


def follow_first_process(here: RankPlace, way: JoinOptions) -> None:
    """Work as one of several processes, of which the first speaks with the coordinator."""
    _follow(Rendezvous(here), way).close()  # when nothing of the model is left


def _follow(meeting: Rendezvous, way: JoinOptions) -> World:
    count = int(meeting.hear("words", way.patience_s + _LONGER_S))
    header, *frames = [meeting.hear(f"word {number}", way.patience_s + _LONGER_S) for number in range(count)]
    share = WorkerParts.of(json.loads(header), frames, way, meeting, lambda text: None)
    IslandFollower(share.parts.engine, share.feed_for, share.keepsakes).work()
    return share.parts.engine.crew


def report_gone(way: JoinOptions) -> None:
    """For a worker whose processes have ended: nobody need wait for it. Where this does not arrive, its silence tells."""
    with contextlib.suppress(ShoalError, ConnectionLostError):
        identity, name = way.own_key(), way.name or ""
        line = TransportConnection(way.address, way.token, way.key)
        try:
            gone = Gone(name, identity.key)
            nonce = line.call(header_of(gone), (), _GONE_S).header.get("nonce", "")
            line.call(header_of(gone._replace(nonce=nonce, proof=identity.prove("gone", name, nonce))), (), _GONE_S)
        finally:
            line.close()


def describe_machine() -> dict[str, str]:
    """What a worker tells of itself."""
    return {"host": platform.node()[:100] or "?", "system": platform.system() or "?", "python": platform.python_version()}


def _go_to(feed: data.ShardFeed, epoch: int, position: int) -> None:
    """Take up a shard where it was left. A stream has to be read up to there."""
    if feed.batches_per_epoch is not None:
        feed.load_state_dict(feed.state_dict() | {"epoch": epoch, "position": position})
        return
    while feed.epoch < epoch or (feed.epoch == epoch and feed.position < position):
        next(feed)
