"""A run in virtual time: the real coordinator and its driver, and workers that speak the real protocol over links that are computed."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from shoal.coordinator import Coordinator
from shoal.coordinator.driver import TICK_S, CoordinatorDriver, DriverDeps, SnapshotContent
from shoal.coordinator.effects import Published
from shoal.coordinator.events import RequestReceived, RunConcluded
from shoal.coordinator.run_plan import Learner, RunPlan
from shoal.protocol.messages import EMPTY, Contribute, Message, WorkerRequest
from shoal.simulate.event_queue import EventQueue
from shoal.simulate.links import Cores, Link
from shoal.simulate.machines import SimulatedMachine, Weather
from shoal.simulate.report import POINTS, ProgressPoint, SimulationReport
from shoal.simulate.virtual_store import CallbackServer, CountingStore
from shoal.simulate.virtual_worker import VirtualWorker
from shoal.simulate.worker_updates import LearnedUpdates, TimedUpdates, seeded_generator
from shoal.strategies import Policies
from shoal.worker.session import SLOWEST_LINK_BYTES_PER_S, ContributionReceipt, Frames, SessionRequest
from shoal.worker.worker import WorkerPolicies

_HEADER_BYTES = 300
"""Of a message besides its frames, on the wire."""
_LONGEST_GOODBYE_S = 60.0
_OBJECTS_PER_COLLECTION, _OLD_COLLECTIONS = 200_000, 100
_TIMED_BEATS = 16
"""Of so many signs of life the coordinator's processor time is taken once, and stands for all: to ask for it takes a tenth as long as the
coordinator takes to answer one."""
_TICKS_OF_A_ROUND, _LONGEST_TICK_S = 100, 2.0
"""So often the coordinator looks at the time while the quickest worker makes a contribution, and no less often than that: where rounds take
hours, nothing is decided in a tenth of a second."""
SERVICE_S = 0.0003
SERVICE_BYTES_PER_S = 0.7e9
"""What a question is taken to cost a coordinator that does one after the other: an estimate for two slow cores, not a measurement."""


class Scenario(NamedTuple):
    """A run, as far as a simulation must know it."""

    plan: RunPlan
    policies: Policies
    learner: Learner
    teaching: TimedUpdates | LearnedUpdates
    codec: str
    strategy: str


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for circles of garbage rarely: ten thousand workers are millions of objects, which it would walk through again and
    again, and a message leaves no circles behind."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, before[1], _OLD_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class VirtualRun:
    """One simulation."""

    def __init__(self, scenario: Scenario, weather: Weather, hours: float, seed: int, warm_up_s: float = 0.0) -> None:
        """`warm_up_s`: the coordinator's processor time counts from here on, where its joining workers are not to be in it."""
        self.scenario, self.weather, self.seed = scenario, weather, seed
        self.timeline, self.dice = EventQueue(), seeded_generator(seed)
        self.until_s, self.warm_up_s = hours * 3600, warm_up_s
        self.heartbeat_s = scenario.plan.heartbeat_interval_s
        self.tick_s = max(TICK_S, min(_LONGEST_TICK_S, self.heartbeat_s / 4, self._quickest_s() / _TICKS_OF_A_ROUND))
        policies = scenario.policies
        self.policies = WorkerPolicies(policies.feed, policies.contribution, policies.pull, policies.rounds.window, scenario.plan.spans)
        self.store, self.confirmed = CountingStore(), Counter[str]()
        learns = isinstance(scenario.teaching, LearnedUpdates)
        self.report = SimulationReport(len(weather.machines), hours, seed, scenario.strategy, scenario.codec, learns)
        self.here: dict[str, VirtualWorker] = {}
        self._cores = {host: Cores(self.timeline, count, weather.others) for host, count in weather.cores.items()}
        self._since: dict[str, float] = {}
        self._sessions = 0
        self._busy_until = 0.0
        self._ended = False
        """Whether the run is over, and its workers are about to hear it."""
        self._losses: tuple[float, float] = (0.0, 0.0)
        self._handled_before = 0
        self._before: tuple[float, ...] = (0.0,) * 5
        """At the last point of the curves: samples, contributions taken and judged, bytes, useful seconds."""
        self.coordinator = Coordinator(scenario.plan, policies, scenario.learner)
        self.coordinator.authenticator.is_proved = lambda *claimed: True  # a proof takes time, and who a worker is was never in doubt here
        self.driver = self._driver()
        self.each: list[tuple[float, Callable[[VirtualRun], None]]] = []
        """What is to be done again and again: after how many virtual seconds, and what."""

    def _driver(self) -> CoordinatorDriver:
        around = DriverDeps(
            server=CallbackServer(),
            store=self.store,
            observer=self,
            welcome=Message({"size": round(self.scenario.teaching.scale * self.scenario.learner.vector.numel())}),
            capture=lambda: SnapshotContent({}, {}),
            clock=lambda: self.timeline.now,
            new_session=self._new_session,
            threads=False,
        )
        return CoordinatorDriver(self.coordinator, around)

    def _quickest_s(self) -> float:
        """What a contribution takes at least, as it is computed and sent."""
        scenario, each = self.scenario, self.scenario.policies.contribution.inner_steps
        bits = 8e-6 * scenario.teaching.update_bytes
        takes = [each * one.step_s + (bits / one.link.mbit_per_s if one.link.mbit_per_s else 0.0) for one in self.weather.machines]
        return min(takes, default=0.0)

    def _new_session(self) -> str:
        self._sessions += 1
        return f"session-{self._sessions}"

    # --- the whole of it -------------------------------------------------------------------------------

    def run(self) -> SimulationReport:
        began = time.perf_counter()
        with _rare_collections():
            self._run()
        self.report.wall_s = time.perf_counter() - began
        return self.report

    def _run(self) -> None:
        self.driver.open()
        for number, machine in enumerate(self.weather.machines):
            link = Link(machine.link, self.dice, self.weather.lights_on(machine.site))
            for life, (start, end) in enumerate(machine.stays):
                # Not all at the same moment: neither do people.
                self.timeline.at(start + (number % 100) * 0.01, self._come, machine, link, life)
                if end < self.until_s:
                    self.timeline.at(end, self._vanish, machine.name)
        self.timeline.at(0.0, self._tick)
        self.timeline.at(self.until_s / POINTS, self._look)
        self.timeline.at(self.warm_up_s, self._count_from_here)
        for interval_s, what in self.each:
            self._again(interval_s, what)
        self.timeline.run(self.until_s)
        ended = self.timeline.now
        if self.coordinator.finished:
            self._ended = True
            self.timeline.run(ended + _LONGEST_GOODBYE_S)
        self._conclude(ended)

    def _count_from_here(self) -> None:
        self.report.coordinator_s = self.report.ticks_s = 0.0
        self._handled_before = self._judged()

    def _judged(self) -> int:
        """Contributions that the coordinator has taken or turned away; one that was asked about again is one."""
        return sum(self.coordinator.state.contributions.values())

    def _all_know(self) -> bool:
        return all(worker.finished for worker in self.here.values())

    def _conclude(self, ended: float) -> None:
        """Add up, and hold what workers were told against the ledger."""
        report, coordinator = self.report, self.coordinator
        for name in list(self._since):
            self._leave(name, ended)
        if coordinator.finished:
            self.driver.handle(RunConcluded())
        report.hours, report.finished = ended / 3600, coordinator.finished
        report.handled = self._judged() - self._handled_before
        report.versions, report.samples = coordinator.state.version, coordinator.state.samples
        if isinstance(self.scenario.teaching, LearnedUpdates):
            report.gradients = self.scenario.teaching.together.told()
        report.digest, report.violations = self.store.ledger.digest, list(self.store.ledger.violations)
        if coordinator.tasks is not None:
            kinds = self.store.journal.kinds
            report.tasks = {"tasks": len(coordinator.tasks.tasks.tasks), "given": kinds["seated"], "cut": kinds["cut"]}
        known = self.store.ledger.applied + Counter(record["worker"] for record, _ in coordinator.pending())
        missing = [name for name, count in self.confirmed.items() if known[name] < count]
        report.violations += [f"{name} was told of {self.confirmed[name]} contributions, and {known[name]} are known" for name in missing]

    def _tick(self) -> None:
        began = time.thread_time()
        self.driver.step(0.0)
        self.report.ticks_s += time.thread_time() - began
        self.timeline.after(self.tick_s, self._tick)
        if self._ended and self._all_know():
            self.timeline.stop()
        self._stop_at_end()

    def _stop_at_end(self) -> None:
        if self.coordinator.finished and not self._ended:
            self.timeline.stop()

    def _again(self, interval_s: float, what: Callable[[VirtualRun], None]) -> None:
        def happen() -> None:
            what(self)
            self.timeline.after(interval_s, happen)

        self.timeline.after(interval_s, happen)

    def _look(self) -> None:
        """A point of each curve."""
        hours, report, every_s = self.timeline.now / 3600, self.report, self.until_s / POINTS
        bytes_, workers = report.received_bytes + report.sent_bytes, len(self.coordinator.members.by_name)
        now = (self.coordinator.state.samples, report.accepted, report.judged, bytes_, report.work_s["useful"])
        samples, taken, judged, travelled, useful_s = (value - before for value, before in zip(now, self._before, strict=True))
        self._before = now
        for name, value in (
            ("samples a second", samples / every_s),
            ("workers", float(workers)),
            ("useful share of the time", useful_s / (workers * every_s) if workers else 0.0),
            ("turned away", 1 - taken / judged if judged else 0.0),
            ("megabytes a second", travelled / 1e6 / every_s),
        ):
            report.curves.setdefault(name, []).append((hours, value))
        if self._losses[1]:
            report.losses.append((hours, self._losses[0] / self._losses[1]))
            self._losses = (0.0, 0.0)
        self.timeline.after(every_s, self._look)

    # --- watching ----------------------------------------------------------------------------------------

    def published(self, version: Published, replaying: bool) -> None:
        report = self.report
        report.last = ProgressPoint(self.timeline.now / 3600, self.coordinator.state.samples, report.received_bytes + report.sent_bytes)
        report.first = report.first or report.last
        if "loss" in version.metrics:
            self._losses = (self._losses[0] + version.weight * version.metrics["loss"], self._losses[1] + version.weight)

    def say(self, text: str) -> None:
        if len(self.report.notes) < 100:
            self.report.notes.append(f"{self.timeline.now:8.1f} s  {text}")

    # --- machines ------------------------------------------------------------------------------------------

    def _come(self, machine: SimulatedMachine, link: Link, life: int) -> None:
        if machine.name in self.here:
            self._vanish(machine.name)
        worker = VirtualWorker(self, machine, link, self.scenario.teaching.mind(machine.false), life)
        self.here[machine.name], self._since[machine.name] = worker, self.timeline.now
        worker.come()

    def _vanish(self, name: str) -> None:
        worker = self.here.pop(name, None)
        if worker is not None:
            worker.vanish()
            self._leave(name, self.timeline.now)

    def _leave(self, name: str, now: float) -> None:
        self.report.work_s["present"] += max(0.0, now - self._since.pop(name))

    # --- what workers ask of the world -----------------------------------------------------------------------

    def uneven(self, sigma: float) -> float:
        return self.dice.lognormvariate(0.0, sigma)

    def compute(self, worker: VirtualWorker, work_s: float, done: Callable[[], None]) -> None:
        machine, cores, began = worker.machine, self._cores.get(worker.machine.host), self.timeline.now
        if cores is None and machine.slowdown <= 1:
            return self.timeline.after(work_s, done)

        def sleep() -> None:
            passed_s = self.timeline.now - began
            self.report.computed_s += passed_s
            self.report.processor_s += work_s
            rest_s = (machine.slowdown - 1) * passed_s
            self.timeline.after(rest_s, done) if rest_s > 0 else done()

        return self.timeline.after(work_s, sleep) if cores is None else cores.compute(work_s, sleep)

    def call(self, worker: VirtualWorker, asked: WorkerRequest, frames: Frames, question: int) -> bool:
        size = self._size(frames)
        arrives = worker.link.arrival(size, self.timeline.now, down=False)
        self.report.received_bytes += size
        if arrives is None:
            return False
        self.timeline.at(arrives, self._arrive, worker, asked, frames, question)
        return True

    def patience_s(self, question: SessionRequest) -> float:
        """How long a worker waits for an answer. The protocol has seen the bytes of a stand-in."""
        bytes_more = (self.scenario.teaching.scale - 1) * sum(map(len, question.frames)) if question.frames else 0.0
        return question.timeout_s + bytes_more / SLOWEST_LINK_BYTES_PER_S

    def _size(self, frames: Frames) -> float:
        return _HEADER_BYTES + self.scenario.teaching.scale * sum(map(len, frames)) if frames else _HEADER_BYTES

    def _arrive(self, worker: VirtualWorker, asked: WorkerRequest, frames: Frames, question: int) -> None:
        now = self.timeline.now
        self._busy_until = max(now, self._busy_until) + SERVICE_S + self._size(frames) / SERVICE_BYTES_PER_S
        self._handle(RequestReceived(partial(self._reply, worker, question), asked, frames, self._new_session()))
        if isinstance(asked, Contribute):
            member = self.coordinator.members.by_session.get(asked.session)
            if member is not None:
                self.report.lags[member.lag] += 1

    def _handle(self, called: RequestReceived, stands_for: int = 1) -> None:
        began = time.thread_time()
        self.driver.handle(called)
        self.report.coordinator_s += stands_for * (time.thread_time() - began)
        self._stop_at_end()

    def _reply(self, worker: VirtualWorker, question: int, message: Message) -> None:
        size = self._size(message.frames)
        self.report.sent_bytes += size
        arrives = worker.link.arrival(size, max(self.timeline.now, self._busy_until), down=True)
        if arrives is not None:  # else the worker waits until its patience with this question is over
            self.timeline.at(arrives, worker.hear, question, message)

    def pulse(self, worker: VirtualWorker) -> None:
        self.timeline.in_line(worker.link.sign_of_life(self.timeline.now + self.heartbeat_s), self._beat, worker)

    def _beat(self, worker: VirtualWorker) -> None:
        """A sign of life arrives. Its answer is taken at once: nothing depends on the moment that it takes."""
        if worker.gone or worker.finished:
            return
        if worker.protocol.session:
            self.report.heartbeats += 1
            called = RequestReceived(worker.hear_pulse, worker.protocol.heartbeat(worker.doing, EMPTY))
            if self.report.heartbeats % _TIMED_BEATS:
                self.driver.handle(called)
            else:
                self._handle(called, _TIMED_BEATS)
        self.pulse(worker)

    def settled(self, worker: VirtualWorker, receipt: ContributionReceipt, work_s: float) -> None:
        self.report.outcomes[receipt.status] += 1
        useful = receipt.status == "accepted"
        self.report.work_s["useful" if useful else "wasted"] += work_s
        self.confirmed[worker.machine.name] += useful

    def wasted(self, work_s: float) -> None:
        self.report.work_s["wasted"] += work_s
