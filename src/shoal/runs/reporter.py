"""Somebody who watches a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.runs.loop import Loop


class Reporter:
    """Hears of everything that a run tells. Override what you want to hear; the rest does nothing.

    `loop.step`, `loop.engine.total_steps`, `loop.samples` and `loop.directory.path` say where the run is. To end it after this step, set
    `loop.stopping` to a word that says why.
    """

    def start(self, loop: Loop) -> None:
        """The run begins, or goes on."""

    def step(self, loop: Loop) -> None:
        """The weights have moved."""

    def record(self, record: dict[str, Any]) -> None:
        """Figures at a step: `step`, `split` (`train` or `eval`), `samples`, and the metrics by name."""

    def message(self, text: str) -> None:
        """Something to tell people. A warning begins with `warning:`."""

    def close(self, summary: dict[str, Any]) -> None:
        """The run is over, well or not: what `summary.json` has."""
