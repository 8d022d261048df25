"""Commands of the run's owner: show the status, pause, resume, stop, evict or readmit a worker.

The sender proves with a signature of the coordinator's challenge that it has the owner's key, so a recorded command cannot be replayed.
A pause and an eviction are records: they still hold after the coordinator was killed and restarted.
"""

from __future__ import annotations

from typing import Any

from shoal.coordinator.effects import Dismiss, Note, Reply
from shoal.coordinator.events import RequestReceived
from shoal.coordinator.members.authentication import Authenticator
from shoal.coordinator.members.lifecycle import MemberLifecycle
from shoal.coordinator.members.table import MemberTable
from shoal.coordinator.run_plan import RunPlan
from shoal.coordinator.turn import Turn
from shoal.protocol.messages import OwnerCommand

_MOST_LISTED = 20


class OwnerCommands:
    """Checks that a command comes from the owner, and carries it out."""

    def __init__(self, plan: RunPlan, authenticator: Authenticator, members: MemberTable, lifecycle: MemberLifecycle) -> None:
        self.plan, self.authenticator, self.members, self.lifecycle = plan, authenticator, members, lifecycle
        self.stops = False
        """Whether the owner asked to end the run early and save it, as an interrupt does."""

    def handle(self, turn: Turn, event: RequestReceived, asked: OwnerCommand) -> None:
        """Carry out a command with a valid proof. A command without one is answered with a challenge to sign."""
        if not self.plan.owner_key or asked.key != self.plan.owner_key:
            return turn.refuse(event.caller, "unproved", "orders are taken from the run's owner alone, who has its owner.json")
        if not asked.proof:
            return turn.emit(Reply(event.caller, self.authenticator.challenge(event.session, turn.now)))
        _, refusal = self.authenticator.check_proof(asked, f"order {asked.action}", None, turn.now, event.address)
        if refusal.reason:
            return turn.refuse(event.caller, *refusal)
        return self._carry_out(turn, event.caller, asked)

    def _carry_out(self, turn: Turn, caller: Any, asked: OwnerCommand) -> None:
        match asked.action:
            case "status":
                turn.emit(Reply(caller, {"kind": "status"}))
            case "pause" | "resume":
                self._pause(turn, caller, asked.action == "pause")
            case "stop":
                self.stops = True
                _confirm(turn, caller, "the owner ends the run: it is saved, and can go on later")
            case _:
                self._evict(turn, caller, asked.name or "", asked.action == "evict")

    def _pause(self, turn: Turn, caller: Any, paused: bool) -> None:
        if turn.state.paused == paused:
            text = "the run is paused already" if paused else "the run is not paused"
            return turn.emit(Reply(caller, {"kind": "done", "text": text}))
        turn.record({"kind": "paused", "paused": paused})
        turn.release_held = not paused
        return _confirm(turn, caller, "the owner pauses the run: workers wait" if paused else "the owner lets the run go on")

    def _evict(self, turn: Turn, caller: Any, name: str, out: bool) -> None:
        """Keep a worker out by its name and its key, or let it in again. Contributions that were accepted from it stay."""
        known = turn.state.seats if out else turn.state.evicted
        if name not in known and not (self.plan.leased_elsewhere and out):
            listed = ", ".join(sorted(self.members.by_name if out else turn.state.evicted)[:_MOST_LISTED]) or "no workers"
            return turn.refuse(caller, "unknown-worker", f"there is no worker {name} to {'keep out' if out else 'let in'}; {listed}")
        turn.record({"kind": "evicted", "worker": name, "out": out})
        self.lifecycle.remove_by_name(turn, name, "is shown out by the owner")
        if self.plan.leased_elsewhere:
            turn.emit(Dismiss(name, out))
        return _confirm(turn, caller, f"the owner keeps {name} out" if out else f"the owner lets {name} in again")


def _confirm(turn: Turn, caller: Any, text: str) -> None:
    turn.emit(Note(text), Reply(caller, {"kind": "done", "text": text}))
