"""One way to start a run. The command line, Python and tests decide here who takes part, and begin here.

`plan` reads the settings and chooses: this process alone, several processes of one engine, workers on this machine, the processes that
torchrun started, or workers of other machines who are invited. `start_run` puts the chosen run together, and its `train` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.config.derived_values import USER_KINDS
from shoal.config.dialects import in_words_of
from shoal.config.load import LoadedConfig, Override
from shoal.config.missing_packages import package_problems
from shoal.config.problems import ConfigError
from shoal.config.ranks import STRATEGY_FOR_ANSWERS, STRATEGY_FOR_WORKERS, RankPlace, rank_place, uses_several_processes
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.launch import forkserver
from shoal.launch.engine_processes import EngineProcesses, place_in_engine, settings_from_start
from shoal.launch.local import LocalWorkers, factory_arguments, fair_threads, gpus_for, use_passive_waiting, worker_names

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.launch.pipeline_rendezvous import PipelineHost
    from shoal.launch.ray_workers import RayWorkers
    from shoal.launch.threads import WorkerThreads
    from shoal.launch.torchrun import TorchrunGroup
    from shoal.runs.build_run import Progress
    from shoal.runs.coordinator_run import CoordinatorLoop
    from shoal.runs.coordinator_setup import ReadyCoordinator
    from shoal.runs.invitation import Invitation
    from shoal.runs.live_objects import LiveObjects
    from shoal.runs.monitoring.recorder import Reporter
    from shoal.runs.training.loop import TrainingLoop
    from shoal.runs.worker_run import JoinedWorker

Load = Callable[[Sequence[Override]], LoadedConfig]
"""Resolves the configuration with some more settings on top."""
Arguments = Callable[[Sequence[str]], Mapping[str, Sequence[str]]]
"""Gives each worker, by its name, further arguments of `shoal join`."""


class StartOptions(NamedTuple):
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
    watch: bool = False
    """Show the run in the browser."""
    live: tuple[str, ...] = ()
    """Names of what the program brings along and workers need: only threads of this process can have it."""
    up: bool = False
    """Workers are started where launch.kind says, and others may join."""
    above: JoinedWorker | None = None
    """For a relay: the coordinator that it has joined."""


class StartMode(Enum):
    """What this process does."""

    ALONE = auto()
    """It trains, perhaps as one of the processes of an engine."""
    RANKS = auto()
    """It has to start the processes of an engine first."""
    COORDINATES = auto()
    """It holds the weights, and workers train."""
    GATHERS = auto()
    """Its machine has the first stage of a pipeline, and machines that join have the others."""
    FOLLOWS = auto()
    """torchrun started it, and another process coordinates."""


class StartPlan(NamedTuple):
    """Who takes part in a run, and what this process does in it."""

    way: StartMode
    loaded: LoadedConfig
    asked: StartOptions
    here: RankPlace | None = None
    """Which of an engine's processes this one is."""
    workers: int = 0
    """Workers that are started on this machine; 0 for a run that goes on: as many as it was begun for."""
    fleet: TorchrunGroup | None = None
    note: str = ""
    """What was chosen without being asked for."""

    @property
    def run(self) -> Run:
        return self.loaded.run


class RunOutcome(NamedTuple):
    """How a run ended."""

    summary: dict[str, Any]
    model: Path | None
    """Folder of the finished model, where programs other than Shoal can read it."""


class StartedRun(NamedTuple):
    """A run that is put together and has not moved yet."""

    loop: TrainingLoop | CoordinatorLoop
    train: Callable[[], RunOutcome]
    invitation: Invitation | None = None
    """How workers join."""
    role: str = ""
    """In a database that others look after: the role that workers connect as."""


def plan_start(load: Load, asked: StartOptions) -> StartPlan:
    """Choose. Raises ConfigError for settings that are not good, ShoalError where they do not fit what was asked for."""
    loaded, note = _good(load([])), ""
    more: list[Override] = []
    if loaded.run.alone and loaded.run.engine.kind == "pipeline":
        return _staged(load, loaded, asked)
    if asked.workers and loaded.run.alone:
        answers = loaded.run.chosen_task.needs == "prompts"
        chosen, others = (STRATEGY_FOR_ANSWERS, "") if answers else (STRATEGY_FOR_WORKERS, " (edp and async are others)")
        note = f"strategy.kind: {chosen}, since there are workers{others}"
        more = [Override("strategy.kind", chosen, "--workers")]
        loaded = _good(load(more))
    if asked.invite:
        return _invited(loaded, asked)
    if loaded.run.alone:
        return _local(loaded, asked)
    if asked.live:
        _refuse_other_processes(loaded, asked.live)
        more.append(Override("transport.kind", "in-process", f"{asked.live[0]}=…"))
        loaded = _good(load(more))
    use_passive_waiting()
    here, count = rank_place(), asked.workers or loaded.run.cluster.num_workers or _otherwise(loaded.run, asked)
    if facts := settings_from_start(loaded.run, here, count):
        loaded = _good(load([*more, *facts]))
    if here is not None:
        return _in_fleet(loaded, asked, here)
    return StartPlan(StartMode.COORDINATES, loaded, asked, workers=_number(loaded.run, asked, count), note=note)


def _good(loaded: LoadedConfig) -> LoadedConfig:
    """Raise ConfigError with everything that the run is refused for."""
    problems = loaded.problems if not loaded.ok else package_problems(loaded)
    if problems:
        raise ConfigError(problems)
    return loaded


def _refuse_other_processes(loaded: LoadedConfig, live: tuple[str, ...]) -> None:
    """Raise ShoalError where workers are to be processes, which cannot have live objects of this one."""
    run, settings = loaded.run, loaded.settings
    spoken = settings.given("transport.kind") and run.transport.kind != "in-process"
    asks = "torchrun has started several" if rank_place() else f"transport.kind is {run.transport.kind}" if spoken else ""
    asks = asks or (f"the engine {run.engine.kind} is several" if uses_several_processes(run) else "")
    if asks:
        raise ShoalError(
            f"{' and '.join(f'{name}=' for name in live)} cannot be handed to other processes, and {asks}. For worker processes name "
            f'functions that make them ({live[0]}="module:function"); workers that are threads of this process need no transport'
        )


def _local(loaded: LoadedConfig, asked: StartOptions) -> StartPlan:
    here = place_in_engine(loaded.run)
    if here is None and uses_several_processes(loaded.run):
        if asked.live:
            _refuse_other_processes(loaded, asked.live)
        return StartPlan(StartMode.RANKS, loaded, asked)
    return StartPlan(StartMode.ALONE, loaded, asked, here)


def _staged(load: Load, loaded: LoadedConfig, asked: StartOptions) -> StartPlan:
    """One model over several processes or machines. Workers are its stages; the process that is started, or the server, is the first."""
    run = loaded.run
    if not asked.invite:
        stages = Override("launch.devices_per_node", str((asked.workers or 0) + 1), "--workers")
        return _local(_good(load([stages])) if asked.workers else loaded, asked)
    if asked.workers:
        raise ShoalError("--workers: this machine has one stage of the pipeline; `shoal train` starts all stages on one machine")
    if run.transport.kind not in ("zmq", "xmlrpc"):
        raise ShoalError(f"transport.kind: machines find their places in a pipeline over zmq, and this is {run.transport.kind}")
    if not run.cluster.num_workers and not run.placed:
        raise ShoalError("how many machines join this one? --set cluster.num_workers=2, or list them in cluster.workers")
    return StartPlan(StartMode.GATHERS, loaded, asked)


def pipeline_host(plan: StartPlan, arguments: Sequence[str], tell: Callable[[str], None]) -> PipelineHost:
    """The side of the coordinator that gives out the places of a pipeline. `arguments`: those of `shoal train` for the first stage."""
    from shoal.launch.pipeline_rendezvous import PipelineHost

    return PipelineHost(
        plan.run,
        plan.asked.hosts or address_of_first(plan.run, "--host", plan.loaded.settings.spelling) or ("0.0.0.0",),
        arguments,
        tell,
    )


def address_of_first(run: Run, option: str, spelling: Callable[[str], str] = lambda path: path) -> tuple[str, ...]:
    """The server's own address where machines hold layers and the settings tell it: the entries of others are theirs. `option` names
    another address. Raises ShoalError where this is another machine."""
    from shoal.transports.addresses import free_port

    server = run.cluster.hosts.get(run.cluster.server or "")
    if server is None or not server.server_address or getattr(run.transport, "host", None) is not None:
        return ()
    try:
        free_port(server.server_address)
    except ShoalError:
        where = spelling(f"cluster.hosts.{run.cluster.server}.server_address")
        raise ShoalError(
            f"`{where}` says that {run.cluster.server} is at {server.server_address}, which is no address of this machine: "
            f"start it on {run.cluster.server}, or say {option} ADDRESS"
        ) from None
    return (server.server_address,)


def _invited(loaded: LoadedConfig, asked: StartOptions) -> StartPlan:
    run = loaded.run
    if run.alone:
        raise ShoalError("strategy.kind is local, so there is nobody to coordinate: --set strategy.kind=syncps (or edp, async)")
    if run.transport.kind == "in-process":
        raise ShoalError("transport.kind: other machines do not reach workers that are threads of this process: choose zmq or postgres")
    if isinstance(run.transport, Postgres) and len(asked.hosts) > (run.transport.host == "embedded"):
        raise ShoalError("--host: a database of the run's own listens at one address, and another one listens where it does")
    use_passive_waiting()
    workers = _started_by_launcher(run, asked) if asked.up else int(run.coordinator.trains) if asked.workers is None else asked.workers
    return StartPlan(StartMode.COORDINATES, loaded, asked, workers=workers)


def _started_by_launcher(run: Run, asked: StartOptions) -> int:
    """Workers that `shoal up` starts."""
    count = asked.workers or run.cluster.num_workers or run.launch.nodes
    if not count:
        raise ShoalError("how many workers? Name them in cluster.workers, or say --workers N (--num_nodes N)")
    return count


def _in_fleet(loaded: LoadedConfig, asked: StartOptions, here: RankPlace) -> StartPlan:
    """As one of the processes that torchrun started, each of which is a worker, or one of a worker's."""
    from shoal.launch.torchrun import TorchrunGroup

    fleet = TorchrunGroup(loaded.run, here)
    if asked.workers not in (None, fleet.workers):
        raise ShoalError(f"{asked.workers} workers are asked for, and torchrun started {fleet.workers}: leave that out")
    if not fleet.first:
        return StartPlan(StartMode.FOLLOWS, loaded, asked, fleet=fleet)
    if (begun := fleet.begun()) is not None:
        asked = asked._replace(run_dir=begun, resume=True)
    return StartPlan(StartMode.COORDINATES, loaded, asked, workers=fleet.workers, fleet=fleet)


def _otherwise(run: Run, asked: StartOptions) -> int:
    """Workers where nobody says how many. The processes of collectives are a room of workers already; a run that goes on has as many as
    it was begun for."""
    return 0 if asked.resume else asked.otherwise or int(run.engine.kind == "collectives")


def _number(run: Run, asked: StartOptions, count: int) -> int:
    """Workers to start here."""
    if not count and not asked.resume:
        raise ShoalError(f"how many workers? --workers N starts them here; `shoal coordinate` waits for others ({run.strategy.kind})")
    return count + bool(count and run.coordinator.trains and not asked.workers)


@contextmanager
def start_run(
    plan: StartPlan,
    reporters: list[Reporter],
    progress: Progress | None = None,
    arguments: Arguments = lambda names: dict.fromkeys(names, ()),
    given: LiveObjects | None = None,
) -> Iterator[StartedRun]:
    """Put a run together that this process trains or coordinates. What it needs besides, such as a database, is there until the end.

    `given`: live parts that the program brings along.
    """
    from shoal.runs.live_objects import NO_LIVE_OBJECTS

    given, loop = given or NO_LIVE_OBJECTS, None
    try:
        with _put_together(plan, reporters, progress, arguments, given) as made:
            loop = made.loop
            yield made
    except Exception as error:
        if loop is not None and not loop.step and not plan.asked.invite:  # people may have been told already how to join
            loop.directory.forget()
        if type(error) is not ShoalError:
            raise
        raise ShoalError(in_words_of((parsed.layer.dialect for parsed in plan.loaded.files), str(error))) from error


def preload_libraries(plan: StartPlan) -> None:
    """Let the process that will start workers load its libraries while this one loads its own. It may be called early, and again."""
    if plan.way is StartMode.COORDINATES and (plan.workers or not plan.asked.invite) and plan.run.transport.kind != "in-process":
        forkserver.prepare()


@contextmanager
def _put_together(
    plan: StartPlan, reporters: list[Reporter], progress: Progress | None, arguments: Arguments, given: LiveObjects
) -> Iterator[StartedRun]:
    if plan.way is StartMode.ALONE:
        yield _alone(plan, reporters, progress, given)
        return
    assert plan.way is StartMode.COORDINATES, plan.way
    from shoal.launch.run_database import run_location

    preload_libraries(plan)
    asked, hosts = plan.asked, _hosts(plan)
    with run_location(plan.run, asked.run_dir, asked.resume, hosts, asked.invite) as ground:
        from shoal.runs.coordinator_setup import prepare

        made = prepare(
            plan.loaded,
            run_dir=ground.run_dir,
            resume=asked.resume,
            reporters=reporters,
            progress=progress,
            workers=_expected(plan),
            hosts=hosts,
            transport=ground.transport,
            given=given,
            above=asked.above,
        )
        made.loop.directory.fresh |= ground.fresh
        if ground.invitation is not None:
            made = made._replace(invitation=ground.invitation)
        workers = arguments(_names(plan, made))
        outside = ground.outside or made.invitation
        yield StartedRun(made.loop, lambda: _coordinate(plan, made, workers, given, outside), outside, ground.role)


def headline(plan: StartPlan, loop: TrainingLoop | CoordinatorLoop) -> str:
    """What is about to be trained, for people."""
    rest = f"{loop.engine.size:,} parameters, in {loop.directory.path}"
    if plan.way is StartMode.COORDINATES:
        return f"{plan.run.strategy.kind}, {rest}"
    where = loop.engine.device if plan.here is None else f"{plan.here.size} × {loop.engine.device.type} ({plan.run.engine.kind})"
    own = plan.run.model.kind in USER_KINDS
    what = type(loop.engine.task.players["model"]).__name__ if own else f"{plan.run.chosen_task.kind} ({plan.run.model.kind})"
    return f"{what} on {where}, {rest}"


def _alone(plan: StartPlan, reporters: list[Reporter], progress: Progress | None, given: LiveObjects) -> StartedRun:
    from shoal.runs.training.train_alone import prepare

    asked = plan.asked
    loop = prepare(
        plan.loaded,
        run_dir=asked.run_dir,
        resume=asked.resume,
        reporters=reporters,
        progress=progress,
        here=plan.here,
        given=given,
    )
    return StartedRun(loop, lambda: _finished(loop, loop.train()))


def _finished(loop: TrainingLoop | CoordinatorLoop, summary: dict[str, Any]) -> RunOutcome:
    from shoal.runs.trained_model import export_final_model

    return RunOutcome(summary, export_final_model(loop.run, loop.directory.path, summary) if loop.engine.world.first else None)


def _hosts(plan: StartPlan) -> tuple[str, ...]:
    if plan.asked.invite:
        return plan.asked.hosts or _addresses_of_server(plan.run, plan.loaded.settings.spelling) or ("0.0.0.0",)
    return plan.fleet.hosts if plan.fleet is not None else ("127.0.0.1",)


def _addresses_of_server(run: Run, spelling: Callable[[str], str]) -> tuple[str, ...]:
    """Where the settings say that the hosts reach the server, its own entry first. Raises ShoalError where this is another machine."""
    from shoal.transports.addresses import free_port

    if isinstance(run.transport, Postgres) or getattr(run.transport, "host", None) is not None:
        return ()
    names = sorted(run.cluster.hosts, key=lambda name: name != run.cluster.server)
    found = {run.cluster.hosts[name].server_address: name for name in reversed(names)}
    for address, name in found.items():
        try:
            free_port(address or "0.0.0.0")
        except ShoalError:
            where = spelling(f"cluster.hosts.{name}.server_address")
            raise ShoalError(
                f"`{where}` says that the server listens at {address}, which is no address of this machine: "
                f"start it on {run.cluster.server or 'the server'}, or say --host ADDRESS"
            ) from None
    return tuple(address for address in reversed(found) if address is not None)


def _expected(plan: StartPlan) -> int:
    """Workers that a new run is begun for."""
    cluster = plan.run.cluster
    return cluster.num_workers + plan.run.coordinator.trains if plan.asked.invite and cluster.num_workers else plan.workers


def _names(plan: StartPlan, made: ReadyCoordinator) -> list[str]:
    """Names of the workers that are started here. A run that goes on has as many as it was begun for."""
    cluster, workers = plan.run.cluster, plan.workers
    if not plan.asked.invite and not workers:
        workers = made.loop.coordinator.plan.expected
    return worker_names(workers, (cluster.server or "here",) if plan.asked.invite and not plan.asked.up else cluster.workers)


def _coordinate(
    plan: StartPlan, made: ReadyCoordinator, workers: Mapping[str, Sequence[str]], given: LiveObjects, outside: Invitation
) -> RunOutcome:
    """Coordinate, with workers that are started here, or by each of the processes that torchrun started."""
    threads = fair_threads(len(workers)) if plan.run.transport.kind == "in-process" else 1
    with closing(made.loop.server), _computing_with(threads if workers else None):
        outcome = _finished(made.loop, _train_with(plan, made, workers, given, outside))
    if plan.fleet is not None:
        plan.fleet.end(outcome.summary)
    return outcome


@contextmanager
def _computing_with(threads: int | None) -> Iterator[None]:
    """Let torch use so many threads for a while: workers beside this process need the cores more. None: as many as it has."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train_with(
    plan: StartPlan, made: ReadyCoordinator, workers: Mapping[str, Sequence[str]], given: LiveObjects, outside: Invitation
) -> dict[str, Any]:
    loop = made.loop
    staff = _staff(plan, made, workers, given, outside)
    if plan.fleet is not None:
        loop.goodbye_s = math.inf
    loop.beside = lambda: staff.look_after(loop.message, loop.exited)
    with closing(staff):
        staff.start()
        return loop.train()


def _staff(
    plan: StartPlan, made: ReadyCoordinator, workers: Mapping[str, Sequence[str]], given: LiveObjects, outside: Invitation
) -> LocalWorkers | WorkerThreads | RayWorkers:
    """The workers that this process starts, not started yet. `outside`: how those on other machines join."""
    loop, folder = made.loop, made.loop.directory.path / "workers"
    if plan.fleet is not None:
        return plan.fleet.announce(made.invitation, loop.directory.path)
    if plan.run.transport.kind == "in-process":
        return _threads(plan.run, made, workers, given)
    crew = EngineProcesses.of(loop.run, "join", loop.message, max(1, len(workers)))
    invitation = made.invitation._asdict() | ({"crew": crew} if crew is not None else {})
    trusted, environ = factory_arguments(loop.run)
    every = {name: [*arguments, *trusted] for name, arguments in workers.items()}
    if plan.asked.up and plan.run.launch.elsewhere:
        from shoal.launch.remote import launcher

        return launcher(loop.run, folder, outside or made.invitation, every, loop.message)
    return LocalWorkers(folder, invitation, every, gpus_for(loop.run), environ=environ)


def _threads(run: Run, made: ReadyCoordinator, workers: Mapping[str, Sequence[str]], given: LiveObjects) -> WorkerThreads:
    from shoal.launch.threads import WorkerThreads

    if uses_several_processes(run):
        raise ShoalError(f"transport.kind in-process: workers are threads of this process, and the engine {run.engine.kind} is several")
    if any(workers.values()):
        raise ShoalError("transport.kind in-process: --netem and --slowdown are for workers that are processes of their own")
    return WorkerThreads(made.loop.directory.path / "workers", made.invitation, list(workers), given, made.loop.message)
