"""Authentication of joining workers: a name belongs to the first key that joined with it.

A client first gets a nonce to sign, valid once and for a minute, so that a recorded or late answer is worthless. The nonce carries its time
under a MAC, so challenges take no memory however many clients ask. Newcomers and proofs (checking one takes milliseconds) have rate limits;
one address group gets at most three quarters of each, so a crowd at one address does not keep out workers from elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from typing import NamedTuple

from shoal.coordinator.members.table import Member, MemberTable
from shoal.coordinator.run_plan import MemberLimits
from shoal.coordinator.state import State
from shoal.protocol.address_groups import address_group
from shoal.protocol.identities import is_proved
from shoal.protocol.messages import Gone, Join, OwnerCommand
from shoal.protocol.worker_names import with_ending

_NONCE_S = 60.0
_MOST_ADDRESSES = 1024
_SHARE_OF_AN_ADDRESS = 3 / 4
_PROOFS_PER_S, _PROOFS_AT_ONCE = 50.0, 500.0
NOTES_PER_S, NOTES_AT_ONCE = 1.0, 200.0
"""Rate limit on notes for the user that workers cause; notes beyond it are counted."""
UNUSED_S = 600.0
"""Time after which a name without any accepted contribution is forgotten, once its worker has left."""


class JoinRefusal(NamedTuple):
    """Why a worker may not join; an empty reason: it may."""

    reason: str = ""
    detail: str = ""


_NOTHING = JoinRefusal()
_TOO_LATE = JoinRefusal("unknown-nonce", "this answers no question of the coordinator's, or came too late")


class TokenBucket:
    """Rate limit: `per_second` on average, bursts of at most `at_once`."""

    def __init__(self, per_second: float, at_once: float) -> None:
        self.per_second, self.at_once = per_second, at_once
        self._left, self._since = at_once, 0.0

    def take(self, now: float) -> bool:
        self._left = min(self.at_once, self._left + (now - self._since) * self.per_second)
        self._since = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class FairTokenBucket:
    """Rate limit shared by all addresses, of which one address group may use at most its share. Unknown addresses count as one group."""

    def __init__(self, per_second: float, at_once: float) -> None:
        self._all = TokenBucket(per_second, at_once)
        self._of: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, address: str, now: float) -> bool:
        address = address_group(address)
        share = _SHARE_OF_AN_ADDRESS if address else 1.0
        own = self._of.pop(address, None) or TokenBucket(share * self._all.per_second, max(1.0, share * self._all.at_once))
        self._of[address] = own
        if len(self._of) > _MOST_ADDRESSES:
            self._of.popitem(last=False)
        return own.take(now) and self._all.take(now)


class Authenticator:
    """Challenges, proofs, names and admission. It reads the replayed state and never changes it."""

    def __init__(self, members: MemberTable, bounds: MemberLimits) -> None:
        self.members, self.bounds = members, bounds
        self.is_proved = is_proved
        self._secret = b""
        """MAC key of challenges: the first unguessable session word."""
        self._challenges = 0
        self._answered: OrderedDict[int, float] = OrderedDict()
        """Challenges of the last minute that were answered correctly, and when."""
        self._newcomers = FairTokenBucket(bounds.joins_per_minute / 60, bounds.joins_per_minute)
        self._proofs = FairTokenBucket(_PROOFS_PER_S, _PROOFS_AT_ONCE)
        self._gone: OrderedDict[str, float] = OrderedDict()
        """Names without an accepted contribution whose workers have left, and when."""

    # --- proofs --------------------------------------------------------------------------------------

    def challenge(self, word: str, now: float) -> dict[str, str]:
        """A nonce to sign. `word`: an unguessable string."""
        self._secret = self._secret or word.encode()
        self._challenges += 1
        return {"kind": "challenge", "nonce": self._sealed(f"{self._challenges}-{int(1000 * now)}")}

    def _sealed(self, text: str) -> str:
        return f"{text}-{hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()[:32]}"

    def _parse(self, nonce: str) -> tuple[int, float]:
        """Number and time of a challenge; number 0: the nonce is not this coordinator's."""
        text = nonce.rpartition("-")[0]
        if not self._challenges or not hmac.compare_digest(self._sealed(text).encode(), nonce.encode()):
            return 0, 0.0
        number, at = text.split("-")
        return int(number), int(at) / 1000

    def check_proof(
        self, asked: Join | Gone | OwnerCommand, purpose: str, before: Member | None, now: float, address: str = ""
    ) -> tuple[int, JoinRefusal]:
        """The number of the answered challenge, and why the answer is refused. `before`: the worker that has the name now, if known."""
        number, issued_at = self._parse(asked.nonce)
        if not number or now - issued_at > _NONCE_S or number in self._answered:
            return 0, _TOO_LATE
        if (refusal := self.check_newer(number, before)).reason:
            return 0, refusal
        if not self._proofs.take(address, now):
            return 0, JoinRefusal("too-fast", "too many workers come at once; trying again")
        if not self.is_proved(asked.key, purpose, asked.name or "", asked.nonce, asked.proof):
            return 0, JoinRefusal("unproved", "the signature does not fit the worker's key")
        self._answered[number] = now
        while now - next(iter(self._answered.values())) > _NONCE_S + 1:
            self._answered.popitem(last=False)
        return number, JoinRefusal()

    def check_newer(self, number: int, before: Member | None) -> JoinRefusal:
        """Refuse the answer to a challenge older than that of the worker `before` that has the name now: its process was replaced."""
        return _TOO_LATE if before is not None and number < before.challenge else _NOTHING

    # --- names ---------------------------------------------------------------------------------------

    def name_for(self, asked: Join, state: State) -> str:
        """The requested name, or with a number appended if the name belongs to another key."""
        wanted, number = asked.name or self.members.free_name(), 1
        name = wanted
        while state.keys.get(name, asked.key) != asked.key:
            number += 1
            name = with_ending(wanted, f"-{number}")
        return name

    def check_guest(self, guest: str) -> JoinRefusal:
        """Refuse a guest whose invitation was withdrawn; its connection may be older than that."""
        if not guest or guest in self.bounds.guests:
            return _NOTHING
        return JoinRefusal("withdrawn", f"the invitation of {guest} was withdrawn")

    def check_admission(self, name: str, key: str, guest: str, state: State, now: float, address: str = "") -> JoinRefusal:
        """Refuse a worker of this name and key that is evicted or in quarantine, or that exceeds a limit."""
        if name in state.evicted or (state.evicted and key in state.evicted.values()):
            return JoinRefusal("evicted", f"the run's owner keeps {name} out")
        if name in self.members.by_name:
            return JoinRefusal()
        if (until := self.members.quarantined.get(name, now)) > now:
            return JoinRefusal("quarantined", f"{name} failed what others manage, and may come back in {until - now:.0f} s")
        if name not in state.sequences and (until := self.members.quarantined_guests.get(guest, now)) > now:
            detail = f"a worker of {guest} failed what others manage: newcomers on that invitation may come in {until - now:.0f} s"
            return JoinRefusal("quarantined", detail)
        if not self.members.has_room_for(name):
            return JoinRefusal("full", "the coordinator has as many workers as it can take")
        most = self.bounds.guests.get(guest) if guest else None
        if most is not None and self.members.guests[guest] >= most:
            return JoinRefusal("full", f"the invitation of {guest} is for {most} workers at a time, and they are here")
        if name not in state.sequences and not self._newcomers.take(address, now):
            return JoinRefusal(
                "too-fast", f"more than {self.bounds.joins_per_minute} workers a minute come for the first time; trying again"
            )
        return JoinRefusal()

    # --- unused names ----------------------------------------------------------------------------------

    def restore(self, state: State, now: float) -> None:
        """After a restart: names without a contribution whose workers do not come back are forgotten after a while."""
        self._gone = OrderedDict((name, now) for name in state.seats if name not in state.sequences)

    def on_left(self, name: str, state: State, now: float) -> None:
        """Note that a worker has left."""
        if name not in state.sequences:
            self._gone.pop(name, None)
            self._gone[name] = now

    def next_unused_name(self, state: State, now: float) -> str | None:
        """A name to forget: its worker left long ago, and none of its contributions was ever accepted."""
        while self._gone:
            name, since = next(iter(self._gone.items()))
            if now - since < UNUSED_S:
                return None
            del self._gone[name]
            if name in state.seats and name not in state.sequences and name not in self.members.by_name:
                return name
        return None
