"""A worker joins: all it needs to know beforehand is an address, a token and the coordinator's key."""

from __future__ import annotations

import hashlib
import platform
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal import data
from shoal.config import Run
from shoal.config.load import File, Override, resolve
from shoal.config.problems import ConfigError
from shoal.coordinator import Inner
from shoal.errors import ShoalError
from shoal.strategies.assembly import Parts, Progress, assemble, feed_of
from shoal.strategies.cluster import fingerprint, fragments_of, policy_of
from shoal.transports import Client, Message, Unreachable
from shoal.transports.connect import connect
from shoal.updates.messages import PROTOCOL, Join
from shoal.worker.courier import Answer, Courier, Frames, Lost, Pulse
from shoal.worker.keepsake import Keepsakes
from shoal.worker.local_steps import LocalSteps
from shoal.worker.member import Member, Receipts

_WELCOME_BYTES = 64 << 20
"""The largest frame before the size of the model is known: a tokenizer's file."""
OWN_SETTINGS = ("data.source", "data.loader", "training.device", "training.compile")
"""What a worker may set for itself: where its data lies, and how it computes. Everything else is the run's."""
_PLAIN_NAME = re.compile(r"[\w.-]+")


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
        try:
            message = self.client.call(Message(header, tuple(frames)), timeout_s)
        except Unreachable as error:
            raise Lost(str(error)) from None
        return Answer(message.header, message.frames)

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

    def __init__(self, way: Way, tell: Callable[[str], None], progress: Progress | None = None) -> None:
        self.way, self.tell = way, tell
        line = ClientLine(way.address, way.token, way.key)
        self.courier = Courier(line, Join(way.name, PROTOCOL, about_here()), way.patience_s, tell)
        self.member: Member | None = None
        self.stopping = False
        answer = self.courier.join()
        self.name: str = answer.header["name"]
        line.expect(4 * answer.header["size"] + (1 << 20))
        pulse_line = ClientLine(way.address, way.token, way.key)
        self.pulse = Pulse(lambda: self.courier.beat(pulse_line, self.state), answer.header["heartbeat_s"])
        self.lines = (line, pulse_line)
        try:
            self.member = self._prepare(answer, progress)
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> str:
        return self.member.state if self.member else "preparing"

    def _prepare(self, answer: Answer, progress: Progress | None) -> Member:
        header = answer.header
        parts = parts_for(header, answer.frames, self.way.overrides, progress)
        run = parts.run
        policy = policy_of(run, header["shards"])
        torch.manual_seed(run.seed + header["seat"])

        def feed_for(seat: int, epoch: int, position: int) -> data.Feed:
            feed = feed_of(run, parts.data, seat, header["shards"])
            _go_to(feed, epoch, position)
            return feed

        common: dict[str, Any] = {
            "accumulation": run.training.gradient_accumulation_steps,
            "receipts": Receipts(self.way.receipts),
            "slowdown": self.way.slowdown,
        }
        told = (self.courier, parts.single, feed_for, policy, run.updates)
        if policy.inner is None:
            return Member(*told, **common)
        keepsakes = self._keepsakes(run, policy.inner)
        return LocalSteps(*told, spans=fragments_of(parts.single, policy), keepsakes=keepsakes, **common)

    def _keepsakes(self, run: Run, inner: Inner) -> Keepsakes:
        """A worker keeps its own state when the coordinator saves a checkpoint."""
        settings = run.checkpoint
        every = settings.every_steps if settings.strategy == "steps" else None
        earlier = Path(settings.resume_from) if settings.resume_from else None
        if earlier is not None and (earlier / "state.json").exists():
            earlier = earlier.parent.parent
        return Keepsakes(
            self.way.state,
            earlier / "workers" / self.name if earlier else None,
            lambda version: bool(every) and inner.passes(version, every or 1),
            settings.keep_last,
            self.tell,
        )

    def work(self) -> None:
        """Until the run is over, or `stop` is called."""
        assert self.member is not None
        try:
            if not self.stopping:
                self.member.work()
        finally:
            self.close()

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
        sent = sum(line.client.traffic.sent_bytes for line in self.lines)
        return f"{counts['accepted']} contributions taken{rejected}{kept}; {sent / 1e6:.1f} MB sent"


def about_here() -> dict[str, str]:
    """What a worker tells of itself."""
    return {"host": platform.node()[:100] or "?", "system": platform.system() or "?", "python": platform.python_version()}


def parts_for(header: dict[str, Any], frames: Frames, overrides: Sequence[Override], progress: Progress | None) -> Parts:
    """What the run is made of, on this machine; the same as at the coordinator's, or an error."""
    run = configuration(header, overrides)
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        unpack(Path(folder) / "tokenizer", header["tokenizer"], frames)
        parts = assemble(run, progress, Path(folder), lambda samples: int(header["total_steps"]))
    if fingerprint(parts.data) != header["data"]:
        raise ShoalError(
            f"the data here ({parts.data.info.name}) is not what the coordinator has: put the same files in place, "
            "or name them with --set data.source.path=…"
        )
    if parts.engine.vector.numel() != header["size"]:
        raise ShoalError(f"the model here has {parts.engine.vector.numel()} parameters, the coordinator's {header['size']}")
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
