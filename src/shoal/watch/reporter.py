"""What reporters share: a class that ignores everything but records, and the figures of a record."""

from __future__ import annotations

from typing import Any

from shoal.runs.loop import Loop

_NOT_METRICS = ("step", "split", "samples", "epoch", "wall_s")


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    return {f"{record['split']}/{name}": value for name, value in record.items() if name not in _NOT_METRICS}


class Quiet:
    """A reporter that ignores everything but records and the end."""

    def start(self, loop: Loop) -> None:
        return None

    def step(self, loop: Loop) -> None:
        return None

    def message(self, text: str) -> None:
        return None
