"""How fast workers are: what the settings claim, corrected by what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping


def believed(claimed: Mapping[str, float | None], measured: Mapping[str, float | None]) -> dict[str, float]:
    """Work a second of each worker.

    A measurement counts more than any claim. Claims are relative (a file says 100 and 200 of two machines), so the claim of a worker that
    nobody has measured yet is scaled by what the claims of the others turned out to be worth. Of one without a claim the median is taken.
    """
    worth = [found / claim for name, claim in claimed.items() if claim and (found := measured.get(name))]
    scale = statistics.median(worth) if worth else 1.0
    known = {name: found for name, claim in claimed.items() if (found := measured.get(name) or (claim and claim * scale))}
    middle = statistics.median(known.values()) if known else 1.0
    return {name: known.get(name, middle) for name in claimed}
