"""Audit of scores: whether the factors in the ledger follow from the losses that were measured. It has its own arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from shoal.coordinator.audit.files import Line

_REMEMBERED = 4096
_TOLERANCE = 1e-9


class ScoreAudit:
    """Follows the scores of workers through the ledger. `memory`: the setting `updates.scorer.memory`."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.rounds = 0
        self.running: dict[str, tuple[float, int]] = {}

    def violations(self, ledger: list[Line]) -> Iterator[str]:
        for place, line in ledger:
            if "version" not in line:
                continue
            try:
                wrong = self._check(line)
            except (KeyError, TypeError, ValueError, IndexError):
                wrong = "its scores cannot be read"
            if wrong:
                yield f"{place}: {wrong}"

    def summary(self) -> list[str]:
        if not self.rounds:
            return []
        low = [f"{name} {max(0.0, mean):.2f}" for name, (mean, _) in sorted(self.running.items()) if mean < 1]
        words = f": {', '.join(low[:8])}{' and others' if low[8:] else ''} of 1" if low else ""
        return [f"scores    {self.rounds} rounds were measured; what counted less counted as the losses say{words}"]

    def _check(self, line: dict[str, Any]) -> str:
        workers = [str(one[0]) for one in line["from"]]
        if "scores" in line:
            self.rounds += 1
            self._measure(workers, *line["scores"])
        expected, claimed = self._factors(workers), line.get("factors", {})
        if set(expected) != set(claimed) or any(abs(expected[name] - float(claimed[name])) > _TOLERANCE for name in expected):
            return f"contributions counted by {claimed}, and the losses that were measured say {expected}"
        return ""

    def _measure(self, workers: list[str], batches: list[int], before: float, after: list[float], copies: list[list[int]]) -> None:
        if len(after) != len(workers):
            raise ValueError
        sharers = {place: len({workers[other] for other in group}) for group in copies for place in group}
        gains: dict[str, list[float]] = {}
        alone: dict[str, list[float]] = {}
        for place, worker in enumerate(workers):
            gain = float(before) - float(after[place])
            alone.setdefault(worker, []).append(gain)
            gains.setdefault(worker, []).append(gain / sharers.get(place, 1) if gain > 0 else gain)
        better = [mean for mean in (sum(values) / len(values) for values in alone.values()) if mean > 0]
        for worker, values in gains.items() if better else ():
            value = max(-1.0, min(2.0, sum(values) / len(values) / statistics.median(better)))
            old, count = self.running.pop(worker, (0.0, 0))
            part = max(1 / (count + 1), 1 - self.memory)
            self.running[worker] = old * (1 - part) + value * part, count + 1
        while len(self.running) > _REMEMBERED:
            del self.running[next(iter(self.running))]

    def _factors(self, workers: list[str]) -> dict[str, float]:
        """Factors below 1 of a round's workers; none if no worker would count."""
        full = {worker: self.running[worker][0] if worker in self.running else 1.0 for worker in workers}
        factor = {worker: 0.0 if mean < 0.1 else min(1.0, mean) for worker, mean in full.items()}
        return {worker: one for worker, one in factor.items() if one < 1} if any(factor.values()) else {}
