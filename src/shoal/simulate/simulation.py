"""Builds and runs the simulation of a configuration."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from shoal import data
from shoal.config import Run
from shoal.config.schema.cluster import Host
from shoal.errors import ShoalError
from shoal.runs.build_run import RunParts, assemble
from shoal.runs.coordinator_run import RunAgreement
from shoal.runs.coordinator_setup import agree, plan_for
from shoal.runs.live_objects import NO_LIVE_OBJECTS, data_for
from shoal.runs.run_size import needed_contributions, ranks_per_worker
from shoal.runs.training.contribution_scorer import HeldOutScorer
from shoal.simulate.machines import CALM, SimulatedMachine, Weather, weather_named, weather_of
from shoal.simulate.meta_model import MetaModel, build_meta_model, data_of, is_read, shards_of
from shoal.simulate.report import SimulationReport
from shoal.simulate.virtual_run import Scenario, VirtualRun
from shoal.simulate.worker_updates import LearnedUpdates, PlainDescent, TimedUpdates

_TIMED = 5
"""Timed steps, after one that is not timed."""
_MOST_TIMED_GB = 2.0
"""Largest training memory for which a batch is timed here: a larger model takes minutes, and more memory than a laptop has."""
_HERE = "here"
_MOST_NAMED = 8


class SimulationOptions(NamedTuple):
    """Options of a simulation; None: as the settings say."""

    workers: int | None = None
    weather: str | None = None
    hours: float | None = None
    seed: int = 0
    step_s: float | None = None
    learns: bool = False
    false_share: float = 0.0
    slowdown: Mapping[str, float] = MappingProxyType({})
    """By worker: it sleeps after each step, so that the step takes this many times as long."""
    cores: float | None = None
    """Cores of the one machine on which all workers run; None: each has its own machine."""
    others: float = 0.0
    """Unrelated processes that always compute on that machine."""
    flops: float | None = None
    """Operations per second of a machine of median speed, in place of `step_s`."""
    samples: int | None = None
    """Number of samples of the data, which is then not read."""


def simulate(
    run: Run,
    machines: Sequence[SimulatedMachine] | Weather | int,
    weather: str = "calm",
    hours: float = 1.0,
    seed: int = 0,
    learns: bool = False,
    samples: int | None = None,
) -> SimulationReport:
    """Simulate a run on these machines, or on this number of machines of a `weather`. Raises ShoalError for a run that cannot be simulated.

    `learns`: workers compute real updates; else only times, bytes and decisions are simulated. `samples`: number of samples of the data,
    which is then not read.
    """
    if isinstance(machines, int):
        return simulated(run, SimulationOptions(machines, weather, hours, seed, learns=learns, samples=samples), None)
    known = machines if isinstance(machines, Weather) else weather_of(machines)
    agreed = agreed_for(run, len(known.machines), _data_for(run, SimulationOptions(learns=learns, samples=samples)), learns)
    return _reported(VirtualRun(scenario_of(run, agreed, learns), known, hours, seed), agreed)


def simulated(run: Run, asked: SimulationOptions, on_round: Callable[[int, VirtualRun], None] | None) -> SimulationReport:
    """Simulate a run with these options. Without `hours`, the section `simulation` gives the number of heartbeats and scheduling rounds,
    and `on_round` is called in each scheduling round with its number."""
    count = asked.workers or run.cluster.num_workers or max(1, needed_contributions(run))
    samples, settings = _data_for(run, asked), run.simulation
    agreed = agreed_for(run, count, samples, asked.learns)
    step_s = asked.step_s or step_s_for(MetaModel(run, agreed.parts._replace(data=samples)), asked)
    heartbeats_s = settings.heartbeats * settings.heartbeat_interval_s
    rounds_s = settings.scheduling_rounds * settings.scheduling_interval_s
    hours = asked.hours or max(heartbeats_s, rounds_s) / 3600
    scenario, weather = scenario_of(run, agreed, asked.learns), weather_for(run, asked, count, step_s, hours)
    if asked.hours is None:  # a few heartbeats of workers that have started already
        scenario = scenario._replace(plan=scenario.plan._replace(heartbeat_interval_s=settings.heartbeat_interval_s))
        weather = weather._replace(machines=tuple(one._replace(start_s=0.0) for one in weather.machines))
    world = VirtualRun(scenario, weather, hours, asked.seed)
    if on_round is not None and asked.hours is None:
        for number in range(1, settings.scheduling_rounds + 1):
            world.timeline.at(number * settings.scheduling_interval_s, on_round, number, world)
    return _reported(world, agreed)


def _reported(world: VirtualRun, agreed: RunAgreement) -> SimulationReport:
    report = world.run()
    report.data = agreed.parts.data.info.name
    return report


def weather_for(run: Run, asked: SimulationOptions, count: int, step_s: float, hours: float) -> Weather:
    """The machines that the options ask for, with slowdowns and shared cores. Raises ShoalError for the name of an unknown worker."""
    weather = _weather(run, asked, count, step_s, hours)
    names = [one.name for one in weather.machines]
    for name in asked.slowdown:
        if name not in names:
            raise ShoalError(f"--slowdown: there is no worker `{name}`; there are {', '.join(names[:_MOST_NAMED])}")
    host = _HERE if asked.cores is not None else ""
    machines = tuple(one._replace(slowdown=asked.slowdown.get(one.name, 1.0), host=host) for one in weather.machines)
    return weather._replace(machines=machines, cores={} if asked.cores is None else {_HERE: asked.cores}, others=asked.others)


def _weather(run: Run, asked: SimulationOptions, count: int, step_s: float, hours: float) -> Weather:
    """The named profile of the options; else the machines that the settings list, with their known speeds and links."""
    if asked.weather is not None or not run.cluster.workers:
        return weather_named(asked.weather or "calm", count, step_s, hours, asked.seed, asked.false_share)
    listed_ones = run.cluster.workers[:count]
    names = [*listed_ones, *(f"w{number}" for number in range(len(listed_ones) + 1, count + 1))]
    flops = [host.flops for host in run.cluster.hosts.values() if host.flops]
    usual = statistics.median(flops) if flops else 1.0
    found = []
    for name in names:
        host = run.cluster.hosts.get(name, Host())
        link = CALM._replace(mbit_per_s=host.bandwidth_mbps) if host.bandwidth_mbps else CALM
        found.append(SimulatedMachine(name, step_s / ((host.flops or usual) / usual), link))
    return weather_of(found)


def agreed_for(run: Run, workers: int, samples: data.Data, learns: bool) -> RunAgreement:
    """The agreement of a run with this number of workers; `learns`: with real networks. Raises ShoalError if it cannot be simulated."""
    if run.alone:
        raise ShoalError("this run trains alone and has no workers to simulate: choose another strategy, as in --set strategy.kind=async")
    if run.strategy.gives_answers:
        raise ShoalError(f"workers of the strategy {run.strategy.kind} generate answers, whose length a simulation cannot predict")
    if not learns:
        return build_meta_model(run, samples).agreed(run, workers)
    return agree(run, shards_of(run, samples.train, workers), None, None, NO_LIVE_OBJECTS, samples)


def _data_for(run: Run, asked: SimulationOptions) -> data.Data:
    if asked.learns and asked.samples is not None:
        raise ShoalError("--learn: workers that learn read the data, so --samples cannot say how many samples there are")
    return data_for(run, NO_LIVE_OBJECTS, lambda: data.load(run)) if asked.learns else data_of(run, asked.samples)


def scenario_of(run: Run, agreed: RunAgreement, learns: bool) -> Scenario:
    """The parts of a run that are simulated: its plan, its policies, and its workers' updates."""
    plan, policies, engine = plan_for(run, agreed), agreed.policies, agreed.parts.single
    if learns:
        learner = policies.apply.learner(engine, agreed.spans)
        if run.updates.scorer.enabled:
            plan = plan._replace(scorer=HeldOutScorer(agreed.parts, random.Random(run.seed)))
        updates = LearnedUpdates(agreed.parts, policies, agreed.expected, agreed.spans)
        return Scenario(plan, policies, learner, updates, run.updates.codec.kind, run.strategy.kind)
    batches = run.training.gradient_accumulation_steps * ranks_per_worker(run)
    each = run.training.batch_size or 1
    timing = TimedUpdates(policies, run.updates, engine.vector.numel(), each, batches, plan.batches_per_shard)
    return Scenario(plan._replace(spans=()), policies, PlainDescent(timing.size), timing, run.updates.codec.kind, run.strategy.kind)


def step_s_for(found: MetaModel, asked: SimulationOptions) -> float:
    """Seconds per batch: from its operations and the option `flops`, or measured here. Raises ShoalError where it cannot be measured."""
    run = found.run
    if asked.flops is not None:
        return found.operations(run) / asked.flops
    needs_gb, advice = found.memory(run).gb, "say what it takes with --step-s S, or how fast a machine is with --flops F"
    if needs_gb > _MOST_TIMED_GB:
        raise ShoalError(f"a batch of this model needs {needs_gb:,.1f} GB, which is too much to time one here: {advice}")
    return measured_step_s(to_be_timed(found, asked.samples, advice))


def to_be_timed(found: MetaModel, samples: int | None, advice: str) -> RunParts:
    """The run's parts, to time a few batches here. `samples`: number of samples of data that is not read; `advice`: end of the message of
    the ShoalError for a task that cannot be timed without its data."""
    run = found.run
    if not is_read(run, samples) and run.chosen_task.needs in ("pairs", "prompts"):
        raise ShoalError(f"a batch of the task {run.chosen_task.kind} cannot be timed without its data: {advice}")
    return assemble(run, length=lambda _: 1, known=found.parts.data)


def measured_step_s(parts: RunParts) -> float:
    """Seconds per batch on this machine: the shortest of a few, since other programs may run here."""
    engine, feed, times_s = parts.single, parts.feed, []
    for _ in range(_TIMED + 1):
        batch = next(feed)
        began = time.perf_counter()
        engine.gradients([batch])
        if engine.device.type == "cuda":  # kernels run asynchronously
            torch.cuda.synchronize(engine.device)
        times_s.append(time.perf_counter() - began)
    feed.close()
    return min(times_s[1:])
