"""Starts the run that `start_mode.plan_start` has chosen: builds it, starts its workers, and trains.

The command line, the Python interface and tests all start runs here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.config.derived_values import USER_KINDS
from shoal.config.dialects import in_words_of
from shoal.config.received import arguments_for
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.launch import forkserver
from shoal.launch.engine_processes import EngineProcesses
from shoal.launch.local import LocalWorkers, factory_arguments, fair_threads, gpus_for, worker_names
from shoal.launch.start_mode import StartMode, StartPlan
from shoal.launch.up_file import note_started
from shoal.transports.addresses import is_loopback
from shoal.transports.connect import listening_hosts

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.data.interfaces import Progress
    from shoal.launch.pipeline_rendezvous import PipelineHost
    from shoal.launch.ray_workers import RayWorkers
    from shoal.launch.threads import WorkerThreads
    from shoal.runs.coordinator_run import CoordinatorLoop
    from shoal.runs.coordinator_setup import ReadyCoordinator
    from shoal.runs.invitation import Invitation
    from shoal.runs.live_objects import LiveObjects
    from shoal.runs.monitoring.recorder import Reporter
    from shoal.runs.training.loop import TrainingLoop

Arguments = Callable[[Sequence[str]], Mapping[str, Sequence[str]]]
"""Gives each worker, by its name, further arguments of `shoal join`."""


class RunOutcome(NamedTuple):
    """How a run ended."""

    summary: dict[str, Any]
    model: Path | None
    """Folder of the finished model, where programs other than Shoal can read it."""


class StartedRun(NamedTuple):
    """A run that is built and has not trained yet."""

    loop: TrainingLoop | CoordinatorLoop
    train: Callable[[], RunOutcome]
    invitation: Invitation | None = None
    """How workers of other machines join."""
    role: str = ""
    """In a database that others administer: the role that workers connect as."""
    hosts: Sequence[str] = ()
    """Where the coordinator listens."""
    public_address: str = ""
    """Where other machines reach it, if not there."""


@contextmanager
def start_run(
    plan: StartPlan,
    reporters: list[Reporter],
    progress: Progress | None = None,
    arguments: Arguments = lambda names: dict.fromkeys(names, ()),
    live: LiveObjects | None = None,
) -> Iterator[StartedRun]:
    """Build a run that this process trains or coordinates. What it needs besides, such as a database, runs until the context ends.

    `live`: live objects that the program passes. A run that fails before its first step leaves no folder behind.
    """
    from shoal.runs.live_objects import NO_LIVE_OBJECTS

    loop = None
    try:
        with _built(plan, reporters, progress, arguments, live or NO_LIVE_OBJECTS) as built:
            loop = built.loop
            yield built
    except Exception as error:
        if loop is not None and not loop.step and not plan.options.invite:  # an invitation may already have been passed on
            loop.directory.forget()
        if type(error) is not ShoalError:
            raise
        raise ShoalError(in_words_of((parsed.layer.dialect for parsed in plan.loaded.files), str(error))) from error


def preload_libraries(plan: StartPlan) -> None:
    """Let the fork server load its libraries while this process loads its own. It may be called early, and repeatedly."""
    if plan.mode is StartMode.COORDINATES and (plan.workers or not plan.options.invite) and plan.run.transport.kind != "in-process":
        forkserver.prepare()


def headline(plan: StartPlan, loop: TrainingLoop | CoordinatorLoop) -> str:
    """A line for the user that describes the run that starts; another about the data, where the user should know how it was read."""
    rest = f"{loop.engine.size:,} trained parameters, in {loop.directory.path}{_data_note(loop.directory.path)}"
    if plan.mode is StartMode.COORDINATES:
        return f"{plan.run.strategy.kind}, {rest}"
    where = loop.engine.device if plan.here is None else f"{plan.here.size} × {loop.engine.device.type} ({plan.run.engine.kind})"
    own = plan.run.model.kind in USER_KINDS
    what = type(loop.engine.task.players["model"]).__name__ if own else f"{plan.run.chosen_task.kind} ({plan.run.model.kind})"
    return f"{what} on {where}, {rest}"


def _data_note(folder: Path) -> str:
    from shoal.data.text.run_tokenizer import CONVERSATIONS
    from shoal.runs.folder.run_reader import DATA

    described = (DATA.read(folder / "data.json") or {}).get("name", "")
    return f"\n{described}" if any(words in described for words in (CONVERSATIONS, "data.sequence_length", "left out")) else ""


@contextmanager
def _built(
    plan: StartPlan, reporters: list[Reporter], progress: Progress | None, arguments: Arguments, live: LiveObjects
) -> Iterator[StartedRun]:
    if plan.mode is StartMode.ALONE:
        yield _alone(plan, reporters, progress, live)
        return
    assert plan.mode is StartMode.COORDINATES, plan.mode
    from shoal.launch.run_database import run_location

    preload_libraries(plan)
    options, hosts, cluster = plan.options, _listen_addresses(plan), plan.run.cluster
    with run_location(plan.run, options.run_dir, options.resume, hosts, options.invite) as location:
        from shoal.runs.coordinator_setup import prepare

        ready = prepare(
            plan.loaded,
            run_dir=location.run_dir,
            resume=options.resume,
            reporters=reporters,
            progress=progress,
            # a new run is divided for this number of workers
            workers=cluster.num_workers + plan.run.coordinator.trains if options.invite and cluster.num_workers else plan.workers,
            hosts=hosts,
            transport=location.transport,
            live=live,
            above=options.above,
        )
        ready.loop.directory.fresh |= location.fresh
        location.report_to(ready.loop.message)
        if location.invitation is not None:
            ready = ready._replace(invitation=location.invitation)
        outside = location.outside or ready.invitation
        listening = hosts if location.outside else listening_hosts(location.transport, hosts)
        public = _public_address(plan, ready.loop.directory.path, outside.address, listening)
        reached = outside._replace(address=public or outside.address)
        coordination = _Coordination(plan, ready, arguments(_worker_names(plan, ready)), live, reached)
        yield StartedRun(ready.loop, coordination.train, outside, location.role, listening, public)


def _public_address(plan: StartPlan, folder: Path, address: str, listening: Sequence[str]) -> str:
    """Where other machines reach the coordinator; empty: at the address where it listens. Raises ShoalError where none can reach it."""
    from shoal.runs.invitation import keep_public_address, reached_address
    from shoal.runs.owner import write_public_address

    given = plan.options.public_address
    if given is not None and all(map(is_loopback, listening)):
        raise ShoalError(f"--public-address {given}: the coordinator listens for this machine only; leave out --host, or name another")
    if not plan.options.invite:
        return ""
    public = keep_public_address(Path(plan.run.coordinator.state_path or folder / "coordinator"), given)
    if not public:
        return ""
    write_public_address(folder, public)
    return reached_address(address, public)


def _alone(plan: StartPlan, reporters: list[Reporter], progress: Progress | None, live: LiveObjects) -> StartedRun:
    from shoal.runs.training.train_alone import prepare

    options = plan.options
    loop = prepare(
        plan.loaded,
        run_dir=options.run_dir,
        resume=options.resume,
        reporters=reporters,
        progress=progress,
        here=plan.here,
        tunnel=plan.tunnel,
        live=live,
    )
    return StartedRun(loop, lambda: _outcome(loop))


def _outcome(loop: TrainingLoop | CoordinatorLoop) -> RunOutcome:
    """Train, and export the model however the run ends, if there are weights."""
    from shoal.runs.export.folder import export_final_model

    try:
        summary = loop.train()
    except ShoalError as problem:
        raise _with_model(loop, problem) from problem
    return RunOutcome(summary, export_final_model(loop.run, loop.directory.path) if loop.engine.world.first else None)


def _with_model(loop: TrainingLoop | CoordinatorLoop, problem: ShoalError) -> ShoalError:
    """Export the last good weights of a run that failed. Return its error, which says where they are."""
    from shoal.runs.export.folder import export_final_model

    try:
        folder = export_final_model(loop.run, loop.directory.path) if loop.engine.world.first else None
    except ShoalError:  # the run's own error says more
        return problem
    return problem if folder is None else ShoalError(f"{problem}. The model with the last good weights is in {folder}")


class _Coordination(NamedTuple):
    """A coordinator that is ready, and the workers that this process starts for it."""

    plan: StartPlan
    ready: ReadyCoordinator
    workers: Mapping[str, Sequence[str]]
    """By name: further arguments of `shoal join`."""
    live: LiveObjects
    outside: Invitation
    """How workers on other machines join."""

    def train(self) -> RunOutcome:
        """Start the workers and coordinate until the run ends."""
        loop, torchrun = self.ready.loop, self.plan.torchrun
        threads = fair_threads(len(self.workers)) if self.plan.run.transport.kind == "in-process" else 1
        with closing(loop.server), _torch_threads(threads if self.workers else None):
            launcher = self._launcher()
            if torchrun is not None:
                loop.goodbye_s = math.inf
            loop.on_tick = lambda: launcher.look_after(loop.message, loop.report_exit)
            with closing(launcher):
                launcher.start()
                if self.plan.options.up:
                    note_started(loop.directory.path, {one.name: why for one in launcher.workers if (why := getattr(one, "failed", ""))})
                outcome = _outcome(loop)
        if torchrun is not None:
            torchrun.announce_end(outcome.summary)
        return outcome

    def _launcher(self) -> LocalWorkers | WorkerThreads | RayWorkers:
        """What starts the workers. Raises ShoalError where it is not installed."""
        plan, loop, folder = self.plan, self.ready.loop, self.ready.loop.directory.path / "workers"
        if plan.torchrun is not None:
            return plan.torchrun.announce(self.ready.invitation, loop.directory.path)
        if plan.run.transport.kind == "in-process":
            return self._threads(folder)
        processes = EngineProcesses.of(loop.run, "join", loop.message, max(1, len(self.workers)))
        invitation = self.ready.invitation._asdict() | ({"crew": processes} if processes is not None else {})
        trusted, environ = factory_arguments(loop.run)
        workers = {name: [*arguments, *trusted, *arguments_for(loop.run)] for name, arguments in self.workers.items()}
        if not (plan.options.up and plan.run.launch.elsewhere):
            return LocalWorkers(folder, invitation, workers, gpus_for(loop.run), environ=environ)
        if loop.run.launch.kind == "ray":
            from shoal.launch.ray_workers import RayWorkers

            return RayWorkers(loop.run, folder, self.outside, workers, loop.message)
        from shoal.launch.ssh_workers import SshWorkers

        return SshWorkers(loop.run, folder, self.outside, workers, loop.message)

    def _threads(self, folder: Path) -> WorkerThreads:
        from shoal.launch.threads import WorkerThreads

        if self.plan.run.engine.several_processes:
            kind = self.plan.run.engine.kind
            raise ShoalError(f"transport.kind in-process: workers are threads of this process, and the engine {kind} is several")
        if any(self.workers.values()):
            raise ShoalError("transport.kind in-process: --netem and --slowdown are for workers that are processes of their own")
        return WorkerThreads(self.ready.loop.run, folder, self.ready.invitation, list(self.workers), self.live, self.ready.loop.message)


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """Limit torch to this many threads, since the workers beside this process need the cores; None: no limit."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _worker_names(plan: StartPlan, ready: ReadyCoordinator) -> list[str]:
    """Names of the workers that this process starts. A resumed run has as many as it began with."""
    cluster, workers = plan.run.cluster, plan.workers
    if not plan.options.invite and not workers:
        workers = ready.loop.coordinator.plan.expected
    return worker_names(workers, (cluster.server or "here",) if plan.options.invite and not plan.options.up else cluster.workers)


# --- addresses to listen on ----------------------------------------------------------------------------


def pipeline_host(plan: StartPlan, arguments: Sequence[str], tell: Callable[[str], None]) -> PipelineHost:
    """The coordinator of a pipeline over machines. `arguments`: those of `shoal train` for the first stage.

    The data is read before other machines are asked to join: if it is missing, they need not wait for the error.
    """
    from shoal import data
    from shoal.launch.pipeline_rendezvous import PipelineHost

    data.load(plan.run)
    hosts = plan.options.hosts or address_of_first(plan.run, "--host", plan.loaded.settings.spelling) or ("0.0.0.0",)
    return PipelineHost(plan.run, hosts, arguments, tell)


def address_of_first(run: Run, option: str, spelling: Callable[[str], str] = lambda path: path) -> tuple[str, ...]:
    """The server's address in its own entry of cluster.hosts, if any; `option` overrides it. Raises ShoalError if it is not here."""
    name = run.cluster.server or ""
    server = run.cluster.hosts.get(name)
    if server is None or not server.server_address or getattr(run.transport, "host", None) is not None:
        return ()
    said = f"says that {name} is at {server.server_address}"
    _check_address(server.server_address, f"`{spelling(f'cluster.hosts.{name}.server_address')}` {said}", name, option)
    return (server.server_address,)


def _listen_addresses(plan: StartPlan) -> tuple[str, ...]:
    if plan.options.invite:
        return plan.options.hosts or _addresses_of_server(plan.run, plan.loaded.settings.spelling) or ("0.0.0.0",)
    return plan.torchrun.hosts if plan.torchrun is not None else ("127.0.0.1",)


def _addresses_of_server(run: Run, spelling: Callable[[str], str]) -> tuple[str, ...]:
    """All addresses at which the entries of cluster.hosts reach the server, its own entry first. Raises ShoalError likewise."""
    if isinstance(run.transport, Postgres) or getattr(run.transport, "host", None) is not None:
        return ()
    names = sorted(run.cluster.hosts, key=lambda name: name != run.cluster.server)
    found = {run.cluster.hosts[name].server_address: name for name in reversed(names)}
    for address, name in found.items():
        said = f"`{spelling(f'cluster.hosts.{name}.server_address')}` says that the server listens at {address}"
        _check_address(address or "0.0.0.0", said, run.cluster.server or "the server", "--host")
    return tuple(address for address in reversed(found) if address is not None)


def _check_address(address: str, said: str, machine: str, option: str) -> None:
    from shoal.transports.addresses import free_port

    try:
        free_port(address)
    except ShoalError:
        raise ShoalError(f"{said}, which is no address of this machine: start it on {machine}, or say {option} ADDRESS") from None
