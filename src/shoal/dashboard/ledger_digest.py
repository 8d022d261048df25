"""A summary of a growing ledger, and its problems so far: the part of the audit that can be done line by line."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from shoal.coordinator.durable.ledger import lines_of
from shoal.files import parse_json

_MOST_KEYS = 500_000
"""Contributions whose numbers are remembered, so that none is in twice."""
_LONGEST_LAG = 20
_MOST_WORKERS, _RECENT = 1000, 200
_PROBLEMS = 8
_MOST_EARLIER, _MOST_DROPPED = 200, 30
"""Earlier summaries that are kept, and the workers in each of which the rule left out the most contributions."""


class LedgerDigest:
    """Counts over the lines so far."""

    def __init__(self) -> None:
        self.lines = self.version = self.contributions = self.samples = 0
        self.lags: Counter[int] = Counter()
        self.by_worker: Counter[str] = Counter()
        self.samples_of: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.recently_dropped: deque[tuple[int, list[str]]] = deque(maxlen=_RECENT)
        self.problems: list[str] = []
        self.earlier: list[dict[str, Any]] = []
        """Earlier summaries, for a viewer who goes back in time. Where there are too many, every second one is left out, and
        `generation` changes."""
        self.generation, self._every = 0, 1
        self._keys: set[tuple[str, int]] = set()
        self._before = ""

    def add(self, line: bytes) -> None:
        """Add the next line, which is not trusted."""
        self.lines += 1
        self._check(line)
        try:
            found = parse_json(line)
            if isinstance(found, dict) and "version" in found:
                self._count(found)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            self._add_problem("cannot be read")
        if self.lines % self._every == 0:
            self._remember()

    def _remember(self) -> None:
        self.earlier.append(self._counts(dict(self.dropped.most_common(_MOST_DROPPED))))
        if len(self.earlier) > _MOST_EARLIER:
            self.earlier, self._every = self.earlier[1::2], 2 * self._every
            self.generation += 1

    def _check(self, line: bytes) -> None:
        found = next(lines_of(line + b"\n", self._before))
        if found.checksum:  # a line that was cut off has none, and is reported when it is read
            if not found.sound:
                self._add_problem("does not match its checksum")
            self._before = found.checksum

    def _count(self, line: dict[str, Any]) -> None:
        version = int(line["version"])
        if self.version and version != self.version + 1:
            self._add_problem(f"makes version {version} after version {self.version}")
        self.version = version
        for worker, seq, base, _, samples, *_ in line["from"]:
            self._count_one(str(worker), int(seq), int(samples))
            self.lags[min(_LONGEST_LAG, max(0, version - 1 - int(base)))] += 1
        if dropped := [str(name) for name in line.get("dropped", ())][:_MOST_WORKERS]:
            self.recently_dropped.append((version, dropped))
            self.dropped.update(name for name in dropped if name in self.by_worker)

    def _count_one(self, worker: str, seq: int, samples: int) -> None:
        self.contributions += 1
        self.samples += samples
        if worker in self.by_worker or len(self.by_worker) < _MOST_WORKERS:
            self.by_worker[worker] += 1
            self.samples_of[worker] += samples
        if len(self._keys) >= _MOST_KEYS:
            return
        if (worker, seq) in self._keys:
            self._add_problem(f"counts contribution {seq} of {worker[:64]} twice")
        self._keys.add((worker, seq))

    def _add_problem(self, what: str) -> None:
        if len(self.problems) < _PROBLEMS:
            self.problems.append(f"line {self.lines} {what}")

    def summary(self) -> dict[str, Any]:
        more = {"by_worker": dict(self.by_worker), "samples_of": dict(self.samples_of)}
        recent = [list(one) for one in self.recently_dropped][-50:]
        return {**self._counts(dict(self.dropped)), **more, "recently_dropped": recent}

    def _counts(self, dropped: dict[str, int]) -> dict[str, Any]:
        return {
            "lines": self.lines,
            "version": self.version,
            "contributions": self.contributions,
            "samples": self.samples,
            "lags": [self.lags[lag] for lag in range(_LONGEST_LAG + 1)] if self.lags else [],
            "dropped": dropped,
            "problems": list(self.problems),
            "checked_all": len(self._keys) < _MOST_KEYS,
        }
