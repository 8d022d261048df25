"""Which runs may have relays. Above and below a relay the strategy is the same: the mean of a relay's round stands for the round.

syncps    the mean gradient of the relay's workers, weighed by what they learned from: the tree is one large round
diloco    the mean of how far they moved; the outer step is the uppermost coordinator's
edp, async, workunits    have no rounds that wait for all: what a relay would hold back could go up at once
"""

from __future__ import annotations

from shoal.config import Run
from shoal.strategies.policies import Policies


def no_relay(run: Run, policies: Policies) -> str:
    """Why a relay makes no sense in a run; empty: it does."""
    rounds, contribution, updates = policies.rounds, policies.contribution, run.updates
    reasons = {
        f"{run.strategy.kind} has no rounds that wait for all; syncps and diloco have": not rounds.waits_for_all,
        "strategy.window: a relay has one round open at a time": rounds.window > 1,
        "workers that step their own weights between pulls know versions that a relay does not make": contribution.own_steps,
        "strategy.fragments: a relay passes on whole updates": contribution.fragments > 1,
        "strategy.overlap_steps: a relay's workers wait for its answer": contribution.overlap > 0,
        "updates.codec: a relay would lose what a codec leaves for the next update; choose none": updates.codec.kind != "none",
        "updates.privacy: the noise of a relay's workers is not accounted for above": updates.privacy.enabled,
        "updates.memory: a relay's workers are not known above": bool(updates.memory),
        "scheduler: tasks are given to workers, and a relay hands out none": run.scheduled,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
