"""Checks what a run has left behind: that nothing confirmed is missing, and nothing is counted twice.

It shares no code with what wrote the files: it reads them again, in its own way. A crash may have cut off the last line or record of a
file that was being written; that is no violation, anything else that cannot be read is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from shoal.coordinator.audit.files import AuditInput, Line, digest_of
from shoal.coordinator.audit.units import UnitAudit

Key = tuple[str, int]
"""A worker, and the number of a contribution."""
_MOST_CLAIMS = 5
_MAKE_VERSIONS = ("closed", "adopted")
"""Records of a journal after each of which there is a new version."""


class LedgerContribution(NamedTuple):
    """A contribution, as a line of the ledger tells it."""

    worker: str
    seq: int
    base: int
    share: float
    samples: int
    seat: int
    epoch: int
    position: int
    batches: int
    experts: tuple[int, ...] = ()
    """Those of a mixture that it is of; none: all of them."""

    @property
    def key(self) -> Key:
        return self.worker, self.seq

    @property
    def line(self) -> list[Any]:
        """As the ledger has it."""
        return [*self[:-1], list(self.experts)] if self.experts else [*self[:-1]]

    @classmethod
    def of(cls, values: Iterable[Any]) -> LedgerContribution:
        """Raises TypeError where the values are not what they must be."""
        made = cls(*values)
        made = made._replace(experts=tuple(made.experts))
        numbers = made[1:3] + made[4:-1] + made.experts
        if type(made.worker) is not str or type(made.share) not in (int, float) or any(type(number) is not int for number in numbers):
            raise TypeError
        return made

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> LedgerContribution:
        """Of a record of the journal."""
        return cls.of([*(record[name] for name in cls._fields[:-1]), record.get("experts", ())])


@dataclass
class AuditReport:
    """What was checked, and what is wrong."""

    checked: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


@dataclass
class LedgerTotals:
    """The ledger, added up."""

    first: int = 0
    version: int = 0
    batches: int = 0
    samples: int = 0
    known: dict[Key, LedgerContribution] = field(default_factory=dict)
    fates: Counter[str] = field(default_factory=Counter)
    """How many are in the weights, found the run over, or were replaced by a later one, as earlier versions did."""
    made: dict[Key, int] = field(default_factory=dict)
    """Which version each is in."""
    newest: dict[str, int] = field(default_factory=dict)
    """The last number of each worker that is in the weights."""
    at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Batches and samples, by version."""
    given_up: list[tuple[int, int, int, str]] = field(default_factory=list)
    """Units nobody could do: epoch, first batch, batches, why."""
    lost: list[tuple[str, int, int]] = field(default_factory=list)
    """What a repair gave up, by name: worker, first and last number."""
    inexact: list[tuple[str, int, int, str]] = field(default_factory=list)
    """Answers that were refused: worker, number, unit, why."""
    shown_out: list[str] = field(default_factory=list)
    """Whose invitations were withdrawn, and whom the owner keeps out, in words."""

    def is_lost(self, key: Key) -> bool:
        return any(worker == key[0] and first <= key[1] <= last for worker, first, last in self.lost)


def audit(
    evidence: AuditInput, violations: list[str], first: int | None = 0, units: bool = False, complete: bool = False, tasks: bool = False
) -> AuditReport:
    """Check a run by what it left behind. `first`: the version it began with, None where any will do; `units`: whether its data was leased
    in units, so that each must be somewhere; `complete`: whether the run says that it has done all of its epochs; `tasks`: whether a
    scheduler gave out shares of the same data, so that no two seats may have a batch in common; `violations`: what could not even be
    read."""
    report = AuditReport(violations=violations)
    tally = _add_up(evidence.ledger, first, not units, report.violations)
    report.violations += _doubled_batches(tally.known.values(), tasks)
    follower = JournalFollower(tally)
    report.violations += follower.follow(evidence.records)
    open_now = follower.left
    report.violations += _lost(evidence, tally, open_now)
    report.violations += _misfit(evidence, tally, open_now)
    report.checked = _told(evidence, tally, open_now)
    if units:
        learned = [(one.epoch, one.position - one.batches, one.batches) for one in [*tally.known.values(), *open_now.values()]]
        checked = UnitAudit(evidence, learned, tally.given_up)
        report.violations += checked.violations(complete)
        report.checked += checked.told()
    report.checked += [f"note      {what}" for what in [*evidence.cut, *tally.shown_out, *_claimed(evidence, tally, open_now)]]
    report.checked += _refused(tally)
    return report


def missing_above(above: AuditInput, below: AuditInput) -> list[str]:
    """What a relay passed on, and was told to be taken, against what the coordinator above has. `below`: of the relay."""
    tally, found = LedgerTotals(), list[str]()
    for _, line in above.ledger:
        for one in (LedgerContribution.of(one) for one in [*line.get("from", ()), *line.get("unused", ())]):
            tally.known[one.key] = one
    records = (record for _, record in above.records if record.get("kind") in ("accepted", "held"))
    waiting = {one.key: one for one in map(LedgerContribution.of_record, records)}
    said: set[Key] = set()
    for place, line in below.ledger:
        if "upstream" not in line:
            continue
        name, seq, status = line["upstream"]
        batches, taken = sum(LedgerContribution.of(one).batches for one in line["from"]), (waiting | tally.known).get((name, seq))
        if (name, seq) in said:
            found.append(f"{place}: contribution {seq} of {name} was passed on twice")
        said.add((name, seq))
        if status == "accepted" and taken is None:
            found.append(f"{place}: contribution {seq} of {name} was confirmed to the relay, and is nowhere above")
        elif taken is not None and taken.batches != batches:
            found.append(f"{place}: contribution {seq} of {name} has {taken.batches} batches above, and {batches} at the relay")
    return found


# --- the ledger -----------------------------------------------------------------------------------------


def _add_up(lines: list[Line], first: int | None, in_order: bool, violations: list[str]) -> LedgerTotals:
    tally = LedgerTotals()
    for place, line in lines:
        try:
            if "failed" in line:
                epoch, start, batches = (int(value) for value in line["failed"][:3])
                tally.given_up.append((epoch, start, batches, str(line["failed"][3])))
            elif "lost" in line:
                tally.lost += [(str(worker), int(begin), int(end)) for worker, begin, end in line["lost"]]
            elif "inexact" in line:
                worker, seq, unit, *_, reason = line["inexact"]
                tally.inexact.append((str(worker), int(seq), int(unit), str(reason)))
            elif "withdrawn" in line:
                tally.shown_out.append(f"the invitation of {line['withdrawn']} was withdrawn: {', '.join(line['workers'])} went")
            elif "evicted" in line:
                tally.shown_out.append(f"the owner {'keeps out' if line['out'] else 'lets in again'} {line['evicted']}")
            elif "version" in line:
                violations += [f"{place}: {what}" for what in _count(tally, line, first, in_order)]
            else:
                kind = "replaced" if "replaced" in line else "unused"
                found = [line["replaced"]] if kind == "replaced" else line["unused"]
                violations += [f"{place}: {what}" for what in _set_aside(tally, kind, found)]
        except (KeyError, TypeError, ValueError, IndexError):
            violations.append(f"{place}: no line of a ledger")
    return tally


def _count(tally: LedgerTotals, line: dict[str, Any], first: int | None, in_order: bool) -> Iterator[str]:
    """A version, and what it was made of. Units come in in any order; everything else in the order in which it was made."""
    version, begins = int(line["version"]), not tally.at
    if begins:
        tally.first = version - 1
    expected = (tally.version + 1) if not begins else version if first is None else first + 1
    if version != expected:
        yield f"version {version} where {expected} must stand"
    tally.version = version
    contributions = [LedgerContribution.of(one) for one in line["from"]]
    for one in contributions:
        if one.key in tally.known:
            yield f"contribution {one.seq} of {one.worker} is counted twice"
        elif in_order and one.seq <= tally.newest.get(one.worker, -1):
            yield f"contribution {one.seq} of {one.worker} comes after {tally.newest[one.worker]}"
        if not (0 < one.share <= 1 and 0 <= one.base < version and one.batches > 0 and one.samples > 0):
            yield f"contribution {one.seq} of {one.worker} cannot have been made of what it says"
        tally.known[one.key], tally.made[one.key] = one, version
        tally.newest[one.worker] = max(one.seq, tally.newest.get(one.worker, -1))
    tally.fates["applied"] += len(contributions)
    if not contributions:
        yield f"version {version} is made of nothing"
    tally.batches += sum(one.batches for one in contributions)
    tally.samples += sum(one.samples for one in contributions)
    if tally.batches != line["batches"]:
        yield f"{line['batches']} batches are claimed and {tally.batches} are there"
        tally.batches = int(line["batches"])
    tally.at[version] = (tally.batches, tally.samples)


def _set_aside(tally: LedgerTotals, kind: str, found: list[list[Any]]) -> Iterator[str]:
    """What was confirmed and is not in the weights, for a reason that is on record."""
    for one in (LedgerContribution.of(values) for values in found):
        if one.key in tally.known:
            yield f"contribution {one.seq} of {one.worker} is {kind}, and counted before"
        tally.known[one.key] = one
        tally.fates[kind] += 1


def _doubled_batches(contributions: Iterable[LedgerContribution], shared: bool) -> Iterator[str]:
    """No two contributions may be made of the same batch of a seat. `shared`: all seats are at the same batches."""
    spans = sorted(
        (0 if shared else one.seat, one.epoch, max(0, one.position - one.batches), one.position, one.worker, one.seq)
        for one in contributions
    )
    for before, after in pairwise(spans):
        if before[:2] == after[:2] and after[2] < before[3]:
            seat, epoch, start = after[:3]
            where = "" if shared else f" of seat {seat}"
            yield f"batch {start}{where} in epoch {epoch} is in {before[4]}'s contribution {before[5]} and {after[4]}'s {after[5]}"


# --- the journal and the snapshot ---------------------------------------------------------------------------


class Accepted(NamedTuple):
    """A contribution in an open round."""

    former_name: str
    """What earlier versions called it in the record of the round's close."""
    contribution: LedgerContribution


def _former_name(record: dict[str, Any]) -> str:
    if record.get("late"):
        return f"{record['worker']} {record['seq']}"
    return f"{record['worker']} {record['unit']}" if "unit" in record else str(record["worker"])


def _closed_with(record: dict[str, Any], there: dict[Key, Accepted]) -> list[Key]:
    """The contributions that a round closed with. Earlier versions took the latest of each worker, and named it by the worker."""
    if "workers" in record:
        latest = {one.former_name: key for key, one in there.items()}
        return [latest[name] for name in record["workers"]]
    found = [(str(worker), int(seq)) for worker, seq in record["contributions"]]
    return [there[key].contribution.key for key in found]


class JournalFollower:
    """Goes through the journal, and compares what it leads to with the ledger."""

    def __init__(self, tally: LedgerTotals) -> None:
        self.tally = tally
        self.open: dict[int, dict[Key, Accepted]] = {}
        self.unwritten: list[LedgerContribution] = []
        """In rounds that closed, and not yet in the ledger when a crash came."""

    def follow(self, records: list[Line]) -> Iterator[str]:
        for place, record in records:
            try:
                for what in self._take(record):
                    yield f"{place}: {what}"
            except (KeyError, TypeError):
                yield f"{place}: no record of a coordinator"

    def _take(self, record: dict[str, Any]) -> Iterator[str]:
        if record["kind"] in _MAKE_VERSIONS:
            there = self.open.pop(record["round"], {})
            yield from self._close(record["round"] + 1, there, _closed_with(record, there))
        elif record["kind"] in ("accepted", "held"):
            one = LedgerContribution.of_record(record)
            known = self.tally.known.get(one.key)
            if known is not None and known != one:
                yield f"contribution {one.seq} of {one.worker} is not what the ledger says"
            self.open.setdefault(record["round"], {})[one.key] = Accepted(_former_name(record), one)

    def _close(self, version: int, there: dict[Key, Accepted], closed: list[Key]) -> Iterator[str]:
        for key in closed:
            if version > self.tally.version:
                self.unwritten.append(there[key].contribution)
            elif self.tally.made.get(key) != version:
                yield f"contribution {key[1]} of {key[0]} went into version {version}, and the ledger does not say so"
        for worker, seq in there.keys() - set(closed) - self.tally.known.keys():
            yield f"contribution {seq} of {worker} was taken for version {version}, is not in it, and the ledger does not say why"

    @property
    def left(self) -> dict[Key, LedgerContribution]:
        """Contributions that the ledger has yet to name."""
        waiting = [one.contribution for there in self.open.values() for one in there.values()]
        return {one.key: one for one in waiting + self.unwritten if one.key not in self.tally.known}


def _lost(evidence: AuditInput, tally: LedgerTotals, open_now: dict[Key, LedgerContribution]) -> Iterator[str]:
    """Every confirmed contribution is somewhere, and is what was confirmed; or a repair has named it as lost."""
    known = tally.known | open_now
    for place, receipt in evidence.receipts:
        key = (receipt.worker, receipt.seq)
        if receipt.status != "accepted":
            continue
        if key not in known and tally.is_lost(key):
            tally.fates["lost"] += 1
        elif key not in known and key in evidence.waiting:
            continue
        elif key not in known:
            yield f"{place}: contribution {receipt.seq} of {receipt.worker} was confirmed, and is nowhere"
        elif receipt.digest and receipt.digest != digest_of(known[key].line):
            yield f"{place}: contribution {receipt.seq} of {receipt.worker} is not what was confirmed"


def _claimed(evidence: AuditInput, tally: LedgerTotals, open_now: dict[Key, LedgerContribution]) -> list[str]:
    """What receipts without a seal say, and nothing bears out: told, and nobody is blamed for it."""
    known = tally.known.keys() | open_now.keys()
    claimed = [
        f"{place} claims that contribution {receipt.seq} of {receipt.worker} was confirmed; it is nowhere, and no seal proves it"
        for place, receipt in evidence.claims
        if receipt.status == "accepted" and (receipt.worker, receipt.seq) not in known
    ]
    more = [f"{len(claimed) - _MOST_CLAIMS} more claims without a seal"] if len(claimed) > _MOST_CLAIMS else []
    return claimed[:_MOST_CLAIMS] + more


def _misfit(evidence: AuditInput, tally: LedgerTotals, open_now: dict[Key, LedgerContribution]) -> Iterator[str]:
    """The newest snapshot and the journal after it lead to where the ledger ends."""
    snapshot = evidence.snapshot
    if snapshot is None:
        return
    where = f"snapshot {snapshot.number}"
    if snapshot.version > tally.first and (snapshot.batches, snapshot.samples) != tally.at.get(snapshot.version):
        there = tally.at.get(snapshot.version, "nothing")
        yield f"{where}: version {snapshot.version} with {snapshot.batches} batches, {snapshot.samples} samples; the ledger has {there}"
    if snapshot.ledger_bytes > evidence.ledger_bytes:
        yield f"{where}: the ledger was longer when it was taken ({snapshot.ledger_bytes} bytes, now {evidence.ledger_bytes})"
    closed = sum(record.get("kind") in _MAKE_VERSIONS for _, record in evidence.records)
    reached, ends = snapshot.version + closed, tally.version if tally.at else snapshot.version
    if not reached - 1 <= ends <= reached:  # the journal comes first: a crash may have kept one line from the ledger
        yield f"{where} and the journal lead to version {reached}, the ledger ends at {ends}"
    newest: dict[str, int] = {}
    for worker, seq in [*tally.known, *open_now]:
        newest[worker] = max(seq, newest.get(worker, -1))
    for worker, seq in snapshot.sequences.items():
        if newest.get(worker, -1) < seq and not tally.is_lost((worker, seq)):
            yield f"{where}: contribution {seq} of {worker} was taken, and is nowhere"


def _refused(tally: LedgerTotals) -> list[str]:
    """Workers whose answers were not what they should have been."""
    found: dict[str, list[tuple[int, str]]] = {}
    for worker, _, unit, reason in tally.inexact:
        found.setdefault(worker, []).append((unit, reason))
    return [f"refused   {len(units)} units of {worker}: the first was unit {units[0][0]}, {units[0][1]}" for worker, units in found.items()]


def _told(evidence: AuditInput, tally: LedgerTotals, open_now: dict[Key, LedgerContribution]) -> list[str]:
    workers = len({worker for worker, _ in tally.known})
    told = [
        f"ledger    {tally.version - tally.first:,} versions from {tally.fates['applied']:,} contributions of {workers} workers, "
        f"{tally.batches:,} batches; {tally.fates['replaced']} replaced, {tally.fates['unused']} unused"
    ]
    if tally.lost:
        names = ", ".join(f"{first} to {last} of {worker}" for worker, first, last in tally.lost[:8])
        told.append(f"lost      a repair gave up contributions {names}; {tally.fates['lost']} receipts tell of them")
    files = len({place.rpartition(":")[0] for place, _ in evidence.receipts})
    confirmed = sum(receipt.status == "accepted" for _, receipt in evidence.receipts)
    told.append(f"receipts  {confirmed:,} confirmed, {len(evidence.receipts) - confirmed:,} turned away, in {files} files")
    if evidence.snapshot is not None:
        since = f"snapshot {evidence.snapshot.number} (version {evidence.snapshot.version:,})"
        told.append(f"journal   {len(evidence.records):,} records since {since}, {len(open_now)} contributions in open rounds")
    return told
