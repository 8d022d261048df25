"""Which runs may have relays, and with which strategies on their two levels. What a relay's round makes stands for one contribution.

below     above
syncps    syncps    the mean gradient of the relay's workers, weighed by what they learned from: the tree is one large round
syncps    async     the same mean, applied when it comes; the relays do not wait for each other
syncps    edp       likewise, scaled by 1/(1+lag)
diloco    diloco    the mean of how far they moved; the outer step is the uppermost coordinator's

Below a relay, strategies without rounds that wait for all have nothing to combine: what a relay would hold back could go up at once. A
gradient is no walk, so neither stands for the other.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.derived_values import quorum
from shoal.strategies.policy_set import Policies


def no_relay(run: Run, policies: Policies, above: Policies) -> str:
    """The reason why a relay is not possible with this run and these policies below it and `above` upstream; empty: it is possible."""
    rounds, contribution, updates, rule = policies.rounds, policies.contribution, run.updates, run.updates.aggregation
    kind = "takes pseudo-gradients of many inner steps" if above.contribution.takes_inner_steps else "takes gradients"
    differ = above.contribution.takes_inner_steps != contribution.takes_inner_steps
    reasons = {
        "the run above leases units of its data, and a relay asks for none": above.feed.leased,
        f"{run.strategy.kind} has no rounds that wait for all; syncps and diloco have: give the relay one of them, as in "
        "--set strategy.kind=syncps": not rounds.waits_for_all,
        f"the run above {kind}, and rounds of {run.strategy.kind} make no such thing": differ,
        "strategy.window: a relay has one round open at a time": rounds.window > 1,
        "workers that step their own weights between pulls know versions that a relay does not make": contribution.own_steps,
        "strategy.fragments: a relay passes on whole updates": contribution.fragments > 1,
        "strategy.overlap_steps: a relay's workers wait for its answer": contribution.sync_delay > 0,
        "updates.privacy: the noise of a relay's workers is not accounted for above": updates.privacy.enabled,
        f"{rule.kind} compares workers, and the last round of a task may have fewer than it needs; start the run above with another "
        "rule, or with --set scheduler.kind=none": run.scheduled and quorum(rule.kind, getattr(rule, "byzantine", None) or 0) > 1,
        "updates.memory: a relay's workers are not known above": bool(updates.memory),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
