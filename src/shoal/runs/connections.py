"""A worker's connection to its coordinator: over a transport, or to a database that leases units in the coordinator's place.

A worker's secret key is created once for a run and a name, and kept in a file, so that a worker that returns is recognised.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal import strategies
from shoal.config.environment import state_folder
from shoal.config.load import Override
from shoal.config.received import Permissions
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.files import make_folder, read_file, write_file
from shoal.protocol.identities import Identity
from shoal.protocol.messages import PAUSED, STOPPED, Frames
from shoal.runs.welcome import configuration
from shoal.transports import Client, Message, Poster, Unreachable
from shoal.transports.connect import connect
from shoal.transports.database_address import is_address, parse
from shoal.transports.interface import ConnectOptions
from shoal.worker.sender import ConnectionLostError, CoordinatorAnswer
from shoal.worker.session import COMPUTING, how_it_ended

if TYPE_CHECKING:
    from shoal.transports.postgres import LeaseClient
    from shoal.transports.postgres.lease_client import ClaimedUnit, PublishedWeights

_WELCOME_BYTES = 64 << 20
"""The largest frame before the size of the model is known: a tokenizer's file."""
_CLAIM_S = 60.0
_LONGEST_STATE = 80
"""Longest state of a worker that the database accepts, in printable ASCII."""
_NOTICE_EVERY_S = 5.0
_SECRET = re.compile(r"[0-9a-f]{64}")


class WorkerKeyFile(NamedTuple):
    """The file with a worker's secret key for one run and one name."""

    path: Path

    def read(self) -> Identity | None:
        """The key; None where there is no file yet. Raises ShoalError where it cannot be read."""
        content = read_file(self.path, private=True)
        if content is None:
            return None
        secret = content.decode("ascii", "replace").strip()
        if not _SECRET.fullmatch(secret):
            raise ShoalError(f"the worker's key in {self.path} is damaged: delete the file to take part as a new worker")
        return Identity(secret)

    def write(self, identity: Identity) -> None:
        """Write the key, readable by this user only. Raises ShoalError."""
        make_folder(self.path.parent, private=True)
        write_file(self.path, identity.secret, private=True)


class JoinOptions(NamedTuple):
    """How a worker reaches the coordinator, and its own settings."""

    address: str
    token: str
    key: str | None
    identity: str | None = None
    """The worker's own secret key; None: the saved key of its name, or a new one."""
    name: str | None = None
    overrides: Sequence[Override] = ()
    receipts: Path | None = None
    slowdown: float = 1.0
    patience_s: float = 600.0
    permissions: Permissions = Permissions()
    """What the coordinator may name on this machine."""
    workers: int = 1
    """Workers behind this one, if it is a relay."""
    state: Path | None = None
    """Folder for the worker's checkpoints and key; None: no checkpoints, and the key is saved in the user's state folder."""
    checkpoints: Path | None = None
    """Folder for the worker's checkpoints, where they are not kept beside the key; None: `state`."""
    memory_bytes: int | None = None
    """Memory that the worker may use; None: what is free on this machine."""
    route: Callable[[str], str] = str
    """Returns the address to connect to in place of another one: a forwarder that limits the upload."""

    @property
    def folder(self) -> Path:
        """Where the worker keeps its secrets and the images that it fetches."""
        return self.state or state_folder()

    def key_file(self, name: str) -> WorkerKeyFile:
        run = f"{self.token}\0{self.key}" if self.token else self.address
        return WorkerKeyFile(self.folder / f"identity-{hashlib.sha256(run.encode()).hexdigest()[:16]}-{name}")

    @property
    def guest_folder(self) -> Path:
        """Where a worker that gives way to its computer's user keeps the steps of a round, and what its user agreed to."""
        return self.folder / self.key_file(self.name or "").path.name.replace("identity", "volunteer", 1)

    @property
    def written(self) -> list[str]:
        """For the user: what the worker writes, and where."""
        others = [str(path) for path in (self.receipts, self.checkpoints) if path is not None and not path.is_relative_to(self.folder)]
        return [f"this worker's key and what it keeps in {self.folder}", *others]

    def own_key(self) -> Identity:
        """The key that identifies this worker."""
        if self.identity is not None:
            return Identity(self.identity)
        return (self.key_file(self.name).read() if self.name else None) or Identity.new()


@contextlib.contextmanager
def _losing() -> Iterator[None]:
    """Turns `Unreachable` into `ConnectionLostError`, after which the sender tries again."""
    try:
        yield
    except Unreachable as error:
        raise ConnectionLostError(str(error)) from None


def _plain(said: str) -> str:
    """The text with `?` for every character that the database refuses: anything but printable ASCII."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in said)[:_LONGEST_STATE]


def _last_state(reason: str) -> str:
    """The state that the database keeps of a worker that leaves with a reason."""
    return _plain(reason if reason.startswith(PAUSED) else f"left: {reason}")


class TransportConnection:
    """A connection over a transport (ZeroMQ, XML-RPC, in-process, or messages in PostgreSQL)."""

    def __init__(self, address: str, token: str, key: str | None) -> None:
        self._connect: Callable[[int], Client] = lambda largest: connect(ConnectOptions(address, token, key, largest, insecure=True))
        self.client = self._connect(_WELCOME_BYTES)
        self._poster = self.client if isinstance(self.client, Poster) else None
        """The client, if it can post. Looked up once for each client: for every message it took as long as the message's header."""

    @property
    def sent_bytes(self) -> int:
        return self.client.traffic.sent_bytes

    def allow(self, largest: int) -> None:
        """Reconnect with this limit for the size of a frame."""
        traffic = self.client.traffic
        self.client.close()
        self.client = self._connect(max(largest, _WELCOME_BYTES))
        self.client.traffic = traffic
        self._poster = self.client if isinstance(self.client, Poster) else None

    def call(self, header: dict[str, Any], frames: Frames, timeout_s: float) -> CoordinatorAnswer:
        with _losing():
            return CoordinatorAnswer(*self.client.call(Message(header, tuple(frames)), timeout_s))

    def post(self, header: dict[str, Any], frames: Frames) -> bool:
        if self._poster is None:
            return False
        with _losing():
            self._poster.post(Message(header, tuple(frames)), 0.0)
        return True

    def answer(self, timeout_s: float) -> CoordinatorAnswer:
        assert self._poster is not None
        with _losing():
            return CoordinatorAnswer(*self._poster.answer(timeout_s))

    def still_wanted(self, unit: int) -> bool:
        """Always True: the coordinator reports units that are no longer wanted with its answers to heartbeats."""
        return True

    def wake(self) -> None:
        """Nothing to do: a coordinator does not delay answers for long."""

    def close(self) -> None:
        self.client.close()


class DatabaseConnection:
    """A connection to a database that leases units, takes results and publishes weights, whether the coordinator runs or not.

    The lease client retries by itself where the database cannot be reached.
    """

    def __init__(self, desk: LeaseClient, welcome: Message, lease_s: float, tell: Callable[[str], None]) -> None:
        self.desk, self.welcome, self.tell = desk, welcome, tell
        self.sent_bytes = 0
        self._unit: ClaimedUnit | None = None
        self._lease_s, self._leased_at, self._told_slow = lease_s, 0.0, False
        self._notice_at = 0.0
        self._fetching = False
        """Whether the worker has a unit and waits for its weights; it then counts as computing."""
        self._figures: dict[str, float] = {}
        self._known: dict[str, Any] = {"version": -1, "step": 0.0, "done": False, "outcome": "", "most_lag": float("inf")}
        self._end = ""
        """How the run was stopped, as the user was told; empty: it goes on."""
        self._answers: dict[str, Callable[[dict[str, Any], Frames], CoordinatorAnswer]] = {
            "join": self._join,
            "pull": self._pull,
            "claim": self._claim,
            "contribute": self._contribute,
            "giveback": self._give_back,
            "fail": self._fail,
            "heartbeat": self._beat,
            "leave": self._leave,
        }

    def allow(self, largest: int) -> None:
        """Nothing to do: the database does not limit frames."""

    def call(self, header: dict[str, Any], frames: Frames, timeout_s: float) -> CoordinatorAnswer:
        try:
            return self._answers[header["kind"]](header, frames)
        except Unreachable as error:
            if self.desk.end and header["kind"] != "heartbeat":  # those are not tried again
                return self._ended(header)
            raise ConnectionLostError(str(error)) from None

    def _ended(self, header: dict[str, Any]) -> CoordinatorAnswer:
        """The answer where the database is gone with a run that has ended, or was stopped and not resumed in time."""
        self.desk.patience_s = 0.0
        self._known |= {"done": True, "outcome": self.desk.end}
        receipt = {"kind": "receipt", "status": "finished", "seq": -1, "round": header.get("round", 0), "repeated": False}
        answers = {"contribute": receipt, "claim": {"kind": "lease", "unit": -1}, "leave": {"kind": "goodbye"}}
        return CoordinatorAnswer(answers.get(header["kind"], {"kind": "noted"}) | self._known, ())

    def post(self, header: dict[str, Any], frames: Frames) -> bool:
        return False

    def answer(self, timeout_s: float) -> CoordinatorAnswer:
        raise AssertionError("nothing is ever posted here")

    def still_wanted(self, unit: int) -> bool:
        wanted = self._unit is None or self.desk.is_lease_valid(self._unit)
        self._report_end()
        return wanted

    def wake(self) -> None:
        self.desk.wake()

    def close(self) -> None:
        self.desk.close()

    # --- answers -----------------------------------------------------------------------------------

    def _join(self, header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        name = self.desk.join(header["name"], header["about"])
        place = {"seat": 0, "epoch": 0, "position": 0, "last_seq": -1}
        known = {"kind": "welcome", "name": name, "session": name, **place}
        return CoordinatorAnswer(self.welcome.header | known, self.welcome.frames)

    def _pull(self, header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        newer = self.desk.weights(header["have"])
        if newer is None:
            raise ConnectionLostError("there are no weights yet")
        return self._news({"kind": "weights"}, newer)

    def _news(self, header: dict[str, Any], newer: PublishedWeights | None) -> CoordinatorAnswer:
        """The version of the run, with the weights where there are newer ones."""
        if newer is None:
            return CoordinatorAnswer(header | self._known | {"weights": "same"}, ())
        self._known |= {"version": newer.version, "step": newer.header["step"], "done": newer.header["done"]}
        self._known["outcome"] = newer.header.get("outcome", "")
        return CoordinatorAnswer(header | self._known | {"weights": newer.header["weights"]}, newer.frames)

    def _claim(self, header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        """A unit for the weights that the worker has; where there are newer weights, those instead."""
        nothing = {"kind": "lease", "unit": -1}
        if (newer := self.desk.weights(header["have"])) is not None:
            return self._news(nothing, newer)
        units = self.desk.claim(1, _CLAIM_S)
        if not units:
            self.desk.read_end()
            self._report_end()
            self._report_notice()
            return self._news(nothing, None)
        self._unit = unit = units[0]
        self._leased_at, self._told_slow = time.monotonic(), False
        self._fetching = True
        newer = self.desk.weights(header["have"]) if unit.iteration != header["have"] else None
        self._fetching = False
        if unit.iteration not in (header["have"], newer.version if newer is not None else None):
            self.desk.return_unit(unit)  # weights come as one difference at a time, and more are to come
            return self._news(nothing, newer)
        lease = {"kind": "lease", "unit": unit.id, "epoch": unit.epoch, "start": unit.start, "batches": unit.batches}
        return self._news(lease, newer)

    def _contribute(self, header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        assert self._unit is not None
        sent = {name: header[name] for name in ("base", "weight", "samples", "metrics")}
        status = self.desk.submit(self._unit, sent, frames)
        if status == "late" and self._told_slow:
            self.tell("warning: the result of this unit came too late: another worker was given the unit meanwhile")
        self.sent_bytes += sum(len(frame) for frame in frames)
        receipt = {"kind": "receipt", "status": status, "seq": self._unit.id, "round": header["round"], "repeated": False}
        return CoordinatorAnswer(receipt | self._known, ())

    def _give_back(self, header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        assert self._unit is not None
        self.desk.return_unit(self._unit)
        return CoordinatorAnswer({"kind": "noted"}, ())

    def _fail(self, header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        assert self._unit is not None
        self.desk.fail_unit(self._unit, header["reason"])
        return CoordinatorAnswer({"kind": "noted"}, ())

    def _report_end(self) -> None:
        """Report that the run was stopped or goes on again, to the user and to the coordinator, which waits for that before it ends."""
        if self.desk.end == self._end:
            return
        self._end = self.desk.end
        if not self._end:
            self.tell("the lesson goes on")
            return
        with contextlib.suppress(ShoalError):
            self.desk.heartbeat(STOPPED, self._figures)
        if self._end != "completed":
            wait = f"If it goes on within {self.desk.patience_s:.0f} s, this computer takes part again; Ctrl-C leaves"
            self.tell(f"{how_it_ended(self._end, lesson=True)}. What this computer has handed in is kept. {wait}")

    def _report_notice(self) -> None:
        """Report why this worker gets no unit, where that is its own fault. The database is queried every few seconds."""
        if time.monotonic() >= self._notice_at:
            self._notice_at = time.monotonic() + _NOTICE_EVERY_S
            if notice := self.desk.why_no_work():
                self.tell(f"warning: {notice}")

    def _report_slow(self, state: str) -> None:
        """Warn once when a unit takes longer than the timeout. Heartbeats renew its lease, so it is not lost."""
        took_s = time.monotonic() - self._leased_at
        if state == COMPUTING and self._unit is not None and took_s > self._lease_s and not self._told_slow:
            self._told_slow = True
            self.tell(
                f"warning: this unit has taken {took_s:.0f} s so far, longer than the class's timeout of {self._lease_s:g} s. It is still "
                "yours while this computer is seen at work, unless others have nothing to do; the teacher can choose smaller units "
                "(batches_per_unit) or a longer lease_timeout_s"
            )

    def _beat(self, header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        self._report_slow(header["state"])
        self._figures = header["figures"]
        state = STOPPED if self.desk.end else COMPUTING if self._fetching else header["state"]
        self.desk.heartbeat(state, self._figures)
        return CoordinatorAnswer({"kind": "pulse"}, ())

    def _leave(self, header: dict[str, Any], frames: Frames) -> CoordinatorAnswer:
        if header["reason"]:
            self.desk.heartbeat(_last_state(header["reason"]), self._figures)
        self.desk.leave()
        return CoordinatorAnswer({"kind": "goodbye"}, ())

    def leave_beside(self, reason: str) -> None:
        """Leave over the connection of the heartbeats, while another thread uses the other one."""
        self.desk.heartbeat(_last_state(reason), self._figures)
        self.desk.leave_beside()


WorkerConnection = TransportConnection | DatabaseConnection


def connect_worker(options: JoinOptions, tell: Callable[[str], None]) -> tuple[WorkerConnection, WorkerConnection]:
    """A worker's connection to its coordinator, and one for its heartbeats."""
    address = options.address
    if is_address(address):
        from shoal.transports.postgres.enrolment import own_access  # imported here: only databases need the driver

        # The worker's own database role, which is created where the address names the class's role
        address = own_access(parse(address), options.name, options.folder, options.patience_s, tell).address
        address = options.route(address)
        if (board := _board(address, options, tell)) is not None:
            return board, board
    else:
        address = options.route(address)
    return TransportConnection(address, options.token, options.key), TransportConnection(address, options.token, options.key)


def _board(address: str, options: JoinOptions, tell: Callable[[str], None]) -> DatabaseConnection | None:
    """A connection to the database's leases; None where its run leases no units."""
    from shoal.transports.postgres import LeaseClient  # imported here: only databases need the driver

    desk = LeaseClient(address, poll_interval_s=1.0, patience_s=options.patience_s, warn=tell)
    try:
        welcome = desk.read_run(wait_s=options.patience_s)
        run = configuration(welcome.header, options.overrides, options.permissions)
        feed = strategies.policies_for(run, welcome.header["shards"]).feed
        if feed.leased:
            assert isinstance(run.transport, Postgres)
            desk.poll_interval_s = run.transport.poll_interval_s
            return DatabaseConnection(desk, welcome, feed.lease_s, tell)
    except BaseException:
        desk.close()
        raise
    desk.close()
    return None
