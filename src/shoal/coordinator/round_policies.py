"""The coordinator's part of a strategy: which contributions are too late, and when a round becomes new weights.

A strategy's other policies are the worker's (`worker/step_policies.py`, `updates/contribution_policy.py`) and the learner's
(`engines/learners/apply.py`). Strategies differ by methods, never by checks of a policy's class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.coordinator.rounds.open_rounds import Round
from shoal.updates import staleness
from shoal.updates.contribution_policy import ContributionPolicy

# --- admission: what is too late ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Everything:
    """Every contribution that its round can still take counts in full."""

    def share(self, lag: int, speed: float) -> float:
        """Weight factor of a contribution by its lag and its worker's speed over the median; 0: it is too late."""
        return 1.0

    def most_lag(self, speed: float) -> float:
        """Largest lag of a worker of this speed. Workers need it to decide whether to compute while they send."""
        return math.inf


@dataclass(frozen=True)
class Discounted(Everything):
    """A contribution counts 1/(1+lag)."""

    def share(self, lag: int, speed: float) -> float:
        return staleness.weight(lag)


@dataclass(frozen=True)
class Bounded(Everything):
    """A contribution that lags too many versions is rejected. `least` is the smallest bound of any worker; None: all have the same."""

    most: int
    least: int | None = None
    multiplier: float = 1.0
    """The largest bound, as a multiple of `most`."""

    def share(self, lag: int, speed: float) -> float:
        return 1.0 if lag <= self.most_lag(speed) else 0.0

    def most_lag(self, speed: float) -> float:
        return self.most if self.least is None else staleness.adaptive_bound(self.most, speed, self.least, self.multiplier)


# --- rounds: when the weights move --------------------------------------------------------------------------

MOST_OF_ONE = 4
"""Contributions of one worker in a round that waits for other workers."""

MOST_PIECES = 2**31
"""The same for a relay's block, which has as many pieces as the relay has workers."""


@dataclass(frozen=True)
class Every:
    """A round closes after a number of contributions. A rule that compares workers gets the mean of each worker's."""

    contributions: int = 1
    different: bool = False
    """Whether the contributions must come from that many different workers, or from all that are here, as a rule compares them."""
    window: int = 0
    """Rounds that may be open at once; 0: workers wait for no round."""
    deadline_s: float = 0.0
    """After this time a round closes without the missing workers."""
    waits_for_all: bool = False
    """Whether a round waits for every active worker."""

    @property
    def closes_early(self) -> bool:
        """Whether a round may close before all have sent, so that a worker that joins in the middle takes fewer steps."""
        return False

    @property
    def unit_quorum(self) -> int | None:
        """Results of units that close a round, whichever worker they are of; None: a round does not close by their number."""
        return None

    def expected_contributions(self, expected: int) -> int:
        """Contributions of an expected update, with the expected number of workers."""
        return self.contributions

    def first_workers(self, expected: int) -> int:
        """Workers that must be here before the first round closes."""
        return min(expected, self.contributions)

    def round_for(self, asked: int, version: int) -> int:
        """The round for a contribution that was sent for round `asked`."""
        return version

    def problem(self, asked: int, version: int) -> str:
        """The status with which a contribution for this round is rejected; empty: it is not."""
        return ""

    def may_send_next(self, sent: int, version: int) -> bool:
        """Whether a worker that has sent for round `sent` may send for the next one."""
        return True

    @property
    def most_of_one(self) -> int:
        """Contributions of one worker that a round takes. Then the worker waits until the round closes: more contributions on the same
        weights help less and less, and a round that waits for others must not fill the memory."""
        return MOST_OF_ONE if self.different or self.waits_for_all else self.contributions

    def due(self, open_round: Round, active: int, needed: int, now: float, no_more: bool) -> bool:
        """Whether the round closes now. `needed`: different workers that the rule needs; `no_more`: no unit of the data is left."""
        if self.different:
            return open_round.workers >= max(needed, min(self.contributions, max(1, active)))
        return len(open_round.held) >= self.contributions and open_round.workers >= needed


@dataclass(frozen=True)
class UnitQuorum(Every):
    """A round closes after a number of units, or when no unit is left. A worker may do any number of them."""

    @property
    def unit_quorum(self) -> int | None:
        return self.contributions

    def first_workers(self, expected: int) -> int:
        return 1

    def due(self, open_round: Round, active: int, needed: int, now: float, no_more: bool) -> bool:
        return (len(open_round.held) >= self.contributions or no_more) and open_round.workers >= needed


@dataclass(frozen=True)
class WholeBlock(Every):
    """At a relay that does a task: a round closes when all pieces of its block are in, whichever worker did them."""

    def expected_contributions(self, expected: int) -> int:
        return expected

    def first_workers(self, expected: int) -> int:
        return 1

    @property
    def most_of_one(self) -> int:
        return MOST_PIECES

    def due(self, open_round: Round, active: int, needed: int, now: float, no_more: bool) -> bool:
        return no_more and open_round.workers >= needed


@dataclass(frozen=True)
class Barrier(Every):
    """A round closes when every active worker has sent, or some time after the first one did."""

    window: int = 1
    """1 is a strict barrier."""
    waits_for_all: bool = True
    quorum: int | None = None
    """Contributions with which a round may close earlier; None: it waits for all workers."""
    grace_s: float = 0.0
    """How long a round stays open with its quorum."""
    late_count: bool = False
    """Whether a contribution whose round has closed goes into the one that is open."""

    @property
    def closes_early(self) -> bool:
        return self.quorum is not None

    def expected_contributions(self, expected: int) -> int:
        return expected

    def first_workers(self, expected: int) -> int:
        return expected if self.quorum is None else min(expected, self.quorum)

    def round_for(self, asked: int, version: int) -> int:
        return max(asked, version)

    def problem(self, asked: int, version: int) -> str:
        if asked < version and not self.late_count:
            return "late"
        return "ahead" if asked >= version + self.window else ""

    def may_send_next(self, sent: int, version: int) -> bool:
        return sent + 1 < version + self.window

    def due(self, open_round: Round, active: int, needed: int, now: float, no_more: bool) -> bool:
        if open_round.workers < needed:
            return False  # several contributions of one worker do not make several workers
        assert open_round.opened_at is not None
        return now >= open_round.opened_at + self.deadline_s or open_round.present == active or self._has_quorum(open_round, active, now)

    def _has_quorum(self, open_round: Round, active: int, now: float) -> bool:
        """Whether the quorum is reached, and the other workers had their grace period."""
        if self.quorum is None or len(open_round.held) < min(self.quorum, max(1, active)):
            return False
        open_round.quorum_at = now if open_round.quorum_at is None else open_round.quorum_at
        return now >= open_round.quorum_at + self.grace_s


@dataclass(frozen=True, kw_only=True)
class CoordinatorPolicies:
    """The policies of a strategy that the coordinator reads."""

    rounds: Every
    """When the weights move."""
    contribution: ContributionPolicy
    """What a worker sends, and how often."""
    admission: Everything = Everything()
    """Whose contribution is too late, and what a late one counts."""
