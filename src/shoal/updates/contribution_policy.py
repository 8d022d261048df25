"""The settings of a strategy's contributions, which its worker's and its coordinator's part share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ContributionPolicy:
    """What a worker sends, and how often."""

    own_steps: bool = False
    """Whether a worker also steps its own weights between pulls, so that versions it made itself do not count as lag."""
    takes_inner_steps: bool = False
    """Whether workers take inner steps with an optimizer of their own, so that the coordinator says how many."""
    inner_steps: int = 1
    """Steps of a worker that make one contribution."""
    balances_speeds: bool = False
    """Whether slower workers take fewer inner steps."""
    fragments: int = 1
    """Parts of the weights that rounds exchange in turn."""
    sync_delay: int = 0
    """Inner steps that a worker takes while its contribution is under way."""
    sends_weights: bool = False
    """Whether workers send their weights, whose mean are the new ones, in place of the pseudo-gradient."""

    def passes(self, version: int, every: int) -> bool:
        """Whether this version is the first at or after a multiple of `every` worker steps."""
        return version * self.inner_steps // every > (version - 1) * self.inner_steps // every
