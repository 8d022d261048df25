"""Audit of a run: every confirmed contribution is there, and none is counted twice.

It shares no code with the modules that wrote the files. A last line or record that a crash cut off is no violation; anything else that
cannot be read is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from shoal.coordinator.audit.files import AuditInput, Key, Line, digest_of
from shoal.coordinator.audit.scores import ScoreAudit
from shoal.coordinator.audit.units import LagRule, UnitAudit

_MOST_CLAIMS = 5
_MAKE_VERSIONS = ("closed", "adopted")
"""Kinds of records that make a new version."""


class LedgerContribution(NamedTuple):
    """A contribution as in a line of the ledger."""

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
    """Experts of a mixture that it holds; empty: all of them."""

    @property
    def key(self) -> Key:
        return self.worker, self.seq

    @property
    def line(self) -> list[Any]:
        """Its values in the ledger."""
        return [*self[:-1], list(self.experts)] if self.experts else [*self[:-1]]

    @classmethod
    def of(cls, values: Iterable[Any]) -> LedgerContribution:
        """Parse the values of a ledger line. Raises TypeError."""
        made = cls(*values)
        made = made._replace(experts=tuple(made.experts))
        numbers = made[1:3] + made[4:-1] + made.experts
        if type(made.worker) is not str or type(made.share) not in (int, float) or any(type(number) is not int for number in numbers):
            raise TypeError
        return made

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> LedgerContribution:
        """Parse a record of the journal."""
        return cls.of([*(record[name] for name in cls._fields[:-1]), record.get("experts", ())])


@dataclass
class AuditReport:
    """What was checked, and the violations."""

    checked: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


@dataclass
class LedgerTotals:
    """Sums over the ledger."""

    first: int = 0
    version: int = 0
    batches: int = 0
    samples: int = 0
    known: dict[Key, LedgerContribution] = field(default_factory=dict)
    fates: Counter[str] = field(default_factory=Counter)
    """How many contributions were applied, unused or lost."""
    made: dict[Key, int] = field(default_factory=dict)
    """The version that each contribution is in."""
    newest: dict[str, int] = field(default_factory=dict)
    """By worker: the last number that is in the weights."""
    at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Batches and samples, by version."""
    given_up: list[tuple[int, int, int, str]] = field(default_factory=list)
    """Units that were given up: epoch, first batch, batches, reason."""
    lost: list[tuple[str, int, int]] = field(default_factory=list)
    """Contributions that a repair gave up: worker, first and last number."""
    inexact: list[tuple[str, int, int, str]] = field(default_factory=list)
    """Results that were refused as inexact: worker, number, unit, reason."""
    not_taken: set[Key] = field(default_factory=set)
    """At a relay: contributions of rounds that the coordinator above did not take. Their batches may be learned from again."""
    removals: list[str] = field(default_factory=list)
    """Withdrawn invitations and evictions, as text."""

    def is_lost(self, key: Key) -> bool:
        return any(worker == key[0] and first <= key[1] <= last for worker, first, last in self.lost)


def audit(
    evidence: AuditInput,
    violations: list[str],
    first: int | None = 0,
    units: bool = False,
    complete: bool = False,
    tasks: bool = False,
    lags: LagRule | None = None,
    scores: ScoreAudit | None = None,
) -> AuditReport:
    """Check a run by its files. `first`: the version that it began with; None: any. `units`: its data was leased in units, each of which
    must be accounted for. `lags`: how much less a late contribution counted, and `scores`: one that lowers the loss less; None: this is
    not checked. `complete`: it claims that all of its epochs are done. `tasks`: a scheduler divided the same data, so no two seats may
    share a batch. `violations`: what could not be read."""
    report = AuditReport(violations=violations)
    tally = _add_up(evidence.ledger, first, not units, report.violations)
    report.violations += _doubled_batches([one for key, one in tally.known.items() if key not in tally.not_taken], tasks)
    follower = JournalFollower(tally)
    report.violations += follower.follow(evidence.records)
    open_now = follower.left
    report.violations += _lost(evidence, tally, open_now)
    report.violations += _misfit(evidence, tally, open_now)
    report.checked = _summary(evidence, tally, open_now)
    if scores is not None:
        report.violations += scores.violations(evidence.ledger)
        report.checked += scores.summary()
    if lags is not None:
        report.violations += lags.violations(
            (*key, tally.known[key].base, tally.known[key].share, made) for key, made in tally.made.items()
        )
    if units:
        learned = [(one.epoch, one.position - one.batches, one.batches) for one in [*tally.known.values(), *open_now.values()]]
        checked = UnitAudit(evidence, learned, tally.given_up)
        report.violations += checked.violations(complete)
        report.checked += checked.summary()
    report.checked += [f"note      {what}" for what in [*evidence.notes, *tally.removals, *_claimed(evidence, tally, open_now)]]
    report.checked += _refused(tally)
    return report


def missing_above(above: AuditInput, below: AuditInput) -> list[str]:
    """Contributions that a relay (`below`) passed on and got confirmed, and that the coordinator `above` does not have."""
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
                tally.removals.append(f"the invitation of {line['withdrawn']} was withdrawn: {', '.join(line['workers'])} went")
            elif "evicted" in line:
                tally.removals.append(f"the owner {'keeps out' if line['out'] else 'lets in again'} {line['evicted']}")
            elif "version" in line:
                violations += [f"{place}: {what}" for what in _count(tally, line, first, in_order)]
            else:
                violations += [f"{place}: {what}" for what in _count_unused(tally, line["unused"])]
        except (KeyError, TypeError, ValueError, IndexError):
            violations.append(f"{place}: no line of a ledger")
    return tally


def _count(tally: LedgerTotals, line: dict[str, Any], first: int | None, in_order: bool) -> Iterator[str]:
    """Count a version and its contributions. Units come in any order, other contributions in the order of their numbers."""
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
    if "upstream" in line and line["upstream"][2] != "accepted":
        tally.not_taken |= {one.key for one in contributions}
    tally.fates["applied"] += len(contributions)
    if not contributions:
        yield f"version {version} is made of nothing"
    tally.batches += sum(one.batches for one in contributions)
    tally.samples += sum(one.samples for one in contributions)
    if tally.batches != line["batches"]:
        yield f"{line['batches']} batches are claimed and {tally.batches} are there"
        tally.batches = int(line["batches"])
    tally.at[version] = (tally.batches, tally.samples)


def _count_unused(tally: LedgerTotals, found: list[list[Any]]) -> Iterator[str]:
    """Contributions that were confirmed and whose round never closed, since the run ended."""
    for one in (LedgerContribution.of(values) for values in found):
        if one.key in tally.known:
            yield f"contribution {one.seq} of {one.worker} is unused, and counted before"
        tally.known[one.key] = one
        tally.fates["unused"] += 1


def _doubled_batches(contributions: Iterable[LedgerContribution], shared: bool) -> Iterator[str]:
    """Batches of a seat that are in two contributions. `shared`: all seats have the same batches."""
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


class JournalFollower:
    """Follows the records of a journal, and compares the versions that they make with the ledger. Units that were given up and
    contributions that a repair gave up count from their record on: their line in the ledger may be missing after a crash or a repair."""

    def __init__(self, tally: LedgerTotals) -> None:
        self.tally = tally
        self.open: dict[int, dict[Key, LedgerContribution]] = {}
        self.unwritten: list[LedgerContribution] = []
        """Contributions of rounds that closed just before a crash, and are not in the ledger."""

    def follow(self, records: list[Line]) -> Iterator[str]:
        for place, record in records:
            try:
                for what in self._take(record):
                    yield f"{place}: {what}"
            except (KeyError, TypeError, ValueError):
                yield f"{place}: no record of a coordinator"

    def _take(self, record: dict[str, Any]) -> Iterator[str]:
        if record["kind"] in _MAKE_VERSIONS:
            held = self.open.pop(record["round"], {})
            closed = [held[str(worker), int(seq)] for worker, seq in record["contributions"]]
            yield from self._close(record["round"] + 1, held, closed)
        elif record["kind"] in ("accepted", "held"):
            entry = LedgerContribution.of_record(record)
            known = self.tally.known.get(entry.key)
            if known is not None and known != entry:
                yield f"contribution {entry.seq} of {entry.worker} is not what the ledger says"
            self.open.setdefault(record["round"], {})[entry.key] = entry

        elif record["kind"] == "failed":
            span = int(record["epoch"]), int(record["start"]), int(record["batches"]), str(record["reason"])
            self.tally.given_up += [] if span in self.tally.given_up else [span]
        elif record["kind"] == "repaired":
            lost = [(str(worker), int(first), int(last)) for worker, first, last in record["lost"]]
            self.tally.lost += [one for one in lost if one not in self.tally.lost]

    def _close(self, version: int, held: dict[Key, LedgerContribution], closed: list[LedgerContribution]) -> Iterator[str]:
        for entry in closed:
            if version > self.tally.version:
                self.unwritten.append(entry)
            elif self.tally.made.get(entry.key) != version:
                yield f"contribution {entry.seq} of {entry.worker} went into version {version}, and the ledger does not record it"
        for worker, seq in held.keys() - {entry.key for entry in closed} - self.tally.known.keys():
            yield f"contribution {seq} of {worker} was taken for version {version}, is not in it, and the ledger does not say why"

    @property
    def left(self) -> dict[Key, LedgerContribution]:
        """Contributions that are not in the ledger yet."""
        waiting = [entry for held in self.open.values() for entry in held.values()]
        return {entry.key: entry for entry in waiting + self.unwritten if entry.key not in self.tally.known}


def _lost(evidence: AuditInput, tally: LedgerTotals, open_now: dict[Key, LedgerContribution]) -> Iterator[str]:
    """Confirmed contributions that are nowhere, or not what was confirmed, and that no repair has named as lost."""
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
    """Notes on receipts without a seal that nothing supports; they are no violations."""
    known = tally.known.keys() | open_now.keys()
    claimed = [
        f"{place} claims that contribution {receipt.seq} of {receipt.worker} was confirmed; it is nowhere, and no seal proves it"
        for place, receipt in evidence.claims
        if receipt.status == "accepted" and (receipt.worker, receipt.seq) not in known
    ]
    more = [f"{len(claimed) - _MOST_CLAIMS} more claims without a seal"] if len(claimed) > _MOST_CLAIMS else []
    return claimed[:_MOST_CLAIMS] + more


def _misfit(evidence: AuditInput, tally: LedgerTotals, open_now: dict[Key, LedgerContribution]) -> Iterator[str]:
    """Differences between the ledger's end and what the newest snapshot and the journal after it lead to."""
    snapshot = evidence.snapshot
    if snapshot is None:
        return
    where = f"snapshot {snapshot.number}"
    if snapshot.version > tally.first and (snapshot.batches, snapshot.samples) != tally.at.get(snapshot.version):
        in_ledger = tally.at.get(snapshot.version, "nothing")
        yield f"{where}: version {snapshot.version} with {snapshot.batches} batches, {snapshot.samples} samples; the ledger has {in_ledger}"
    if snapshot.ledger_bytes > evidence.ledger_bytes:
        yield f"{where}: the ledger was longer when it was taken ({snapshot.ledger_bytes} bytes, now {evidence.ledger_bytes})"
    closed = sum(record.get("kind") in _MAKE_VERSIONS for _, record in evidence.records)
    reached, ends = snapshot.version + closed, tally.version if tally.at else snapshot.version
    if evidence.waits_for_resume:
        evidence.notes.append(f"the run was repaired, and its ledger is written again up to version {reached} when it is resumed")
    elif not reached - 1 <= ends <= reached:  # the journal comes first: a crash may have kept one line from the ledger
        yield f"{where} and the journal lead to version {reached}, the ledger ends at {ends}"
    newest: dict[str, int] = {}
    for worker, seq in [*tally.known, *open_now]:
        newest[worker] = max(seq, newest.get(worker, -1))
    for worker, seq in snapshot.sequences.items():
        if newest.get(worker, -1) < seq and not tally.is_lost((worker, seq)):
            yield f"{where}: contribution {seq} of {worker} was taken, and is nowhere"


def _refused(tally: LedgerTotals) -> list[str]:
    """Lines on workers whose results were refused as inexact."""
    found: dict[str, list[tuple[int, str]]] = {}
    for worker, _, unit, reason in tally.inexact:
        found.setdefault(worker, []).append((unit, reason))
    return [f"refused   {len(units)} units of {worker}: the first was unit {units[0][0]}, {units[0][1]}" for worker, units in found.items()]


def _summary(evidence: AuditInput, tally: LedgerTotals, open_now: dict[Key, LedgerContribution]) -> list[str]:
    workers = len({worker for worker, _ in tally.known})
    lines = [
        f"ledger    {tally.version - tally.first:,} versions from {tally.fates['applied']:,} contributions of {workers} "
        f"worker{'' if workers == 1 else 's'}, {tally.batches:,} batches; {tally.fates['unused']} unused"
    ]
    if tally.lost:
        names = ", ".join(f"{first} to {last} of {worker}" for worker, first, last in tally.lost[:8])
        lines.append(f"lost      a repair gave up contributions {names}; {tally.fates['lost']} receipts tell of them")
    files = len({place.rpartition(":")[0] for place, _ in evidence.receipts})
    confirmed = sum(receipt.status == "accepted" for _, receipt in evidence.receipts)
    lines.append(
        f"receipts  {confirmed:,} confirmed, {len(evidence.receipts) - confirmed:,} turned away, in {files} file{'' if files == 1 else 's'}"
    )
    if evidence.snapshot is not None:
        since = f"snapshot {evidence.snapshot.number} (version {evidence.snapshot.version:,})"
        lines.append(f"journal   {len(evidence.records):,} records since {since}, {len(open_now)} contributions in open rounds")
    return lines
