"""What the run's owner wants: to look at the run from elsewhere, hold it up, let it go on, end it, keep a worker out.

An order is an event like any other. Whoever gives one has the owner's key, and signs the coordinator's challenge with it, so an order that
was recorded on its way orders nothing. A run that is held up, and a worker that is kept out, are records: they stay so when the coordinator
is killed and comes back.
"""

from __future__ import annotations

from typing import Any, Protocol

from shoal.coordinator.effects import Dismiss, Effect, Note, Reply
from shoal.coordinator.members.authentication import Authenticator
from shoal.coordinator.members.table import MemberTable
from shoal.coordinator.state import RequestReceived, RunPlan, State
from shoal.protocol.messages import Order


class Host(Protocol):
    """The coordinator that is given orders."""

    plan: RunPlan
    door: Authenticator
    members: MemberTable
    now: float

    @property
    def state(self) -> State: ...
    def emit(self, *effects: Effect) -> None: ...
    def record(self, record: dict[str, Any]) -> None: ...
    def refuse(self, caller: Any, reason: str, detail: str = "") -> None: ...
    def lose(self, name: str, why: str) -> None: ...
    def go_on(self) -> None: ...


class OwnerCommands:
    """Hears orders, and has them obeyed."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.stops = False
        """Whether the run is to end before its time, saved, as when it is interrupted."""

    def hear(self, event: RequestReceived, asked: Order) -> None:
        """Obey where whoever asks proves to be the owner. The first answer is what to sign."""
        host = self.host
        if not host.plan.owner_key or asked.key != host.plan.owner_key:
            return host.refuse(event.caller, "unproved", "orders are taken from the run's owner alone, who has its owner.json")
        if not asked.proof:
            return host.emit(Reply(event.caller, host.door.challenge(event.session, host.now)))
        _, refusal = host.door.check(asked, f"order {asked.action}", None, host.now, event.address)
        if refusal.reason:
            return host.refuse(event.caller, *refusal)
        return self._obey(event.caller, asked)

    def _obey(self, caller: Any, asked: Order) -> None:
        match asked.action:
            case "status":
                self.host.emit(Reply(caller, {"kind": "status"}))
            case "pause" | "resume":
                self._hold_up(caller, asked.action == "pause")
            case "stop":
                self.stops = True
                self._done(caller, "the owner ends the run: it is saved, and can go on later")
            case _:
                self._keep_out(caller, asked.name or "", asked.action == "evict")

    def _done(self, caller: Any, text: str) -> None:
        self.host.emit(Note(text), Reply(caller, {"kind": "done", "text": text}))

    def _hold_up(self, caller: Any, paused: bool) -> None:
        host = self.host
        if host.state.paused == paused:
            return host.emit(Reply(caller, {"kind": "done", "text": "the run is paused already" if paused else "the run is not paused"}))
        host.record({"kind": "paused", "paused": paused})
        if not paused:
            host.go_on()
        return self._done(caller, "the owner pauses the run: workers wait" if paused else "the owner lets the run go on")

    def _keep_out(self, caller: Any, name: str, out: bool) -> None:
        """A worker is kept out by its name and by its key. What was accepted of it stays."""
        host = self.host
        known = host.state.seats if out else host.state.evicted
        if name not in known and not (host.plan.leased_elsewhere and out):
            here = ", ".join(sorted(host.members.by_name if out else host.state.evicted)[:20]) or "nobody"
            return host.refuse(caller, "unknown-worker", f"there is no worker {name} to {'keep out' if out else 'let in'}; {here}")
        host.record({"kind": "evicted", "worker": name, "out": out})
        host.lose(name, "is shown out by the owner")
        if host.plan.leased_elsewhere:
            host.emit(Dismiss(name, out))
        return self._done(caller, f"the owner keeps {name} out" if out else f"the owner lets {name} in again")
