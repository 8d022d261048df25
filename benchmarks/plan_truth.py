"""Is the first choice of `shoal plan` a good one? Four workers whose steps take 4, 8, 16 and 32 times as long as a core's here, so that
they share the cores as four machines of their own would: the plan for such machines, and every strategy that it looked at run for real with
them. The first choice is to reach 90 % of the samples a second of the best of them.

The machines' speeds are measured before, by one worker alone. Strategies whose slowest worker would send less than three contributions in
the time of a real run are left out, and named; so is what leases units, whose results are counted elsewhere. Codecs and batches are those
of the first choice: over loopback they decide nothing. All are run three times in turn, and the median counts: what disturbs the machine
for a while disturbs one run of each.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import real_runs
from run import Row
from simulate_truth import COMMON, measured

from shoal.config.load import ConfigFile, LoadedConfig, Override, resolve
from shoal.config.machines import MachineKind
from shoal.config.schema.strategy import Strategy
from shoal.config.show import scalar
from shoal.simulate.meta_model import build_meta_model
from shoal.simulate.planning import Candidate, Planned, plan

SLOWDOWN = (4.0, 8.0, 16.0, 32.0)
SECONDS = float(os.environ.get("PLAN_SECONDS", "10"))
_LEAST_SENT, _ROUNDS = 3, 3


def variant(settings: Mapping[str, Any]) -> LoadedConfig:
    overrides = [Override(path, value, path) for path, value in (real_runs.QUIET | COMMON).items()]
    return resolve(
        [ConfigFile("starter")], [*overrides, *(Override(path, scalar(value), path) for path, value in settings.items())], environ={}
    )


def planned(batch_s: float) -> Planned:
    kinds = {f"w{number}": MachineKind(steps_per_s=1 / (batch_s * slower)) for number, slower in enumerate(SLOWDOWN, 1)}
    run = variant({"strategy.kind": "async", "cluster.num_workers": len(SLOWDOWN)}).run
    return plan(build_meta_model(run), kinds, variant, lambda *_: None)


def measure() -> Iterator[Row]:
    batch_s = measured().batch_s
    found = planned(batch_s)
    chosen, tried = found.first.candidate, list[Candidate]()
    for candidate in dict.fromkeys(one.candidate._replace(codec=chosen.codec, batch=chosen.batch) for one in found.predictions):
        if why := _unseen(candidate, batch_s):
            print(f"left out: {candidate}: {why}", file=sys.stderr)
        else:
            tried.append(candidate)
    rates = measured_rates(tried)
    best = max(rates, key=lambda one: rates[one])
    note = f"the best was {best}, of {len(rates)}"
    yield Row(f"plan-truth, {chosen}", rates[chosen], rates[best], "samples/s", rates[chosen] / rates[best], "≥ 0.9", note)


def measured_rates(candidates: list[Candidate]) -> dict[Candidate, float]:
    """Samples a second of real runs."""
    seen: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
    for _ in range(_ROUNDS):
        for candidate, rates in seen.items():
            rates.append(real_runs.watched(COMMON | _settings(candidate), SLOWDOWN, "", SECONDS).samples_per_s)
            print(f"{candidate}: {rates[-1]:.0f} samples/s for real", file=sys.stderr, flush=True)
    return {candidate: statistics.median(rates) for candidate, rates in seen.items()}


def _settings(candidate: Candidate) -> dict[str, str]:
    settings = candidate.settings(len(SLOWDOWN))
    return {path: scalar(value) for path, value in settings.items() if path != "cluster.workers"}


def _unseen(candidate: Candidate, batch_s: float) -> str:
    """Why a real run of a few seconds tells nothing of a candidate; empty: it does."""
    settings = dict(candidate.strategy)
    if Strategy.kinds[settings["kind"]].leases_units:
        return "units are leased"
    contribution_s = SLOWDOWN[-1] * batch_s * int(COMMON["training.gradient_accumulation_steps"]) * settings.get("inner_steps", 1)
    return f"a contribution of the slowest takes {contribution_s:.0f} s" if contribution_s * _LEAST_SENT > SECONDS else ""
