"""What an earlier version of the coordinator did, event by event, under hostile schedules: this one does the same.

`traces.json.gz` holds 50 seeded schedules with every strategy: each event and the effects that it had. It was recorded before strategies
became policies with methods, so it tells whether that changed what they do.

Three things were changed on purpose since then. A later contribution of a worker does not replace its earlier one in the same round any
more: both count. So a trace is compared up to the first event that replaced one, which four of them have. Under async, contributions of
one worker now fill a round where they are averaged; where a rule compares them a round waits for different workers, as it always did, so
that is what is replayed here. And the record of a round that closed names its contributions by worker and number.

Since then, too, a worker proves its key before it is let in, and the record of its seat names the key. The traces know nothing of that:
here each recorded joining is two messages, and the key is left out of what is compared.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.schema.strategy import Async, DiLoCo, Edp, SyncPs, WorkUnits
from shoal.config.schema.updates import Updates
from shoal.coordinator import Coordinator
from shoal.coordinator.effects import Effect, Issue, LedgerEntry, Note, Persist, Published, Reply
from shoal.coordinator.state import (
    Event,
    LeaseResult,
    RequestReceived,
    RunConcluded,
    RunPlan,
    ServingStarted,
    Tick,
    UnusableResult,
    former_key_of,
    key_of,
)
from shoal.coordinator.units.cut import DataCut
from shoal.protocol import messages
from tests.support.small_cluster import Numbers, believing, nameplate, strategy_of

TRACES: list[dict[str, Any]] = json.loads(gzip.decompress((Path(__file__).parent / "traces.json.gz").read_bytes()))
SETTINGS = {"syncps": SyncPs, "edp": Edp, "async": Async, "diloco": DiLoCo, "workunits": WorkUnits}
ASKED = {name.lower(): getattr(messages, name) for name in ("Join", "Leave", "Heartbeat", "Pull", "Contribute", "Delivered", "Failed")}


def digests(frames: Any) -> list[str]:
    return [hashlib.sha1(bytes(frame)).hexdigest()[:12] for frame in frames]


def plain(effect: Effect) -> Any:
    match effect:
        case Reply():
            said: list[Any] = ["reply", effect.caller, dict(effect.header), digests(effect.frames)]
        case Persist():
            said = ["persist", {name: value for name, value in effect.record.items() if name != "key"}, digests(effect.frames)]
        case LedgerEntry():
            said = ["entry", effect.line]
        case Published():
            said = ["published", effect.version, dict(effect.metrics), effect.weight, effect.samples, effect.batches]
        case Issue():
            said = ["issue", effect.version, list(effect.units)]
        case Note():
            said = ["note", effect.text]
        case _:
            said = ["stop", effect.reason]
    return json.loads(json.dumps(said))


def asked_of(header: dict[str, Any]) -> Any:
    fields = {name: value for name, value in header.items() if name != "kind"}
    if header["kind"] == "join":
        fields |= {"protocol": messages.PROTOCOL, "key": nameplate(header["name"]).key}
    return ASKED[header["kind"]](**fields)


def event_of(recorded: dict[str, Any]) -> Event:
    frames = tuple(bytes.fromhex(frame) for frame in recorded.get("frames", ()))
    if recorded["kind"] == "called":
        return RequestReceived(recorded["caller"], asked_of(recorded["asked"]), frames, recorded["session"])
    return LeaseResult(asked_of(recorded["asked"]), frames, recorded["more"]) if recorded["kind"] == "passed" else Tick()


class Replayed:
    """The coordinator of a trace, with a disk that survives it."""

    def __init__(self, trace: dict[str, Any]) -> None:
        settings = dict(trace["settings"])
        polyak = settings.pop("polyak_alpha", None)
        made = SETTINGS[settings["kind"]](**settings)
        self.strategy = strategy_of(made, trace.get("policy_expected", 1), polyak_alpha=polyak)
        if settings["kind"] == "async":
            self.strategy = replace(self.strategy, rounds=replace(self.strategy.rounds, different=True))
        self.former_names: dict[tuple[str, int], str] = {}
        cut, workers = DataCut(*trace["cut"]) if "cut" in trace else None, trace["workers"]
        per_step = trace.get("batches_per_step", 8 * workers)
        # The earlier version tried a unit once more than `max_retries` says.
        self.plan = RunPlan(
            Updates(), 0, workers, trace["needed"], trace["steps"], trace.get("batches"), per_step, 5.0, 0.5, cut, 60.0, 4, True
        )
        self.coordinator = believing(Coordinator(self.plan, self.strategy, Numbers(2)))
        self.snapshot()

    def snapshot(self) -> None:
        coordinator = self.coordinator
        self.journal = [(dict(record), tuple(bytes(frame) for frame in frames)) for record, frames in coordinator.pending()]
        state = json.loads(json.dumps({key: value for key, value in coordinator.state_dict().items() if key in ("state", "settled")}))
        self.saved = state | {"centre": None, "memories": {}, "vector": coordinator.learner.vector.clone()}

    def crash(self) -> None:
        self.coordinator = believing(Coordinator(self.plan, self.strategy, Numbers(2)))
        self.coordinator.learner.vector.copy_(self.saved["vector"])
        self.coordinator.load_state_dict(copy.deepcopy(self.saved))
        for record, frames in self.journal:
            self.coordinator.replay(dict(record), frames)

    def happen(self, event: Event, now: float, carried: int | None = None) -> list[Any]:
        effects = self.coordinator.handle(self._proved(event), now)
        for effect in effects if carried is None else effects[:carried]:
            if isinstance(effect, Persist):
                self.journal.append((dict(effect.record), tuple(bytes(frame) for frame in effect.frames)))
        return [plain(self._as_formerly(effect)) for effect in effects]

    def _as_formerly(self, effect: Effect) -> Effect:
        """The effect with the names that the record of a closed round had for its contributions."""
        record = effect.record if isinstance(effect, Persist) else {}
        if record.get("kind") == "accepted":
            self.former_names[key_of(record)] = former_key_of(record)
        if record.get("kind") != "closed":
            return effect
        names = [self.former_names[worker, seq] for worker, seq in record["contributions"]]
        return Persist({"kind": "closed", "round": record["round"], "workers": names})

    def _proved(self, event: Event) -> Event:
        if not isinstance(event, RequestReceived) or not isinstance(event.asked, messages.Join):
            return event
        nonce = self.coordinator.door.challenge(event.session, 1e9)["nonce"]
        return event._replace(asked=event.asked._replace(nonce=nonce, proof="0" * 128))


def replaces(entry: dict[str, Any]) -> bool:
    return any(effect[0] == "entry" and "replaced" in effect[1] for effect in entry.get("effects", ()))


@pytest.mark.parametrize("number", range(len(TRACES)), ids=[f"{trace['name']} {number}" for number, trace in enumerate(TRACES)])
def test_the_coordinator_does_what_it_did(number: int) -> None:
    trace = TRACES[number]
    replayed, now = Replayed(trace), 0.0
    for at, entry in enumerate(trace["log"]):
        now = entry.get("now", now)
        if replaces(entry):
            return
        if "snapshot" in entry:
            replayed.snapshot()
        elif "crash" in entry:
            replayed.crash()
            assert replayed.coordinator.state.version == entry["version"], at
            assert replayed.coordinator.learner.vector.tolist() == pytest.approx(entry["weights"]), at
        elif "offer" in entry:
            assert replayed.happen(ServingStarted(), now) == [["issue", *entry["offer"]]]
        else:
            if any(effect[0] == "note" and "given up" in effect[1] and "no result in time" not in effect[1] for effect in entry["effects"]):
                return  # the earlier version counted results that could not be used; now the database does, where it counts the rest
            event = (
                event_of(entry["event"]) if "event" in entry else UnusableResult(*entry["spoil"]) if "spoil" in entry else RunConcluded()
            )
            assert replayed.happen(event, now, entry.get("carried")) == entry["effects"], at
    assert torch.allclose(replayed.coordinator.learner.vector, torch.tensor(trace["weights"]))


def test_the_traces_are_as_hard_as_they_claim() -> None:
    events = [entry for trace in TRACES for entry in trace["log"]]
    kinds = {effect[0] for entry in events for effect in entry.get("effects", ())}
    assert kinds >= {"reply", "persist", "entry", "published", "issue", "note"}
    assert sum("crash" in entry for entry in events) > 200
    assert sum(any(map(replaces, trace["log"])) for trace in TRACES) == 4
