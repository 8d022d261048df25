"""Who may join, and under which name: a name belongs to the key that brought it.

Whoever asks is first given a word to sign, which is good for one time and for a minute, so that a recorded or late answer opens nothing.
The word itself says when it was given, sealed with a key that only the coordinator has: however many ask for one, nobody's is forgotten.
Newcomers come at a bounded rate, and so do proofs, since to check one takes milliseconds: a crowd at the door costs those who are in
nothing, and leaves no trace. One address has three quarters of each rate, so a crowd at one does not keep out who comes from elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from typing import NamedTuple

from shoal.coordinator.members.table import Member, MemberTable
from shoal.coordinator.state import MemberLimits, State
from shoal.protocol.address_groups import household
from shoal.protocol.identities import is_proved
from shoal.protocol.messages import LONGEST_NAME, Gone, Join, Order

_NONCE_S = 60.0
_MOST_ADDRESSES = 1024
_SHARE_OF_AN_ADDRESS = 3 / 4
_PROOFS_PER_S, _PROOFS_AT_ONCE = 50.0, 500.0
UNUSED_S = 600.0
"""A name under which nothing was ever accepted is forgotten so long after its worker went."""


class JoinRefusal(NamedTuple):
    """Why somebody is not let in. An empty reason: nothing speaks against it."""

    reason: str = ""
    detail: str = ""


_NOTHING = JoinRefusal()
_TOO_LATE = JoinRefusal("unknown-nonce", "this answers no question of the coordinator's, or came too late")


class TokenBucket:
    """So many a second, and so many at once after a pause."""

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
    """A bucket for all, of which no address empties more than its share. Those that came last are known; nobody's address is one, too."""

    def __init__(self, per_second: float, at_once: float) -> None:
        self._all = TokenBucket(per_second, at_once)
        self._of: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, address: str, now: float) -> bool:
        address = household(address)
        share = _SHARE_OF_AN_ADDRESS if address else 1.0
        own = self._of.pop(address, None) or TokenBucket(share * self._all.per_second, max(1.0, share * self._all.at_once))
        self._of[address] = own
        if len(self._of) > _MOST_ADDRESSES:
            self._of.popitem(last=False)
        return own.take(now) and self._all.take(now)


class Authenticator:
    """Asks who is there. It looks at the state and never changes it."""

    def __init__(self, members: MemberTable, bounds: MemberLimits) -> None:
        self.members, self.bounds = members, bounds
        self.is_proved = is_proved
        self._secret = b""
        """What challenges are sealed with: the first word that nobody could guess."""
        self._challenges = 0
        self._answered: OrderedDict[int, float] = OrderedDict()
        """Challenges of the last minute that were answered well, and when."""
        self._newcomers = FairTokenBucket(bounds.joins_per_minute / 60, bounds.joins_per_minute)
        self._proofs = FairTokenBucket(_PROOFS_PER_S, _PROOFS_AT_ONCE)
        self._gone: OrderedDict[str, float] = OrderedDict()
        """Names without a contribution whose workers are gone, and since when."""

    # --- proofs --------------------------------------------------------------------------------------

    def challenge(self, word: str, now: float) -> dict[str, str]:
        """Ask for a signature. `word`: one that nobody could guess."""
        self._secret = self._secret or word.encode()
        self._challenges += 1
        return {"kind": "challenge", "nonce": self._sealed(f"{self._challenges}-{int(1000 * now)}")}

    def _sealed(self, text: str) -> str:
        return f"{text}-{hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()[:32]}"

    def _given(self, nonce: str) -> tuple[int, float]:
        """Which challenge this was, and when; the number 0: none."""
        text = nonce.rpartition("-")[0]
        if not self._challenges or not hmac.compare_digest(self._sealed(text).encode(), nonce.encode()):
            return 0, 0.0
        number, at = text.split("-")
        return int(number), int(at) / 1000

    def check(
        self, asked: Join | Gone | Order, purpose: str, before: Member | None, now: float, address: str = ""
    ) -> tuple[int, JoinRefusal]:
        """Which challenge was answered, and what speaks against the answer. `before`: the worker that has the name now, where that is known
        already. `address`: where the answer comes from, if that is known."""
        number, given_at = self._given(asked.nonce)
        if not number or now - given_at > _NONCE_S or number in self._answered:
            return 0, _TOO_LATE
        if (refusal := self.compare(number, before)).reason:
            return 0, refusal
        if not self._proofs.take(address, now):
            return 0, JoinRefusal("too-fast", "too many workers come at once; trying again")
        if not self.is_proved(asked.key, purpose, asked.name or "", asked.nonce, asked.proof):
            return 0, JoinRefusal("unproved", "the signature does not fit the worker's key")
        self._answered[number] = now
        while now - next(iter(self._answered.values())) > _NONCE_S + 1:
            self._answered.popitem(last=False)
        return number, JoinRefusal()

    def compare(self, number: int, before: Member | None) -> JoinRefusal:
        """What speaks against the answer to a challenge, where a worker has the name now: an answer to an older one than its own comes from
        a process that it has replaced."""
        return _TOO_LATE if before is not None and number < before.challenge else _NOTHING

    # --- names ---------------------------------------------------------------------------------------

    def name_for(self, asked: Join, state: State) -> str:
        """The name that was asked for, or the next one like it where that belongs to somebody else."""
        wanted, number = asked.name or self.members.free_name(), 1
        name = wanted
        while state.keys.get(name, asked.key) != asked.key:
            number += 1
            ending = f"-{number}"
            name = wanted[: LONGEST_NAME - len(ending)] + ending
        return name

    def welcomes(self, guest: str) -> JoinRefusal:
        """What speaks against hearing somebody at all: a connection may be older than the word that its guest is welcome no longer."""
        if not guest or guest in self.bounds.guests:
            return _NOTHING
        return JoinRefusal("withdrawn", f"the invitation of {guest} was withdrawn")

    def admit(self, name: str, key: str, guest: str, state: State, now: float, address: str = "") -> JoinRefusal:
        """What speaks against letting one more worker of this name, with this key, in."""
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

    # --- names that are not used ---------------------------------------------------------------------

    def recall(self, state: State, now: float) -> None:
        """Of a state that was read: whoever does not come back is forgotten after a while."""
        self._gone = OrderedDict((name, now) for name in state.seats if name not in state.sequences)

    def leave(self, name: str, state: State, now: float) -> None:
        if name not in state.sequences:
            self._gone.pop(name, None)
            self._gone[name] = now

    def forgettable(self, state: State, now: float) -> str | None:
        """A name that nobody uses: its worker went long ago, and nothing of it was ever accepted."""
        while self._gone:
            name, since = next(iter(self._gone.items()))
            if now - since < UNUSED_S:
                return None
            del self._gone[name]
            if name in state.seats and name not in state.sequences and name not in self.members.by_name:
                return name
        return None
