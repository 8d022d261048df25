"""The figures of a record, as sinks show them."""

from __future__ import annotations

from typing import Any

_NOT_METRICS = ("step", "split", "samples", "epoch", "wall_s", "received_bytes", "sent_bytes")


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    return {f"{record['split']}/{name}": value for name, value in record.items() if name not in _NOT_METRICS}
