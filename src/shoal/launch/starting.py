"""One way to start a run. The command line, Python and tests decide here who takes part, and begin here.

`plan` reads the settings and chooses: this process alone, several processes of one engine, workers on this machine, the processes that
torchrun started, or workers of other machines who are invited. `started` puts the chosen run together, and its `train` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.config.former import was_a_transport
from shoal.config.load import Loaded, Override
from shoal.config.problems import ConfigError
from shoal.config.ranks import Place, of_several, place
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.launch.local import LocalWorkers, gpus_of, names_for, wait_quietly
from shoal.launch.ranks import Crew, facts_of, place_in

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.launch.fleet import Fleet
    from shoal.runs.assembly import Progress
    from shoal.runs.coordinating import Coordinating
    from shoal.runs.inviting import Invitation
    from shoal.runs.loop import Loop, Reporter

Load = Callable[[Sequence[Override]], Loaded]
"""Resolves the configuration with some more settings on top."""
Arguments = Callable[[Sequence[str]], Mapping[str, Sequence[str]]]
"""Gives each worker, by its name, further arguments of `shoal join`."""


class Asked(NamedTuple):
    """What somebody who starts a run wants besides its settings."""

    run_dir: str | None = None
    resume: bool = False
    workers: int | None = None
    """Workers on this machine; None: as the settings say."""
    otherwise: int = 0
    """Workers where nobody says how many; 0: that is an error."""
    invite: bool = False
    """Workers of other machines may join."""
    hosts: tuple[str, ...] = ()
    """Addresses to listen on for them; none: all that this machine has."""


class Way(Enum):
    """What this process does."""

    ALONE = auto()
    """It trains, perhaps as one of the processes of an engine."""
    RANKS = auto()
    """It has to start the processes of an engine first."""
    COORDINATES = auto()
    """It holds the weights, and workers train."""
    FOLLOWS = auto()
    """torchrun started it, and another process coordinates."""


class Plan(NamedTuple):
    """Who takes part in a run, and what this process does in it."""

    way: Way
    loaded: Loaded
    asked: Asked
    here: Place | None = None
    """Which of an engine's processes this one is."""
    workers: int = 0
    """Workers that are started on this machine; 0 for a run that goes on: as many as it was begun for."""
    fleet: Fleet | None = None
    note: str = ""
    """What was chosen without being asked for."""

    @property
    def run(self) -> Run:
        return self.loaded.run


class Outcome(NamedTuple):
    """How a run ended."""

    summary: dict[str, Any]
    model: Path | None
    """Folder of the finished model, where programs other than Shoal can read it."""


class Started(NamedTuple):
    """A run that is put together and has not moved yet."""

    loop: Loop
    train: Callable[[], Outcome]
    invitation: Invitation | None = None
    """How workers join."""
    role: str = ""
    """In a database that others look after: the role that workers connect as."""


def plan(load: Load, asked: Asked) -> Plan:
    """Choose. Raises ConfigError for settings that are not good, ShoalError where they do not fit what was asked for."""
    loaded, note = _good(load([])), ""
    more: list[Override] = []
    if asked.workers and loaded.run.strategy.kind == "local":
        note = "strategy: syncps, since there are workers (edp and async are others: --set strategy.kind=…)"
        more = [Override("strategy.kind", "syncps", "--workers")]
        loaded = _good(load(more))
    if asked.invite:
        return _invited(loaded, asked)
    if loaded.run.strategy.kind == "local":
        return _local(loaded, asked)
    wait_quietly()
    if asked.workers and was_a_transport(loaded.settings):
        more.append(Override("launch.devices_per_node", str(asked.workers), "--workers"))
        loaded, asked = _good(load(more)), asked._replace(workers=1)
    here, count = place(), asked.workers or loaded.run.cluster.num_workers or _otherwise(loaded.run, asked)
    if facts := facts_of(loaded.run, here, count):
        loaded = _good(load([*more, *facts]))
    if here is not None:
        return _in_fleet(loaded, asked, here)
    return Plan(Way.COORDINATES, loaded, asked, workers=_number(loaded.run, asked, count), note=note)


def _good(loaded: Loaded) -> Loaded:
    if not loaded.ok:
        raise ConfigError(loaded.problems)
    return loaded


def _local(loaded: Loaded, asked: Asked) -> Plan:
    here = place_in(loaded.run)
    if here is None and of_several(loaded.run):
        from shoal.runs.assembly import refuse_unbuilt

        refuse_unbuilt(loaded)
        return Plan(Way.RANKS, loaded, asked)
    return Plan(Way.ALONE, loaded, asked, here)


def _invited(loaded: Loaded, asked: Asked) -> Plan:
    run = loaded.run
    if run.strategy.kind == "local":
        raise ShoalError("strategy.kind is local, so there is nobody to coordinate: --set strategy.kind=syncps (or edp, async)")
    if isinstance(run.transport, Postgres) and len(asked.hosts) > (run.transport.host == "embedded"):
        raise ShoalError("--host: a database of the run's own listens at one address, and another one listens where it does")
    wait_quietly()
    workers = int(run.coordinator.trains) if asked.workers is None else asked.workers
    return Plan(Way.COORDINATES, loaded, asked, workers=workers)


def _in_fleet(loaded: Loaded, asked: Asked, here: Place) -> Plan:
    """As one of the processes that torchrun started, each of which is a worker, or one of a worker's."""
    from shoal.launch.fleet import Fleet

    fleet = Fleet(loaded.run, here)
    if asked.workers not in (None, fleet.workers):
        raise ShoalError(f"{asked.workers} workers are asked for, and torchrun started {fleet.workers}: leave that out")
    if not fleet.first:
        return Plan(Way.FOLLOWS, loaded, asked, fleet=fleet)
    if (begun := fleet.begun()) is not None:
        asked = asked._replace(run_dir=begun, resume=True)
    return Plan(Way.COORDINATES, loaded, asked, workers=fleet.workers, fleet=fleet)


def _otherwise(run: Run, asked: Asked) -> int:
    """Workers where nobody says how many. The processes of collectives are a room of workers already."""
    return asked.otherwise or int(run.engine.kind == "collectives" and not asked.resume)


def _number(run: Run, asked: Asked, count: int) -> int:
    """Workers to start here."""
    if not count and not asked.resume:
        raise ShoalError(f"how many workers? --workers N starts them here; `shoal coordinate` waits for others ({run.strategy.kind})")
    return count + bool(count and run.coordinator.trains and not asked.workers)


@contextmanager
def started(
    plan: Plan,
    reporters: list[Reporter],
    progress: Progress | None = None,
    arguments: Arguments = lambda names: dict.fromkeys(names, ()),
) -> Iterator[Started]:
    """Put a run together that this process trains or coordinates. What it needs besides, such as a database, is there until the end."""
    if plan.way is Way.ALONE:
        yield _alone(plan, reporters, progress)
        return
    assert plan.way is Way.COORDINATES, plan.way
    from shoal.launch.grounds import ground_for

    asked, hosts = plan.asked, _hosts(plan)
    with ground_for(plan.run, asked.run_dir, asked.resume, hosts, asked.invite) as ground:
        from shoal.runs.coordinating import prepare

        made = prepare(
            plan.loaded,
            run_dir=ground.run_dir,
            resume=asked.resume,
            reporters=reporters,
            progress=progress,
            workers=_expected(plan),
            hosts=hosts,
            transport=ground.transport,
        )
        if ground.invitation is not None:
            made = made._replace(invitation=ground.invitation)
        workers = arguments(_names(plan, made))
        yield Started(made.loop, lambda: _coordinate(plan, made, workers), made.invitation, ground.role)


def _alone(plan: Plan, reporters: list[Reporter], progress: Progress | None) -> Started:
    from shoal.runs.alone import prepare

    loop = prepare(
        plan.loaded, run_dir=plan.asked.run_dir, resume=plan.asked.resume, reporters=reporters, progress=progress, here=plan.here
    )
    return Started(loop, lambda: _finished(loop, loop.train()))


def _finished(loop: Loop, summary: dict[str, Any]) -> Outcome:
    from shoal.runs.trained import save_final

    return Outcome(summary, save_final(loop.run, loop.directory.path, summary) if loop.engine.world.first else None)


def _hosts(plan: Plan) -> tuple[str, ...]:
    if plan.asked.invite:
        return plan.asked.hosts or ("0.0.0.0",)
    return plan.fleet.hosts if plan.fleet is not None else ("127.0.0.1",)


def _expected(plan: Plan) -> int:
    """Workers that a new run is begun for."""
    cluster = plan.run.cluster
    return cluster.num_workers + plan.run.coordinator.trains if plan.asked.invite and cluster.num_workers else plan.workers


def _names(plan: Plan, made: Coordinating) -> list[str]:
    """Names of the workers that are started here. A run that goes on has as many as it was begun for."""
    cluster, workers = plan.run.cluster, plan.workers
    if not plan.asked.invite and not workers:
        workers = made.loop.coordinator.plan.expected
    return names_for(workers, (cluster.server or "here",) if plan.asked.invite else cluster.workers)


def _coordinate(plan: Plan, made: Coordinating, workers: Mapping[str, Sequence[str]]) -> Outcome:
    """Coordinate, with workers that are started here, or by each of the processes that torchrun started."""
    with closing(made.loop.server), _threads_left_to(workers):
        outcome = _finished(made.loop, _train_with(made, workers, plan.fleet))
    if plan.fleet is not None:
        plan.fleet.end(outcome.summary)
    return outcome


@contextmanager
def _threads_left_to(workers: Mapping[str, Any]) -> Iterator[None]:
    """Compute with one thread beside workers of this machine: they need the cores more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if workers else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train_with(made: Coordinating, workers: Mapping[str, Sequence[str]], fleet: Fleet | None) -> dict[str, Any]:
    loop = made.loop
    if fleet is not None:
        staff, loop.goodbye_s = fleet.announce(made.invitation, loop.directory.path), math.inf
    else:
        crew = Crew.of(loop.run, "join", loop.message, max(1, len(workers)))
        invitation = made.invitation._asdict() | ({"crew": crew} if crew is not None else {})
        staff = LocalWorkers(loop.directory.path / "workers", invitation, workers, gpus_of(loop.run))
    loop.beside = lambda: staff.look_after(loop.message, loop.lost)
    with closing(staff):
        staff.start()
        return loop.train()
