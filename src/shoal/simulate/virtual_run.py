"""A run in virtual time: the real coordinator and its driver, and virtual workers with real sessions over simulated links."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from shoal.coordinator import Coordinator
from shoal.coordinator.driver import TICK_S
from shoal.coordinator.effects import Published
from shoal.coordinator.events import RunConcluded
from shoal.coordinator.run_plan import Learner, RunPlan
from shoal.simulate.coordinator_service import CoordinatorService
from shoal.simulate.event_queue import EventQueue
from shoal.simulate.links import Cores, Link
from shoal.simulate.machines import SimulatedMachine, Weather
from shoal.simulate.report import POINTS, ProgressPoint, SimulationReport
from shoal.simulate.virtual_store import CountingStore
from shoal.simulate.virtual_worker import VirtualWorker, WorkerDeps
from shoal.simulate.worker_updates import LearnedUpdates, TimedUpdates
from shoal.strategies import Policies
from shoal.worker.worker import WorkerPolicies

_MAX_NOTES = 100
_MAX_FAREWELL_S = 60.0
"""Virtual time after the end of the run in which workers may still receive the answer that it is over."""
_OBJECTS_PER_COLLECTION, _OLD_COLLECTIONS = 200_000, 100
_TICKS_PER_CONTRIBUTION, _LONGEST_TICK_S = 100, 2.0
"""Coordinator ticks in the time of the quickest worker's contribution, and the longest tick: ticks of 0.1 s slow long rounds down."""


class Scenario(NamedTuple):
    """The parts of a run that a simulation needs."""

    plan: RunPlan
    policies: Policies
    learner: Learner
    updates: TimedUpdates | LearnedUpdates
    codec: str
    strategy: str


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run Python's cyclic garbage collector rarely: ten thousand workers are millions of live objects, and messages form no cycles."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, before[1], _OLD_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class ReportRecorder:
    """Observer of the simulated coordinator: writes its versions, notes and curves into the report."""

    def __init__(self, coordinator: Coordinator, timeline: EventQueue, report: SimulationReport, every_s: float) -> None:
        """`every_s`: virtual seconds between two points of a curve."""
        self._coordinator, self._timeline, self._report, self._every_s = coordinator, timeline, report, every_s
        self._loss_sum = self._loss_weight = 0.0
        self._before: tuple[float, ...] = (0.0,) * 5
        """Totals at the last point of the curves: samples, contributions accepted and judged, bytes, useful seconds."""

    def published(self, version: Published, replaying: bool) -> None:
        report = self._report
        report.last = ProgressPoint(self._timeline.now / 3600, self._coordinator.state.samples, report.received_bytes + report.sent_bytes)
        report.first = report.first or report.last
        if "loss" in version.metrics:
            self._loss_sum += version.weight * version.metrics["loss"]
            self._loss_weight += version.weight

    def say(self, text: str) -> None:
        if len(self._report.notes) < _MAX_NOTES:
            self._report.notes.append(f"{self._timeline.now:8.1f} s  {text}")

    def add_points(self) -> None:
        """Add a point to each curve, and schedule the next one."""
        hours, report, every_s = self._timeline.now / 3600, self._report, self._every_s
        workers = len(self._coordinator.members.by_name)
        transferred = report.received_bytes + report.sent_bytes
        totals = (self._coordinator.state.samples, report.accepted, report.judged, transferred, report.work_s["useful"])
        samples, accepted, judged, bytes_, useful_s = (now - before for now, before in zip(totals, self._before, strict=True))
        self._before = totals
        for name, value in (
            ("samples a second", samples / every_s),
            ("workers", float(workers)),
            ("useful share of the time", useful_s / (workers * every_s) if workers else 0.0),
            ("turned away", 1 - accepted / judged if judged else 0.0),
            ("megabytes a second", bytes_ / 1e6 / every_s),
        ):
            report.curves.setdefault(name, []).append((hours, value))
        if self._loss_weight:
            report.losses.append((hours, self._loss_sum / self._loss_weight))
            self._loss_sum = self._loss_weight = 0.0
        self._timeline.after(every_s, self.add_points)


class VirtualRun:
    """One simulation."""

    def __init__(self, scenario: Scenario, weather: Weather, hours: float, seed: int, warm_up_s: float = 0.0) -> None:
        """`warm_up_s`: virtual time after which the coordinator's CPU time is counted, so that joining workers are not in it."""
        torch.manual_seed(seed)  # for what engines draw
        policies, plan, updates = scenario.policies, scenario.plan, scenario.updates
        self.scenario, self.weather = scenario, weather
        self.timeline, self.store, self._until_s, self._warm_up_s = EventQueue(), CountingStore(), hours * 3600, warm_up_s
        learns = isinstance(updates, LearnedUpdates)
        self.report = SimulationReport(len(weather.machines), hours, seed, scenario.strategy, scenario.codec, learns)
        self.coordinator = Coordinator(plan, policies, scenario.learner)
        self._recorder = ReportRecorder(self.coordinator, self.timeline, self.report, self._until_s / POINTS)
        self._service = CoordinatorService(
            self.coordinator, self.store, self._recorder.published, self._recorder.say, self.timeline, self.report, updates.scale
        )
        self._tick_s = max(TICK_S, min(_LONGEST_TICK_S, plan.heartbeat_interval_s / 4, self._quickest_s() / _TICKS_PER_CONTRIBUTION))
        self._deps = WorkerDeps(
            self.timeline,
            random.Random(seed),
            self._service,
            WorkerPolicies(policies.feed, policies.contribution, policies.pull, policies.rounds.window, plan.spans),
            plan.heartbeat_interval_s,
            {host: Cores(self.timeline, count, weather.others) for host, count in weather.cores.items()},
            self.report,
            Counter(),
        )
        self._present: dict[str, tuple[VirtualWorker, float]] = {}
        """By name: the workers that are here, and since when."""
        self._judged_before = 0

    def _quickest_s(self) -> float:
        """The shortest time in which any machine computes and sends a contribution."""
        inner_steps = self.scenario.policies.contribution.inner_steps
        megabits = 8e-6 * self.scenario.updates.update_bytes
        times_s = [
            inner_steps * machine.step_s + (megabits / machine.link.mbit_per_s if machine.link.mbit_per_s else 0.0)
            for machine in self.weather.machines
        ]
        return min(times_s, default=0.0)

    def run(self) -> SimulationReport:
        began = time.perf_counter()
        with _rare_collections():
            self._run()
        self.report.wall_s = time.perf_counter() - began
        return self.report

    def _run(self) -> None:
        timeline = self.timeline
        self._service.driver.open()
        for number, machine in enumerate(self.weather.machines):
            link = Link(machine.link, self._deps.rng, self.weather.outages(machine.site))
            for life, (start, end) in enumerate(machine.stays):
                timeline.at(start + (number % 100) * 0.01, self._start_worker, machine, link, life)  # real workers do not start at once
                if end < self._until_s:
                    timeline.at(end, self._remove_worker, machine.name)
        timeline.at(0.0, self._tick)
        timeline.at(self._until_s / POINTS, self._recorder.add_points)
        timeline.at(self._warm_up_s, self._reset_cpu_time)
        timeline.run(self._until_s)
        ended = timeline.now
        if self.coordinator.finished:
            self._service.finishing = True
            timeline.run(ended + _MAX_FAREWELL_S)
        self._conclude(ended)

    def _tick(self) -> None:
        self._service.tick()
        self.timeline.after(self._tick_s, self._tick)
        if self._service.finishing and all(worker.finished for worker, _ in self._present.values()):
            self.timeline.stop()

    def _reset_cpu_time(self) -> None:
        self.report.coordinator_s = self.report.ticks_s = 0.0
        self._judged_before = self._judged()

    def _judged(self) -> int:
        """Contributions that the coordinator has accepted or rejected; a repeated request counts once."""
        return sum(self.coordinator.state.contributions.values())

    def _start_worker(self, machine: SimulatedMachine, link: Link, life: int) -> None:
        self._remove_worker(machine.name)
        worker = VirtualWorker(self._deps, machine, link, self.scenario.updates.source(machine.false), life)
        self._present[machine.name] = worker, self.timeline.now
        worker.start()

    def _remove_worker(self, name: str) -> None:
        if name in self._present:
            worker, since = self._present.pop(name)
            worker.disappear()
            self._count_presence(since, self.timeline.now)

    def _count_presence(self, since: float, now: float) -> None:
        self.report.work_s["present"] += max(0.0, now - since)

    def _conclude(self, ended: float) -> None:
        """Complete the report, and check the acknowledgements that workers received against the ledger."""
        report, coordinator, ledger, confirmed = self.report, self.coordinator, self.store.ledger, self._deps.confirmed
        for _, since in self._present.values():
            self._count_presence(since, ended)
        if coordinator.finished:
            self._service.driver.handle(RunConcluded())
        report.hours, report.finished = ended / 3600, coordinator.finished
        report.handled = self._judged() - self._judged_before
        report.versions, report.samples = coordinator.state.version, coordinator.state.samples
        if isinstance(self.scenario.updates, LearnedUpdates):
            report.gradients = self.scenario.updates.batched_steps.format_counts()
        report.digest, report.violations = ledger.digest, list(ledger.violations)
        if coordinator.tasks is not None:
            kinds = self.store.journal.kinds
            report.tasks = {"tasks": len(coordinator.tasks.tasks.tasks), "given": kinds["seated"], "cut": kinds["cut"]}
        known = ledger.applied + Counter(record["worker"] for record, _ in coordinator.replayed.pending())
        missing = [name for name, count in confirmed.items() if known[name] < count]
        report.violations += [
            f"{confirmed[name]} contributions of {name} were acknowledged, and {known[name]} are in the ledger" for name in missing
        ]
