"""Chooses settings for a model and given machines: simulates times and bytes of candidates, and names the best one with the reason.

A coarse pass simulates every strategy for a short time; a fine pass simulates the fastest ones for longer, with other codecs and batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shoal.config import Run
from shoal.config.load import LoadedConfig
from shoal.config.machines import MachineKind
from shoal.config.problems import errors
from shoal.config.ranks import STRATEGY_ALONE
from shoal.config.schema.strategy import Strategy
from shoal.errors import ShoalError
from shoal.runs.build_run import feed_for_seat
from shoal.runs.coordinator_run import RunAgreement
from shoal.simulate.machines import SimulatedMachine, weather_of
from shoal.simulate.meta_model import (
    APART,
    SHARING,
    MetaModel,
    best_sharing,
    devices_of,
    machines_of,
    machines_that_fit,
    one_by_one,
    with_sharded_engine,
)
from shoal.simulate.pipeline_plans import PipelineCandidate, Variant, pipeline_plans
from shoal.simulate.report import SimulationReport
from shoal.simulate.simulation import scenario_of
from shoal.simulate.virtual_run import VirtualRun
from shoal.strategies import run_length
from shoal.updates import codecs

CODECS = ("none", "fp16", "int8", "int4")
"""From lossless to most lossy. The last is only tried for updates of many inner steps."""
_COARSE = ("none", "int8")
_MANY_STEPS = 50
_NEAR = 0.95
"""Candidates with at least this share of the best throughput count as equally fast: the simulation is not more accurate than that."""
_FINEST = 3
"""Candidates of the coarse pass that the fine pass simulates again."""
_CONTRIBUTIONS = {"coarse": 120, "fine": 400}
"""Contributions per simulation, or more until the slowest machine has sent three."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 12
_LONGER = (1, 10, 100)
"""The time of a simulation is multiplied by these, in turn, until an update is made in it."""

Progress = Callable[[int, int, str], None]


class Candidate(NamedTuple):
    """Settings that are tried."""

    strategy: tuple[tuple[str, Any], ...]
    """Settings of the strategy, `kind` first."""
    codec: str
    batch: int
    engine: str = ""
    """Engine of workers with several devices; empty: as in the settings."""
    devices: int = 1
    sharing: int = 1
    """Devices that share the experts of a mixture."""

    def settings(self, workers: int) -> dict[str, Any]:
        """Changed settings. The planned machines replace those that the settings list."""
        own = {f"strategy.{name}": value for name, value in self.strategy}
        machines = {"cluster.num_workers": workers, "cluster.workers": []}
        if self.engine:
            own |= _engine_settings(self.engine, self.devices, self.sharing)
        return own | machines | {"updates.codec.kind": self.codec, "training.batch_size": self.batch}

    def __str__(self) -> str:
        (_, kind), *others = self.strategy
        engine = [_engine_name(self.engine, self.devices, self.sharing)] if self.engine else []
        return " ".join([kind, *(f"{name}={value}" for name, value in others), *engine])


class MachineCandidate(NamedTuple):
    """One machine of several devices, without a coordinator, as settings."""

    engine: str
    devices: int
    sharing: int
    batch: int
    codec: str = "none"

    def settings(self) -> dict[str, Any]:
        return {
            "strategy.kind": STRATEGY_ALONE,
            "training.batch_size": self.batch,
            **_engine_settings(self.engine, self.devices, self.sharing),
        }

    def __str__(self) -> str:
        return f"{STRATEGY_ALONE}, {_engine_name(self.engine, self.devices, self.sharing)}"


def _engine_settings(engine: str, devices: int, sharing: int) -> dict[str, Any]:
    shared = {"engine.expert_parallel": sharing} if sharing > 1 else {}
    return {"engine.kind": engine, "launch.devices_per_node": devices} | shared


def _engine_name(engine: str, devices: int, sharing: int) -> str:
    return f"{engine} over {devices}" + (f", experts over {sharing}" if sharing > 1 else "")


class Prediction(NamedTuple):
    """The simulated performance of a candidate."""

    candidate: Candidate | PipelineCandidate | MachineCandidate
    loaded: LoadedConfig
    workers: int
    samples_per_s: float
    bytes_per_sample: float
    apart: float
    """Batches, of the configured size, that a worker computes before it receives the others' updates."""
    samples: int
    """In the whole run."""
    memory_gb: float
    price_per_hour: float
    order: int
    """Its position among all candidates."""

    @property
    def hours(self) -> float:
        return self.samples / self.samples_per_s / 3600

    @property
    def bytes(self) -> float:
        return self.bytes_per_sample * self.samples

    @property
    def cost(self) -> float:
        return self.price_per_hour * self.hours


class Planned(NamedTuple):
    predictions: list[Prediction]
    """In the order of throughput, the fastest first."""
    first: Prediction
    reason: str
    refused: dict[str, str]
    """Candidates that cannot be run, and why."""
    alone: tuple[str, float] | None
    """The machine that is fastest alone, and its samples per second without a coordinator; None: the model fits no machine."""


def plan(found: MetaModel, kinds: dict[str, MachineKind], variant: Variant, progress: Progress, seed: int = 0) -> Planned:
    """Simulate all candidates. `variant` loads the run with some settings changed. Raises ShoalError where no candidate can run."""
    found = found._replace(run=with_sharded_engine(found, devices_of(kinds)))  # with the least memory per device
    every, kinds = kinds, machines_that_fit(found, _with_batch(found, 1), kinds)
    planner = _Planner(found, kinds, variant, progress, seed)
    planner.try_pipelines(every)
    if kinds:
        planner.try_one_machine()
        planner.try_all(list(_coarse(found, kinds)), "coarse")
        planner.try_all(list(_fine(planner.ranked(Candidate), found, kinds)), "fine")
    ranked = planner.ranked()
    if not ranked:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(planner.refused.items())[:3])
        raise ShoalError(f"no strategy can train this on these machines. {why}")
    first = chosen(ranked)
    return Planned(ranked, first, reason_for(first, ranked), planner.refused, _alone(found, kinds) if kinds else None)


def _alone(found: MetaModel, kinds: dict[str, MachineKind]) -> tuple[str, float]:
    run = _with_batch(found, _largest_batch(found, kinds, 1))
    batch, fitting = run.training.batch_size or 1, machines_that_fit(found, run, kinds)
    rates = {name: batch / found.worker_step_s(run, kind) for name, kind in fitting.items()}
    return max(rates.items(), key=lambda one: one[1])


class _Planner:
    def __init__(self, found: MetaModel, kinds: dict[str, MachineKind], variant: Variant, progress: Progress, seed: int) -> None:
        self._found, self._kinds, self._variant, self._progress, self._seed = found, kinds, variant, progress, seed
        self._predictions: dict[Candidate | str, Prediction] = {}
        self.refused: dict[str, str] = {}

    def ranked(self, kind: type = object) -> list[Prediction]:
        """Predictions for candidates of this type, the fastest first."""
        found = [one for one in self._predictions.values() if isinstance(one.candidate, kind)]
        return sorted(found, key=lambda one: -one.samples_per_s)

    def try_pipelines(self, kinds: dict[str, MachineKind]) -> None:
        """Pipelines over several machines, also over those whose memory is too small for the whole model."""
        try:
            plans = pipeline_plans(self._found, kinds, self._variant)
        except ShoalError as error:
            self.refused["local, pipeline"] = _first_reason(error)
            return
        for plan in plans:
            each = plan.samples_per_s * plan.step.seconds  # samples per step, after which all stages have the new weights
            apart = each / (self._found.run.training.batch_size or 1)
            figures = (len(plan.stages), plan.samples_per_s, plan.step.bytes / each, apart, plan.samples, plan.memory_gb)
            order = len(self._predictions)
            self._predictions[str(plan.candidate)] = Prediction(plan.candidate, plan.loaded, *figures, plan.price_per_hour, order)

    def try_one_machine(self) -> None:
        """A single machine of several devices needs no coordinator."""
        machines = one_by_one(self._kinds)
        kind = machines[0][1]
        for engine, sharing in _engines(self._found, self._kinds) if len(machines) == 1 and kind.devices > 1 else ():
            candidate = MachineCandidate(engine, kind.devices, sharing, _largest_batch(self._found, self._kinds, 1))
            try:
                self._predictions[str(candidate)] = self._predict_machine(candidate, kind)
            except ShoalError as error:
                self.refused[str(candidate)] = _first_reason(error)

    def _predict_machine(self, candidate: MachineCandidate, kind: MachineKind) -> Prediction:
        found, loaded = self._found, self._variant(candidate.settings())
        run = loaded.run  # raises ConfigError for settings that contradict each other
        if not machines_that_fit(found, run, self._kinds):
            raise ShoalError(f"with a batch of {candidate.batch} each device needs {found.memory(run).gb:.3g} GB")
        each = candidate.batch * run.training.gradient_accumulation_steps * kind.devices
        steps = run_length.alone(run, feed_for_seat(run, found.parts.data).batches_per_epoch, kind.devices)
        rate, apart = candidate.batch / found.worker_step_s(run, kind), each / (found.run.training.batch_size or 1)
        memory_gb, order = found.memory(run).gb, len(self._predictions)
        return Prediction(candidate, loaded, 1, rate, 0.0, apart, steps * each, memory_gb, kind.price_per_hour, order)

    def try_all(self, candidates: list[Candidate], depth: str) -> None:
        for number, candidate in enumerate(candidates):
            self._progress(number + 1, len(candidates), f"{depth}: {candidate}, codec {candidate.codec}, batch {candidate.batch}")
            try:
                self._predictions[candidate] = self._predict(candidate, _CONTRIBUTIONS[depth])
            except ShoalError as error:
                self.refused[str(candidate)] = _first_reason(error)

    def _predict(self, candidate: Candidate, contributions: int) -> Prediction:
        found = self._found
        workers = sum(kind.count for kind in self._kinds.values())
        loaded = self._variant(candidate.settings(workers))
        run = loaded.run  # raises ConfigError for settings that contradict each other
        fitting = machines_that_fit(found, run, self._kinds)
        machines = machines_of(found, run, fitting)
        if not machines:
            raise ShoalError(f"with a batch of {candidate.batch} it fits no machine: it needs {found.memory(run).gb:.3g} GB")
        if len(machines) != workers:
            loaded = self._variant(candidate.settings(len(machines)))
            run = loaded.run
        agreed = found.agreed(run, len(machines))
        span_s = _span_s(found, agreed, loaded, machines, contributions)
        report = self._simulated(run, agreed, machines, span_s)
        price = sum(kind.count * kind.price_per_hour for kind in fitting.values())
        order = self._predictions[candidate].order if candidate in self._predictions else len(self._predictions)
        rate, each = _steady(report)
        length = agreed.length
        batches_apart = length.batches_per_contribution * (1 + report.mean_lag * report.accepted / max(1, report.versions) / len(machines))
        apart = batches_apart * candidate.batch / (found.run.training.batch_size or 1)
        batches = length.batches or length.steps * length.batches_per_step  # in the whole run
        samples = report.samples if report.finished else batches * candidate.batch
        return Prediction(candidate, loaded, len(machines), rate, each, apart, samples, found.memory(run).gb, price, order)

    def _simulated(self, run: Run, agreed: RunAgreement, machines: list[SimulatedMachine], span_s: float) -> SimulationReport:
        """A simulation of this time; of a longer one where no update was made in it, since joining takes longer than a few quick steps."""
        for longer in _LONGER:
            scenario = scenario_of(run, agreed, learns=False)
            report = VirtualRun(scenario, weather_of(machines), longer * span_s / 3600, self._seed).run()
            if report.samples:
                break
        return report


def _first_reason(error: ShoalError) -> str:
    problems = errors(getattr(error, "problems", ()))
    return problems[0].message if problems else str(error)


# --- candidates ---------------------------------------------------------------------------------------


def _coarse(found: MetaModel, kinds: dict[str, MachineKind]) -> Iterator[Candidate]:
    workers, batch, devices = sum(kind.count for kind in kinds.values()), _largest_batch(found, kinds, 1), devices_of(kinds)
    for name, section in Strategy.kinds.items():
        for settings, codec, (engine, sharing) in itertools.product(section.worth_trying(workers), _COARSE, _engines(found, kinds)):
            yield Candidate((("kind", name), *settings.items()), codec, batch, engine, devices, sharing)


def _engines(found: MetaModel, kinds: dict[str, MachineKind]) -> list[tuple[str, int]]:
    """Engines to try, and how many devices share experts: each number is a setting of its own only where it is the best one."""
    devices = devices_of(kinds)
    if devices == 1:
        return [("", 1)]
    best = best_sharing(found, devices, kinds)
    return [(APART, 1), (SHARING, 1), *([(SHARING, best)] if best > 1 else [])]


def _fine(ranked: list[Prediction], found: MetaModel, kinds: dict[str, MachineKind]) -> Iterator[Candidate]:
    """The fastest strategies, and equally fast ones whose workers diverge less: with other codecs, and batches that fit all machines."""
    near = [one for one in ranked if one.samples_per_s >= _NEAR * ranked[0].samples_per_s]
    best = [*sorted(near, key=_divergence)[:_FINEST], *ranked[:_FINEST]]
    seen = set[Candidate]()
    for one in best:
        base = one.candidate
        assert isinstance(base, Candidate)
        steps = dict(base.strategy).get("inner_steps", 1)
        others = [codec for codec in CODECS if codec != CODECS[-1] or steps >= _MANY_STEPS]
        batches = [base._replace(batch=batch) for batch in _batches(found, kinds)]
        for candidate in [base, *(base._replace(codec=codec) for codec in others), *batches]:
            if candidate not in seen:
                seen.add(candidate)
                yield candidate


def _batches(found: MetaModel, kinds: dict[str, MachineKind]) -> list[int]:
    """Twice the batch; or, where the batch does not fit all machines, the largest one that does."""
    batch, everywhere = found.run.training.batch_size or 1, _largest_batch(found, kinds, len(kinds))
    return [2 * batch] if everywhere == batch else [everywhere]


def _largest_batch(found: MetaModel, kinds: dict[str, MachineKind], least: int) -> int:
    """The batch of the settings, halved until training fits at least `least` kinds of machines."""
    batch = found.run.training.batch_size or 1
    while batch > 1 and len(machines_that_fit(found, _with_batch(found, batch), kinds)) < least:
        batch //= 2
    return batch


def _with_batch(found: MetaModel, batch: int) -> Run:
    return found.run.replace(training=found.run.training.replace(batch_size=batch))


# --- results of a simulation -------------------------------------------------------------------------


def _span_s(found: MetaModel, agreed: RunAgreement, loaded: LoadedConfig, machines: list[SimulatedMachine], contributions: int) -> float:
    """Virtual seconds to simulate: between 3 and 12 rounds of the slowest machine, by the contributions of all."""
    size, batches = found.parameters, agreed.length.batches_per_contribution
    bits = 8.0 * (codecs.encoded_bytes(loaded.run.updates.codec, size) + 4 * size)
    times_s = [one.step_s * batches + bits / (1e6 * (one.link.mbit_per_s or 1e6)) + one.link.round_trip_ms / 500 for one in machines]
    slowest, rate = max(times_s), sum(1 / one for one in times_s)
    return max(_LEAST_ROUNDS * slowest, min(_MOST_ROUNDS * slowest, contributions / rate))


def _steady(report: SimulationReport) -> tuple[float, float]:
    """Samples per second and bytes per sample, from the first version to the last. Raises ShoalError where there is none."""
    first, last = report.first, report.last
    if first is None or last is None or not report.samples:
        raise ShoalError("no update was made in the time in which the slowest machine sends three")
    if last.samples == first.samples or last.hours == first.hours:
        return report.samples_per_s, (report.received_bytes + report.sent_bytes) / report.samples
    learned = last.samples - first.samples
    return learned / (3600 * (last.hours - first.hours)), (last.bytes - first.bytes) / learned


# --- the choice ---------------------------------------------------------------------------------------


def _divergence(one: Prediction) -> tuple[float, int, int]:
    return round(one.apart), CODECS.index(one.candidate.codec), one.order


def chosen(ranked: list[Prediction]) -> Prediction:
    """Of the predictions that count as equally fast as the fastest: the one whose workers diverge least, then the one with the least lossy
    codec. Workers that diverge need more samples for the same loss, so throughput alone is no measure."""
    near = [one for one in ranked if one.samples_per_s >= _NEAR * ranked[0].samples_per_s]
    return min(near, key=_divergence)


def reason_for(first: Prediction, ranked: list[Prediction]) -> str:
    fastest = ranked[0]
    if first is fastest:
        others = [one for one in ranked if one.samples_per_s >= _NEAR * fastest.samples_per_s]
        return "it is the fastest" + (", and of those that are about as fast its workers are least apart" if len(others) > 1 else "")
    share = first.samples_per_s / fastest.samples_per_s
    return f"it has {share:.0%} of the throughput of the fastest, and of those that are about as fast its workers are least apart"
