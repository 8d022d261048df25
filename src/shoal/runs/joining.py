"""A worker joins: all it needs to know beforehand is an address, a token and the coordinator's key."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal import data
from shoal.config import Run
from shoal.config.load import File, Override, resolve
from shoal.config.problems import ConfigError
from shoal.config.ranks import Place
from shoal.coordinator import Policy
from shoal.engines import Meeting, World, choose_device
from shoal.engines.island import Follower, Island
from shoal.errors import ShoalError
from shoal.runs.agreement import fingerprint, fragments_of, policy_of
from shoal.runs.assembly import Parts, Progress, assemble, feed_of
from shoal.runs.given import NOTHING, Given
from shoal.runs.keepsake import Keepsakes
from shoal.transports import Client, Message, Poster, Unreachable
from shoal.transports.connect import connect
from shoal.updates.messages import PROTOCOL, Gone, Join, Leave, header_of
from shoal.worker.courier import Answer, Courier, Frames, Lost, Pulse
from shoal.worker.local_steps import LocalSteps
from shoal.worker.member import Member, Receipts

_WELCOME_BYTES = 64 << 20
"""The largest frame before the size of the model is known: a tokenizer's file."""
OWN_SETTINGS = ("data.source", "data.loader", "training.device", "training.compile", "engine", "launch")
"""What a worker may set for itself: where its data lies, and how and on how many devices it computes. Everything else is the run's."""
_LONGER_S = 60.0
"""A process waits so much longer for the first one's word than that one does for the coordinator."""
_GONE_S = 2.0
_PLAIN_NAME = re.compile(r"[\w.-]+")


@contextlib.contextmanager
def _losing() -> Iterator[None]:
    """A coordinator that cannot be reached may be reached again: the courier tries."""
    try:
        yield
    except Unreachable as error:
        raise Lost(str(error)) from None


class ClientLine:
    """A transport's client, as the worker's courier sees it."""

    def __init__(self, address: str, token: str, key: str | None) -> None:
        self._connect: Callable[[int], Client] = lambda largest: connect(
            address, token=token, server_key=key, max_frame_bytes=largest, insecure=True
        )
        self.client = self._connect(_WELCOME_BYTES)

    def expect(self, largest: int) -> None:
        """From now on frames may be this large."""
        traffic = self.client.traffic
        self.client.close()
        self.client = self._connect(max(largest, _WELCOME_BYTES))
        self.client.traffic = traffic

    def call(self, header: dict[str, Any], frames: Frames, timeout_s: float) -> Answer:
        with _losing():
            return Answer(*self.client.call(Message(header, tuple(frames)), timeout_s))

    def post(self, header: dict[str, Any], frames: Frames) -> bool:
        if not isinstance(self.client, Poster):
            return False
        with _losing():
            self.client.post(Message(header, tuple(frames)), 0.0)
        return True

    def answer(self, timeout_s: float) -> Answer:
        assert isinstance(self.client, Poster)
        with _losing():
            return Answer(*self.client.answer(timeout_s))

    def close(self) -> None:
        self.client.close()


class Way(NamedTuple):
    """How to reach the coordinator, and how to behave."""

    address: str
    token: str
    key: str | None
    name: str | None = None
    overrides: Sequence[Override] = ()
    receipts: Path | None = None
    slowdown: float = 1.0
    patience_s: float = 600.0
    state: Path | None = None
    """Where the worker keeps what it needs to go on after a break; None: nowhere."""


class Joined:
    """A worker that takes part, from its joining to its end."""

    def __init__(self, way: Way, tell: Callable[[str], None]) -> None:
        self.way, self.tell = way, tell
        line = ClientLine(way.address, way.token, way.key)
        self.courier = Courier(line, Join(way.name, PROTOCOL, about_here()), way.patience_s, tell)
        self.member: Member | None = None
        self.stopping = False
        self.island: Island | None = None
        answer = self.welcome = self.courier.join()
        self.name: str = answer.header["name"]
        line.expect(4 * answer.header["size"] + (1 << 20))
        pulse_line = ClientLine(way.address, way.token, way.key)
        self.pulse = Pulse(lambda: self._beat(pulse_line), answer.header["heartbeat_s"])
        self.lines = (line, pulse_line)
        try:
            self.run = configuration(answer.header, way.overrides)
        except BaseException:
            self.close()
            raise

    def prepare(self, progress: Progress | None = None, here: Place | None = None, given: Given = NOTHING) -> None:
        """Put together what the work takes. `here`: as the first of several processes, which all get ready with it."""
        try:
            self.member = self._member(progress, here, given)
        except BaseException:
            self.close()
            raise

    def _beat(self, line: ClientLine) -> None:
        if self.courier.beat(line, self.state):
            self.stop()  # it is over: what it computes now is of no use

    @property
    def state(self) -> str:
        return self.member.state if self.member else "preparing"

    def _member(self, progress: Progress | None, here: Place | None, given: Given) -> Member:
        header = self.welcome.header
        meeting = Meeting(here) if here is not None else None
        if meeting is not None:
            words = [json.dumps(header).encode(), *(bytes(frame) for frame in self.welcome.frames)]
            meeting.say("words", str(len(words)))
            for number, word in enumerate(words):
                meeting.say(f"word {number}", word)
        share = Share.of(header, self.welcome.frames, self.way, meeting, self.tell, progress, given)
        common: dict[str, Any] = {
            "accumulation": self.run.training.gradient_accumulation_steps,
            "receipts": Receipts(self.way.receipts),
            "slowdown": self.way.slowdown,
        }
        engine: Any = share.parts.engine
        feed_for: Callable[[int, int, int], Any] = share.feed_for
        keeper: Any = share.keepsakes
        if meeting is not None:
            engine = keeper = self.island = Island(share.parts.engine, share.feed_for, share.keepsakes)
            feed_for, common["ranks"] = self.island.sit, meeting.here.size
        told = (self.courier, engine, feed_for, share.policy, self.run.updates)
        if share.policy.inner is None:
            return Member(*told, **common)
        return LocalSteps(*told, spans=fragments_of(engine.layouts, share.policy), keepsakes=keeper, **common)

    def work(self) -> None:
        """Until the run is over, or `stop` is called."""
        assert self.member is not None
        try:
            if not self.stopping:
                self.member.work()
            if self.island is not None:
                self.island.leave()
        finally:
            self.close()

    def leave(self) -> None:
        """Go again, without having begun."""
        self.courier.ask(Leave("", 0)).result()
        self.close()

    def part(self) -> None:
        """After the work, and when nobody asks about it any more: let go of the other processes."""
        if self.island is not None:
            crew = self.island.crew
            self.island = self.member = None
            crew.close()

    def stop(self) -> None:
        """Leave after this step."""
        self.stopping = True
        if self.member is not None:
            self.member.stopping = True

    def close(self) -> None:
        self.lines[1].close()
        self.pulse.close()
        self.courier.close()

    def summary(self) -> str:
        """What came of it, for people."""
        assert self.member is not None
        counts, poisoned = self.member.counts, self.member.outgoing.poisoned
        rejected = f", {counts['rejected']} came too late" if counts["rejected"] else ""
        kept = f", {poisoned} were not finite and stayed here" if poisoned else ""
        sent, busy = sum(line.client.traffic.sent_bytes for line in self.lines), self.member.busy
        return f"{counts['accepted']} contributions taken{rejected}{kept}; {sent / 1e6:.1f} MB sent, computing {busy:.0%} of the time"


class Share(NamedTuple):
    """What one process of a worker needs for the work. A worker of one process has all of it."""

    parts: Parts
    policy: Policy
    shards: int
    keepsakes: Keepsakes

    @classmethod
    def of(
        cls,
        header: dict[str, Any],
        frames: Frames,
        way: Way,
        meeting: Meeting | None,
        tell: Callable[[str], None],
        progress: Progress | None = None,
        given: Given = NOTHING,
    ) -> Share:
        parts = parts_for(header, frames, way.overrides, progress, meeting, given)
        policy = policy_of(parts.run, header["shards"])
        torch.manual_seed(parts.run.seed + header["seat"] + 1_000_003 * parts.engine.crew.rank)
        return cls(parts, policy, header["shards"], _keepsakes(parts, policy, way, header["name"], tell))

    def feed_for(self, seat: int, epoch: int, position: int) -> data.Feed:
        """The batches of a seat, from a position that counts batches of one process."""
        crew = self.parts.engine.crew
        feed = feed_of(self.parts.run, self.parts.data, seat, self.shards, (crew.rank, crew.size))
        _go_to(feed, epoch, -(-position // crew.size))
        return feed


def _keepsakes(parts: Parts, policy: Policy, way: Way, name: str, tell: Callable[[str], None]) -> Keepsakes:
    """A worker keeps its own state when the coordinator saves a checkpoint."""
    settings, inner = parts.run.checkpoint, policy.inner
    every = settings.every_steps if settings.strategy == "steps" else None
    earlier = Path(settings.resume_from) if settings.resume_from else None
    if earlier is not None and (earlier / "state.json").exists():
        earlier = earlier.parent.parent
    crew = parts.engine.crew
    own = "" if crew is parts.engine.world else f"process-{crew.rank}"  # where each steps by itself, each keeps its own
    return Keepsakes(
        parts.engine,
        way.state / own if way.state else None,
        earlier / "workers" / name / own if earlier else None,
        lambda version: bool(every) and inner is not None and inner.passes(version, every or 1),
        settings.keep_last,
        tell,
    )


def follow(here: Place, way: Way) -> None:
    """Work as one of several processes, of which the first speaks with the coordinator."""
    _follow(Meeting(here), way).close()  # when nothing of the model is left


def _follow(meeting: Meeting, way: Way) -> World:
    count = int(meeting.hear("words", way.patience_s + _LONGER_S))
    header, *frames = [meeting.hear(f"word {number}", way.patience_s + _LONGER_S) for number in range(count)]
    share = Share.of(json.loads(header), frames, way, meeting, lambda text: None)
    Follower(share.parts.engine, share.feed_for, share.keepsakes).work()
    return share.parts.engine.crew


def say_gone(way: Way) -> None:
    """For a worker whose processes have ended: nobody need wait for it. Where this does not arrive, its silence tells."""
    with contextlib.suppress(ShoalError, Lost):
        line = ClientLine(way.address, way.token, way.key)
        try:
            line.call(header_of(Gone(way.name or "")), (), _GONE_S)
        finally:
            line.close()


def about_here() -> dict[str, str]:
    """What a worker tells of itself."""
    return {"host": platform.node()[:100] or "?", "system": platform.system() or "?", "python": platform.python_version()}


def parts_for(
    header: dict[str, Any],
    frames: Frames,
    overrides: Sequence[Override],
    progress: Progress | None,
    meeting: Meeting | None = None,
    given: Given = NOTHING,
) -> Parts:
    """What the run is made of, on this machine; the same as at the coordinator's, or an error."""
    run = configuration(header, overrides)
    here = meeting.here if meeting is not None else None
    world = meeting.enter(choose_device(run.training.device, meeting.here.local_rank)) if meeting is not None else None
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        unpack(Path(folder) / "tokenizer", header["tokenizer"], frames)
        parts = assemble(run, progress, Path(folder), lambda samples: int(header["total_steps"]), here, world, given)
    if fingerprint(parts.data) != header["data"]:
        raise ShoalError(
            f"the data here ({parts.data.info.name}) is not what the coordinator has: put the same files in place, "
            "or name them with --set data.source.path=…"
        )
    if parts.engine.size != header["size"]:
        raise ShoalError(f"the model here has {parts.engine.size} parameters, the coordinator's {header['size']}")
    return parts


def configuration(header: dict[str, Any], overrides: Sequence[Override]) -> Run:
    """The run's settings, as the coordinator sent them, with what this worker sets for itself."""
    text = header["config"]
    if hashlib.sha256(text.encode()).hexdigest() != header["digest"]:
        raise ShoalError("the configuration was damaged on its way: try again")
    for override in overrides:
        if not override.path.startswith(OWN_SETTINGS):
            raise ShoalError(f"`{override.path}` is the run's to set, not a worker's; a worker may set {', '.join(OWN_SETTINGS)}")
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        loaded = resolve([File(str(path))], list(overrides), dialect="shoal", resolved=True)
    if not loaded.ok:
        raise ConfigError(loaded.problems)
    return loaded.run


def unpack(folder: Path, names: Sequence[str], frames: Frames) -> None:
    """Write the tokenizer's files; their names come from elsewhere and may not lead out of the folder."""
    for name, content in zip(names, frames, strict=True):
        if not _PLAIN_NAME.fullmatch(name) or name.startswith("."):
            raise ShoalError(f"the coordinator sent a file with an impossible name: {name!r}")
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _go_to(feed: data.Feed, epoch: int, position: int) -> None:
    """Take up a shard where it was left. A stream has to be read up to there."""
    if feed.batches_per_epoch is not None:
        feed.load_state_dict(feed.state_dict() | {"epoch": epoch, "position": position})
        return
    while feed.epoch < epoch or (feed.epoch == epoch and feed.position < position):
        next(feed)
