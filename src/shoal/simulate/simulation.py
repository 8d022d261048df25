"""From a configuration to its simulation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from shoal import data
from shoal.config import Run
from shoal.errors import ShoalError
from shoal.runs.build_run import RunParts, assemble
from shoal.runs.coordinator_run import RunAgreement
from shoal.runs.coordinator_setup import agree, plan_for
from shoal.runs.live_objects import NO_LIVE_OBJECTS, data_for
from shoal.runs.run_size import needed_contributions, ranks_per_worker
from shoal.simulate.machines import CALM, SimulatedMachine, Weather, weather_named, weather_of
from shoal.simulate.meta_model import MetaModel, build_meta_model, data_of, is_read, shards_of
from shoal.simulate.report import SimulationReport
from shoal.simulate.virtual_run import Scenario, VirtualRun
from shoal.simulate.worker_updates import LearnedUpdates, PlainDescent, TimedUpdates

_TIMED = 5
"""Steps that are timed, after a first one that is not."""
_MOST_TIMED_GB = 2.0
"""What training may take at most for a batch to be timed here: a larger one would take minutes, and memory that a laptop lacks."""
_HERE = "here"
_MOST_NAMED = 8


class SimulationOptions(NamedTuple):
    """What a simulation is asked for; null: what the settings say."""

    workers: int | None = None
    weather: str | None = None
    hours: float | None = None
    seed: int = 0
    step_s: float | None = None
    learns: bool = False
    false_share: float = 0.0
    slowdown: Mapping[str, float] = MappingProxyType({})
    """By name: a worker sleeps after each step, so that the step takes so many times as long."""
    cores: float | None = None
    """Cores of the one machine that all workers are processes of; null: each has a machine of its own."""
    others: float = 0.0
    """Processes of other people that compute there all the time."""
    flops: float | None = None
    """Operations a second that a machine of usual speed reaches in training, in place of what a batch takes."""
    samples: int | None = None
    """Of the data, which is then not read."""


def simulate(
    run: Run,
    machines: Sequence[SimulatedMachine] | Weather | int,
    weather: str = "calm",
    hours: float = 1.0,
    seed: int = 0,
    learns: bool = False,
    samples: int | None = None,
) -> SimulationReport:
    """Simulate a run on these machines, or on so many in a weather, for some virtual hours. Raises ShoalError where it cannot be.

    `learns`: workers really learn; else only times, bytes and decisions are simulated. `samples`: how many the data has, which is then not
    read.
    """
    if isinstance(machines, int):
        return simulated(run, SimulationOptions(machines, weather, hours, seed, learns=learns, samples=samples), None)
    found = machines if isinstance(machines, Weather) else weather_of(machines)
    agreed = agreed_for(run, len(found.machines), _data_for(run, SimulationOptions(learns=learns, samples=samples)), learns)
    return _reported(VirtualRun(scenario_of(run, agreed, learns), found, hours, seed), agreed)


def simulated(run: Run, asked: SimulationOptions, look: Callable[[int, VirtualRun], None] | None) -> SimulationReport:
    """Simulate what was asked for. Where no hours are given, `simulation` of the settings says how many heartbeats and rounds of scheduling
    there are; `look` is called at each round of scheduling, with its number."""
    count = asked.workers or run.cluster.num_workers or max(1, needed_contributions(run))
    samples, settings = _data_for(run, asked), run.simulation
    agreed = agreed_for(run, count, samples, asked.learns)
    step_s = asked.step_s or step_s_for(MetaModel(run, agreed.parts._replace(data=samples)), asked)
    heartbeats_s = settings.heartbeats * settings.heartbeat_interval_s
    rounds_s = settings.scheduling_rounds * settings.scheduling_interval_s
    hours = asked.hours or max(heartbeats_s, rounds_s) / 3600
    scenario = scenario_of(run, agreed, asked.learns)
    if asked.hours is None:
        scenario = scenario._replace(plan=scenario.plan._replace(heartbeat_interval_s=settings.heartbeat_interval_s))
    weather = weather_for(run, asked, count, step_s, hours)
    if asked.hours is None:  # a few heartbeats of workers that are there already
        weather = weather._replace(machines=tuple(one._replace(start_s=0.0) for one in weather.machines))
    world = VirtualRun(scenario, weather, hours, asked.seed)
    if look is not None and asked.hours is None:
        _look_at_rounds(world, look, settings.scheduling_rounds, settings.scheduling_interval_s)
    return _reported(world, agreed)


def _reported(world: VirtualRun, agreed: RunAgreement) -> SimulationReport:
    report = world.run()
    report.data = agreed.parts.data.info.name
    return report


def _look_at_rounds(world: VirtualRun, look: Callable[[int, VirtualRun], None], rounds: int, interval_s: float) -> None:
    for number in range(1, rounds + 1):
        world.timeline.at(number * interval_s, look, number, world)


def weather_for(run: Run, asked: SimulationOptions, count: int, step_s: float, hours: float) -> Weather:
    """The machines of a simulation, as they were asked for. Raises ShoalError for a name that none of them has."""
    return _on_one_machine(_weather(run, asked, count, step_s, hours), asked)


def _weather(run: Run, asked: SimulationOptions, count: int, step_s: float, hours: float) -> Weather:
    """The weather that was asked for; else the machines that the settings list, as far as they are known."""
    if asked.weather is not None or not run.cluster.workers:
        return weather_named(asked.weather or "calm", count, step_s, hours, asked.seed, asked.false_share)
    listed_ones = run.cluster.workers[:count]
    names = [*listed_ones, *(f"w{number}" for number in range(len(listed_ones) + 1, count + 1))]
    flops = [host.flops for host in run.cluster.hosts.values() if host.flops]
    usual = statistics.median(flops) if flops else 1.0
    found = []
    for name in names:
        host = run.cluster.hosts.get(name)
        speed = host.flops / usual if host is not None and host.flops else 1.0
        link = CALM._replace(mbit_per_s=host.bandwidth_mbps) if host is not None and host.bandwidth_mbps else CALM
        found.append(SimulatedMachine(name, step_s / speed, link))
    return weather_of(found)


def _on_one_machine(weather: Weather, asked: SimulationOptions) -> Weather:
    """The same machines, as slow as was asked for, and as processes that share cores where it says so. Raises ShoalError for a name that
    none of them has."""
    names = [one.name for one in weather.machines]
    for name in asked.slowdown:
        if name not in names:
            raise ShoalError(f"--slowdown: there is no worker `{name}`; there are {', '.join(names[:_MOST_NAMED])}")
    host = _HERE if asked.cores is not None else ""
    machines = tuple(one._replace(slowdown=asked.slowdown.get(one.name, 1.0), host=host) for one in weather.machines)
    return weather._replace(machines=machines, cores={} if asked.cores is None else {_HERE: asked.cores}, others=asked.others)


def agreed_for(run: Run, workers: int, samples: data.Data, learns: bool) -> RunAgreement:
    """What a run comes to with so many workers: with networks that can learn, or with their shapes only. Raises ShoalError where it cannot
    be simulated."""
    if run.alone:
        raise ShoalError("this run trains alone and has no workers to simulate: choose another strategy, as in --set strategy.kind=async")
    if run.strategy.gives_answers:
        raise ShoalError(f"workers of the strategy {run.strategy.kind} answer prompts, and how long answers become cannot be foretold")
    if not learns:
        return build_meta_model(run, samples).agreed(run, workers)
    return agree(run, shards_of(run, samples.train, workers), None, None, NO_LIVE_OBJECTS, samples)


def _data_for(run: Run, asked: SimulationOptions) -> data.Data:
    if asked.learns and asked.samples is not None:
        raise ShoalError("--learn: workers that learn read the data, so --samples cannot say how many samples there are")
    return data_for(run, NO_LIVE_OBJECTS, lambda: data.load(run)) if asked.learns else data_of(run, asked.samples)


def scenario_of(run: Run, agreed: RunAgreement, learns: bool) -> Scenario:
    """What is simulated of a run: its plan, its policies, and what its workers send."""
    plan, policies, engine = plan_for(run, agreed), agreed.policies, agreed.parts.single
    if learns:
        learner = policies.apply.learner(engine, agreed.spans)
        updates = LearnedUpdates(agreed.parts, policies, agreed.expected, agreed.spans)
        return Scenario(plan, policies, learner, updates, run.updates.codec.kind, run.strategy.kind)
    batches = run.training.gradient_accumulation_steps * ranks_per_worker(run)
    each = run.training.batch_size or 1
    timing = TimedUpdates(policies, run.updates, engine.vector.numel(), each, batches, plan.batches_per_shard)
    return Scenario(plan._replace(spans=()), policies, PlainDescent(timing.size), timing, run.updates.codec.kind, run.strategy.kind)


def step_s_for(found: MetaModel, asked: SimulationOptions) -> float:
    """What a batch takes: as its operations say, or as it takes here. Raises ShoalError where it cannot be timed here."""
    run = found.run
    if asked.flops is not None:
        return found.operations(run) / asked.flops
    needs_gb, told = found.memory(run).gb, "say what it takes with --step-s S, or how fast a machine is with --flops F"
    if needs_gb > _MOST_TIMED_GB:
        raise ShoalError(f"a batch of this model needs {needs_gb:,.1f} GB, which is too much to time one here: {told}")
    return measured_step_s(to_be_timed(found, asked.samples, told))


def to_be_timed(found: MetaModel, samples: int | None, told: str) -> RunParts:
    """What computes a few batches here. `samples`: how many the data has, where it is not read; `told`: what to do where that is not
    enough. Raises ShoalError."""
    run = found.run
    if not is_read(run, samples) and run.chosen_task.needs in ("pairs", "prompts"):
        raise ShoalError(f"a batch of the task {run.chosen_task.kind} cannot be timed without its data: {told}")
    return assemble(run, length=lambda _: 1, known=found.parts.data)


def measured_step_s(parts: RunParts) -> float:
    """What a batch takes on this machine: the best of a few, since something else may go on here."""
    engine, feed, found = parts.single, parts.feed, []
    for _ in range(_TIMED + 1):
        batch = next(feed)
        began = time.perf_counter()
        engine.gradients([batch])
        if engine.device.type == "cuda":  # it may not be done with what it was told to compute
            torch.cuda.synchronize(engine.device)
        found.append(time.perf_counter() - began)
    feed.close()
    return min(found[1:])
