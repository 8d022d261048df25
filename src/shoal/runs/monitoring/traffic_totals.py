"""What went through a coordinator's door, counted over all its starts: a coordinator that comes back goes on counting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.coordinator import Coordinator
from shoal.coordinator.driver_interfaces import TrafficCounts


class TrafficTotals:
    """Bytes, and what was turned away by reason. A snapshot holds them, and every record of figures holds the bytes."""

    def __init__(self, traffic: TrafficCounts, coordinator: Coordinator) -> None:
        self._traffic, self._coordinator = traffic, coordinator
        self._bytes_before = {"received_bytes": 0, "sent_bytes": 0}
        self._refused_before: dict[str, int] = {}

    @property
    def bytes(self) -> dict[str, int]:
        return {name: before + int(getattr(self._traffic, name)) for name, before in self._bytes_before.items()}

    @property
    def refused(self) -> dict[str, int]:
        return added(self._refused_before, self._coordinator.refused, self._traffic.refused)

    def state_dict(self) -> dict[str, Any]:
        return {**self.bytes, "refused": self.refused}

    def restore(self, saved: Mapping[str, Any], last_record: Mapping[str, Any]) -> None:
        """Go on from a snapshot and the last record, which may be newer. Runs of before these counts have neither."""
        for name in self._bytes_before:
            self._bytes_before[name] = max(int(saved.get(name, 0)), int(last_record.get(name, 0)))
        self._refused_before = dict(saved.get("refused", {}))


def added(*counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of several keepers, name by name."""
    names = dict.fromkeys(name for several in counts for name in several)
    return {name: sum(several.get(name, 0) for several in counts) for name in names}
