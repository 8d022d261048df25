"""The worker's side of the protocol, sans I/O: an answer goes in, the next request comes out.

It handles joining, sequence numbers, rounds, retries, joining again after the coordinator lost the session, and leases. It opens no
connection and reads no clock; the time is an argument. A loop with an engine drives it (`sender.py`, `worker.py`), and so do tests,
benchmarks and the simulator.

    while (question := protocol.next_request(now)) is not None:   # None: the worker computes, and then contributes
        events = protocol.on_answer(*answer to that question)      # or protocol.on_no_answer(now, why), where none came

Holds: at most one request of a worker is under way. Every request carries a number, so repeating it is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.errors import ShoalError, printable
from shoal.protocol.identities import Identity
from shoal.protocol.messages import (
    INTERRUPTED,
    LONGEST_REASON,
    NO_TASK,
    Claim,
    Contribute,
    Fail,
    Frames,
    GiveBack,
    Heartbeat,
    Hold,
    Join,
    Leave,
    Pull,
    SeatAssigned,
    WorkerRequest,
)
from shoal.protocol.worker_names import is_worker_name

SLOWEST_LINK_BYTES_PER_S = 50_000
"""Bytes per second. A message that takes longer than at this rate is considered lost."""
ANSWER_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
_WORTH_A_WORD_S = 0.4
"""Shorter pauses are not reported to the user."""
_STOPPING_S = 5.0
"""Seconds that a worker which was asked to stop waits for an answer."""
COMPUTING, STUCK = "computing", "stuck"
"""States that a worker reports in heartbeats. The lease of a stuck worker is not renewed; heartbeats come from a thread of their own."""
TOO_FAST = "too-fast"
_ASK_AGAIN = (TOO_FAST, NO_TASK, "replayed", "asked-again", "unknown-nonce")
"""Refusals of a single message, which is then sent again: it was duplicated, came too late or too early, or there were too many."""


_ENDINGS = {
    "completed": "it is complete",
    "stopped early": "its model did not improve any more",
    INTERRUPTED: "its owner stopped it",
    "failed": "it failed on the owner's machine",
}
"""By the outcome of a run: the words for it."""
_LONGEST_OUTCOME = 200


def how_it_ended(outcome: str, lesson: bool = False) -> str:
    """A sentence for the user of a worker. `lesson`: the run belongs to a class."""
    words = _ENDINGS.get(outcome, printable(outcome)[:_LONGEST_OUTCOME])
    if lesson:
        words = words.replace("its owner", "the teacher").replace("the owner's", "the teacher's")
    return ("the lesson has ended" if lesson else "the run has ended") + (f": {words}" if words else "")


class SessionEndedError(ShoalError):
    """The coordinator has dismissed this worker or is gone, so no leave message is sent."""

    reason: str = ""
    """The coordinator's reason code for the refusal."""


class SessionRequest(NamedTuple):
    """A request to the coordinator, and how long to wait for the answer."""

    asked: WorkerRequest
    frames: Frames
    timeout_s: float


class RetryPause(NamedTuple):
    """No answer came: retry after a pause, and show the message to the user if there is one."""

    pause_s: float
    message: str
    """A line for the user; empty: none."""


class LeasedUnit(NamedTuple):
    """A leased unit: some batches of an epoch, to be learned from with this version of the weights."""

    number: int
    version: int
    epoch: int
    start: int
    batches: int
    given: Mapping[str, Any] = {}
    """The content of the lease, for workers that read no data themselves."""


class ContributionReceipt(NamedTuple):
    """The outcome of a contribution."""

    contribution: Contribute
    status: str
    version: int
    seq: int
    """The number under which the contribution is known to an audit."""
    digest: str = ""
    seal: str = ""
    """The coordinator's proof that it confirmed this, for an audit."""


class RunNews(NamedTuple):
    """Where the run stands, and new weights, if there are any."""

    header: Mapping[str, Any]
    frames: Frames
    afresh: bool
    """The worker had no weights, or none that the coordinator knows of: these replace them."""


SessionEvent = SeatAssigned | LeasedUnit | ContributionReceipt | RunNews


@dataclass
class _Pending:
    """A contribution whose outcome is not known yet."""

    asked: Contribute
    frames: Frames


class WorkerSession:
    """Protocol state of one worker, from joining to leaving."""

    until: int | None = None
    """The batch of the epoch at which the worker's part of the data ends; None: it does not end."""
    experts: tuple[int, ...] = ()
    """The experts of a mixture that the worker holds; empty: all of them. They are sent once in each session."""
    size: int | None = None
    """Length of the vector of a worker with these experts, as the coordinator reports it."""
    _holds: bool = False
    """Whether the coordinator has taken note of the experts in this session."""

    pending: _Pending | None = None
    """The contribution that is under way."""
    notice = ""
    """A text for the user that came with the coordinator's last answer to a heartbeat."""
    outcome = ""
    """How the run ended, as the coordinator says."""

    def __init__(
        self,
        name: str | None,
        about: Mapping[str, str],
        protocol: int,
        instance: str,
        patience_s: float = 600.0,
        identity: Identity | None = None,
        redact: Callable[[str], str] = lambda text: text,
        workers: int = 1,
    ) -> None:
        """`identity`: the worker's key; None: a new one. `redact`: removes what only this machine knows. `workers`: those of a relay."""
        self.identity, self.redact = identity or Identity.new(), redact
        self.joining = Join(name, protocol, about, instance, self.identity.key, workers=workers)
        self.patience_s = patience_s
        self.welcome: dict[str, Any] = {}
        self.welcome_frames: Frames = ()
        self.session = ""
        self.seq = self.round = 0
        self.have = -1
        """The version of the weights that the worker has; -1: none."""
        self.seat = self.confirmed = -1
        """`seat`: the worker's seat; `confirmed`: the last contribution that the coordinator confirmed with its seal. -1: none."""
        self.forgotten = ""
        """A warning to the user if the coordinator came back without contributions that it had confirmed."""
        self.place = (0, 0)
        """Epoch and batch up to which the worker has sent contributions, or from which the coordinator asked it to continue."""
        self.oldest = -1
        """The oldest version whose units still count, as far as the worker knows."""
        self.ready = False
        """Whether the worker is ready to receive weights. Until then it is a member that is still preparing."""
        self.done = self.stopping = self.left = False
        self.pending, self._claims, self._leaves = None, False, False
        self._reason = self._why_stopped = ""  # why the worker leaves before its time
        self._returns: list[GiveBack | Fail] = []
        self._number = self._beats = 0
        self._asking: WorkerRequest | None = None
        self._asked_at: float | None = None
        """When the request that is under way was first sent."""
        self._pause_s = FIRST_PAUSE_S

    @property
    def name(self) -> str:
        return self.joining.name or ""

    # --- what the worker wants ---------------------------------------------------------------------

    def contribute(self, made: Contribute, frames: Frames, pulls: bool) -> None:
        """Queue a contribution. Its numbers are filled in here. `pulls`: the answer should bring new weights."""
        asked = made._replace(seq=self.seq, round=self.round, have=self.have if pulls else -1)
        self.pending = _Pending(asked, frames)
        self.seq, self.round = self.seq + 1, self.round + 1
        if made.unit < 0:
            self.place = (made.epoch, made.position)

    def repeat_number(self) -> None:
        """Give the next contribution the last one's number: an earlier process of this worker sent it, and it was accepted."""
        self.seq = self.welcome["last_seq"]

    def contribute_for_relay(self, asked: Contribute, frames: Frames) -> None:
        """Queue a relay's combined contribution, under the number in its journal, which an earlier process may have sent already."""
        self.pending = _Pending(asked._replace(have=max(0, self.have)), frames)
        self.seq, self.place = max(self.seq, asked.seq + 1), (asked.epoch, asked.position)

    def claim(self) -> None:
        """Ask for a unit of the data."""
        self._claims = True

    def give_back(self, unit: int) -> None:
        self._returns.append(GiveBack("", 0, unit))

    def fail(self, unit: int, reason: str) -> None:
        self._returns.append(Fail("", 0, unit, self.redact(reason)[:LONGEST_REASON]))

    def leave(self, reason: str = "") -> None:
        """Leave the run. `reason`: reported to the run's owner if the worker cannot continue; else the one that `stop` was given."""
        self._leaves, self._reason = True, self.redact(reason or self._why_stopped)[:LONGEST_REASON]

    def stop(self, reason: str = "") -> None:
        """Prepare to leave: from now on the session does not wait for rounds to close. `reason`: reported to the run's owner."""
        self._why_stopped = reason or self._why_stopped
        self.stopping = True

    def farewell(self) -> Leave:
        """A message with which another thread leaves the run while this session's own request, or the computing, does not end. This
        session sends nothing afterwards."""
        self.left = True
        return Leave(self.session, self._number + 2, self.redact(self._why_stopped)[:LONGEST_REASON])

    def give_up(self) -> None:
        """Send no more requests: the coordinator does not answer, and the worker was asked to stop. Any thread may call this."""
        self.left = True

    @property
    def waits(self) -> bool:
        """Whether a request is under way."""
        return self._asked_at is not None

    # --- questions ---------------------------------------------------------------------------------

    def next_request(self, now: float) -> SessionRequest | None:
        """The next request, or the same one again if it was not answered; None: no request until the worker has something new."""
        asked, frames = self._next()
        if asked is None:
            return None
        self._asking = asked
        self._asked_at = now if self._asked_at is None else self._asked_at
        if isinstance(asked, Join):
            return SessionRequest(asked, (), min(ANSWER_S, max(0.1, self.patience_s)))
        self._number += 1
        addressed: Any = asked
        return SessionRequest(addressed._replace(session=self.session, number=self._number), frames, self._timeout_s(frames))

    def _next(self) -> tuple[WorkerRequest | None, Frames]:
        if self.left:
            return None, ()
        if not self.session:
            return (None if self._leaves else self.joining), ()
        if self._returns:
            return self._returns[0], ()
        if self._leaves:
            return Leave("", 0, self._reason), ()
        if self.experts and not self._holds:
            return Hold("", 0, self.experts), ()
        if self.have < 0:
            return (Pull("", 0, -1) if self.ready else None), ()
        if self.pending is not None:
            return self.pending.asked, self.pending.frames
        return (Claim("", 0, self.have) if self._claims else None), ()

    def _timeout_s(self, frames: Frames) -> float:
        """Timeout of a request. The answer may hold all weights, which takes long over a slow link, and a retry would make it longer."""
        if isinstance(self._asking, Leave):
            return ANSWER_S
        size = sum(len(frame) for frame in frames) + 4 * int(self.welcome.get("size", 0))
        return ANSWER_S + size / SLOWEST_LINK_BYTES_PER_S

    def heartbeat(self, state: str, figures: Mapping[str, float]) -> Heartbeat:
        """A heartbeat. It is sent over a connection of its own, outside the order of requests, and may be lost."""
        self._beats += 1
        return Heartbeat(self.session, self._beats, state, figures)

    def on_heartbeat_answer(self, header: Mapping[str, Any]) -> None:
        """Handle the answer to a heartbeat."""
        self.oldest = max(self.oldest, header.get("oldest", -1))
        self._note_end(header)
        self.notice = printable(str(header["word"])) if "word" in header else ""

    # --- answers -----------------------------------------------------------------------------------

    def on_no_answer(self, now: float, why: str) -> RetryPause:
        """Handle a missing answer. Raises ShoalError when the patience is used up."""
        if isinstance(self._asking, Join):
            self._join_anew()
        if self.left or isinstance(self._asking, Leave):
            self.left = True  # a coordinator that is gone need not know
            return RetryPause(0.0, "")
        waited_s = 0.0 if self._asked_at is None else now - self._asked_at
        if self.stopping and waited_s > _STOPPING_S:
            self.left = True
            return RetryPause(0.0, "")
        if waited_s > self.patience_s:
            raise SessionEndedError(f"the coordinator has not answered for {waited_s:.0f} s: {why}")
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        again = f"trying again for up to {self.patience_s:.0f} s"
        return RetryPause(pause_s, f"the coordinator does not answer ({why}); {again}" if pause_s >= _WORTH_A_WORD_S else "")

    def on_answer(self, header: Mapping[str, Any], frames: Frames = ()) -> list[SessionEvent]:
        """Handle the answer to the last request. Returns the resulting events."""
        asked, self._asking, self._asked_at, self._pause_s = self._asking, None, None, FIRST_PAUSE_S
        assert asked is not None, "an answer that was not asked for"
        if header["kind"] == "refused":
            return self._refused(asked, header)
        match asked:
            case Join():
                if header["kind"] != "challenge":
                    return self._welcomed(dict(header), frames)
                proof = self.identity.prove("join", self.name, header["nonce"])
                self.joining = asked._replace(nonce=header["nonce"], proof=proof)
            case Pull():
                self.round = header["version"]
                return [self._news(header, frames), *self._moved(header)]
            case Contribute():
                return self._receipt(header, frames)
            case Claim():
                return self._leased(header, frames)
            case GiveBack() | Fail():
                self._returns.pop(0)
            case Hold():
                self._holds, self.size = True, int(header["size"])
            case _:
                self.left = True
        return []

    def _join_anew(self) -> None:
        """Start joining again: each proof is valid once, so another attempt needs a new challenge."""
        self.joining = self.joining._replace(nonce="", proof="")

    def _refused(self, asked: WorkerRequest, header: Mapping[str, Any]) -> list[SessionEvent]:
        reason = header.get("reason")
        self._join_anew()
        if isinstance(asked, Leave) or (reason == "unknown-session" and self.stopping):
            self.left = True  # the worker is about to leave: it must not join a restarted coordinator and take another worker's seat
        elif reason == "unknown-session":
            self.session = ""
            self._returns.clear()  # the coordinator that lent the units has forgotten them
        elif reason == "misplaced":
            self.session, self.pending, self.seat, self.seq = "", None, -1, 0  # the welcome says where to go on, and with which number
        elif reason not in _ASK_AGAIN:
            refusal = SessionEndedError(f"the coordinator refused: {printable(str(header.get('detail') or reason))}")
            refusal.reason = str(reason)
            raise refusal
        return []

    def _welcomed(self, header: dict[str, Any], frames: Frames) -> list[SessionEvent]:
        """Take the assigned place in the data: the worker's former one, unless another worker took it meanwhile. A contribution that the
        coordinator had not accepted is sent again, unless other workers learned from that data."""
        if not is_worker_name(header["name"]):
            raise SessionEndedError("the coordinator gave this worker a name that is none")
        self.welcome, self.welcome_frames, self.session, self.until = header, frames, header["session"], header.get("until")
        self._holds = False
        same, self.joining = header["name"] == self.name, self.joining._replace(name=header["name"], nonce="", proof="")
        if same and header["last_seq"] < self.confirmed:
            self.forgotten = (
                f"warning: the coordinator confirmed contribution {self.confirmed} of {self.name}, and has come back without it: records "
                "of its journal are gone. `shoal audit --receipts` proves that with what this worker wrote down, if it did"
            )
        place, sent = (header["epoch"], header["position"]), self.pending
        taken = sent is not None and sent.asked.seq == header["last_seq"]
        present = self.place if sent is None or taken else (sent.asked.epoch, sent.asked.position - sent.asked.batches)
        moved = self.seat != header["seat"] or place > present
        self.seq = max(self.seq, header["last_seq"] + 1)
        if sent is not None and taken:
            sent.frames = ()  # its round may still be open: ask for it again, as if nothing had happened
        else:
            self.have = -1
            self.pending = None if moved and sent is not None and sent.asked.unit < 0 else sent
        if not moved:
            return []
        self.seat, self.place = header["seat"], place
        return [SeatAssigned(self.seat, *place)]

    def _news(self, header: Mapping[str, Any], frames: Frames) -> RunNews:
        afresh = self.have < 0
        if "weights" in header:
            self.have = header["version"]
            if self.pending is not None and self.pending.asked.have >= 0:
                self.pending.asked = self.pending.asked._replace(have=self.have)
        self._note_end(header)
        return RunNews(header, frames, afresh)

    def _note_end(self, header: Mapping[str, Any]) -> None:
        if header.get("done"):
            self.done, self.outcome = True, str(header.get("outcome", ""))

    def _receipt(self, header: Mapping[str, Any], frames: Frames) -> list[SessionEvent]:
        sent, status = self.pending, header["status"]
        assert sent is not None
        if status == "wait" and not self.stopping:  # it was taken; ask again when its round has closed, without sending it again
            sent.frames = ()
            return []
        status = "accepted" if status == "wait" else status
        self.pending = None
        number = sent.asked.round
        self.round = header["round"] if status == "ahead" else max(number + (status == "accepted"), header["round"])
        if header.get("seal"):
            self.confirmed = sent.asked.seq
        proof = str(header.get("digest", "")), str(header.get("seal", ""))
        receipt = ContributionReceipt(sent.asked, status, header["version"], header["seq"], *proof)
        return [receipt, self._news(header, frames), *self._moved(header)]

    def _moved(self, header: Mapping[str, Any]) -> list[SessionEvent]:
        """Move to another place in the data if the coordinator assigned one: the worker's task is done, or was given to another worker."""
        self.until = header.get("until")
        if header.get("seat", self.seat) == self.seat:
            return []
        self.seat, self.place = header["seat"], (header["epoch"], header["position"])
        return [SeatAssigned(self.seat, *self.place)]

    def _leased(self, header: Mapping[str, Any], frames: Frames) -> list[SessionEvent]:
        news, self._claims = self._news(header, frames), False
        if header["unit"] < 0:
            return [news]
        unit = LeasedUnit(header["unit"], header["version"], header["epoch"], header["start"], header["batches"], header.get("given", {}))
        return [news, unit]
