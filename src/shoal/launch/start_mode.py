"""Decides how a run starts, from its settings and what the caller asks for: which processes take part, and what this one does.

`start.py` then starts the run that was chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from shoal.config.derived_values import workers_needed
from shoal.config.load import LoadedConfig, Override
from shoal.config.missing_parts import missing_model, missing_packages, waits_for
from shoal.config.problems import ConfigError
from shoal.config.ranks import STRATEGY_FOR_ANSWERS, STRATEGY_FOR_WORKERS, RankPlace, rank_place
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.launch.engine_processes import place_in_engine, settings_from_start
from shoal.launch.local import use_passive_waiting
from shoal.transports.discovery import require_zeroconf

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.launch.torchrun import TorchrunGroup
    from shoal.runs.worker_run import JoinedWorker
    from shoal.transports.zeromq.tunnel import Tunnel

Load = Callable[[Sequence[Override]], LoadedConfig]
"""Resolves the configuration with these settings on top."""


class StartOptions(NamedTuple):
    """What the caller asks for besides the settings of the run."""

    run_dir: str | None = None
    resume: bool = False
    workers: int | None = None
    """Workers on this machine; None: as the settings say."""
    default_workers: int = 0
    """Number of workers where neither the caller nor the settings give one; 0: that is an error."""
    invite: bool = False
    """Whether workers of other machines may join."""
    hosts: tuple[str, ...] = ()
    """Addresses to listen on for them; empty: all addresses of this machine."""
    public_address: str | None = None
    """HOST[:PORT] by which other machines reach this one; None: by the addresses to listen on."""
    announce: bool = False
    """Announce the coordinator on this machine's networks."""
    watch: bool = False
    """Show the run in the browser."""
    live: tuple[str, ...] = ()
    """Names of live objects that the program passes and workers need: only threads of this process can use them."""
    up: bool = False
    """Start the workers where launch.kind says, and let others join (`shoal up`)."""
    above: JoinedWorker | None = None
    """For a relay: its membership at the coordinator above."""


class StartMode(Enum):
    """What this process does."""

    ALONE = auto()
    """Trains, perhaps as one of the processes of an engine."""
    RANKS = auto()
    """Starts the processes of an engine, which train."""
    COORDINATES = auto()
    """Holds the weights, and workers train."""
    GATHERS = auto()
    """Runs the first stage of a pipeline on this machine; machines that join run the others."""
    JOB = auto()
    """Writes the script of a job, whose machines then do all the rest."""
    FOLLOWS = auto()
    """Was started by torchrun, and another process coordinates."""


class StartPlan(NamedTuple):
    """The processes that take part in a run, and what this one does."""

    mode: StartMode
    loaded: LoadedConfig
    options: StartOptions
    here: RankPlace | None = None
    """Rank of this process, where it is one of an engine's."""
    workers: int = 0
    """Workers to start on this machine; 0 for a resumed run: as many as the run began with."""
    torchrun: TorchrunGroup | None = None
    """The processes that torchrun started, where each runs a worker."""
    tunnel: Tunnel | None = None
    """To the machines of the other stages, where each is on a machine of its own."""
    note: str = ""
    """For the user: a choice that neither the caller nor the settings made."""

    @property
    def run(self) -> Run:
        return self.loaded.run


def plan_start(load: Load, options: StartOptions) -> StartPlan:
    """Choose the mode. Raises ConfigError for faulty settings, ShoalError where settings and options contradict each other."""
    loaded, note = _checked(load([]), written=options.up), ""
    more: list[Override] = []
    if options.up and loaded.run.launch.kind == "slurm" and not options.resume:
        return _plan_job(loaded, options)
    if loaded.run.alone and loaded.run.engine.kind == "pipeline":
        return _plan_pipeline(load, loaded, options)
    if options.workers and loaded.run.alone:
        answers = loaded.run.chosen_task.needs == "prompts"
        chosen, others = (STRATEGY_FOR_ANSWERS, "") if answers else (STRATEGY_FOR_WORKERS, " (others: edp, async, diloco)")
        note = f"strategy.kind: {chosen}, since there are workers{others}"
        more = [Override("strategy.kind", chosen, "--workers")]
        loaded = _checked(load(more), written=options.up)
    if options.invite:
        return _plan_invited(loaded, options)
    if loaded.run.alone:
        return _plan_alone(loaded, options)
    if options.live:
        _refuse_other_processes(loaded, options.live)
        more.append(Override("transport.kind", "in-process", f"{options.live[0]}=…"))
        loaded = _checked(load(more))
    use_passive_waiting()
    here, given = rank_place(), options.workers or loaded.run.cluster.num_workers
    count = given or _default_workers(loaded.run, options)
    if count == 1 and not given and here is None:
        note = "one worker: --workers N starts more, `shoal coordinate` lets other machines join"
    if derived := settings_from_start(loaded.run, here, count):
        loaded = _checked(load([*more, *derived]))
    if here is not None:
        return _plan_torchrun(loaded, options, here)
    if not count and not options.resume:
        kind = loaded.run.strategy.kind
        raise ShoalError(f"how many workers? --workers N starts them here; `shoal coordinate` waits for others ({kind})")
    if count and (waiting := waits_for(loaded, count)):
        note = f"{waiting}; --workers {workers_needed(loaded.settings)} starts them all here"
    own = bool(count and loaded.run.coordinator.trains and not options.workers)  # a worker for the coordinator's machine
    return StartPlan(StartMode.COORDINATES, loaded, options, workers=count + own, note=note)


def _default_workers(run: Run, options: StartOptions) -> int:
    """The number of workers to start where neither the caller nor the settings give one; 0: there is no such number."""
    if options.resume:  # a resumed run has its own number of workers
        return 0
    if run.engine.kind == "collectives":  # all processes are one worker
        return 1
    return options.default_workers or run.strategy.default_workers


def _checked(loaded: LoadedConfig, *, written: bool = False) -> LoadedConfig:
    """The same configuration. Raises ConfigError with everything that is wrong with it. `written`: the run is to start on the machines of a
    scheduler, for which this one only writes a file; packages that are missing here are warnings."""
    if not loaded.ok:
        raise ConfigError(loaded.problems)
    if written and loaded.run.launch.written:
        loaded.problems += missing_packages(loaded, severity="warning", help="the machines of the job need it; this one does not")
        problems = missing_model(loaded)
    else:
        problems = missing_packages(loaded) + missing_model(loaded)
    if problems:
        raise ConfigError(problems)
    return loaded


def _refuse_other_processes(loaded: LoadedConfig, live: tuple[str, ...]) -> None:
    """Raises ShoalError where workers would be processes, which cannot use live objects of this one."""
    run, settings = loaded.run, loaded.settings
    explicit = settings.given("transport.kind") and run.transport.kind != "in-process"
    reason = "torchrun has started several" if rank_place() else f"transport.kind is {run.transport.kind}" if explicit else ""
    reason = reason or (f"the engine {run.engine.kind} is several" if run.engine.several_processes else "")
    if reason:
        raise ShoalError(
            f"{' and '.join(f'{name}=' for name in live)} cannot be handed to other processes, and {reason}. For worker processes name "
            f'functions that make them ({live[0]}="module:function"); workers that are threads of this program do not need these settings'
        )


def _plan_alone(loaded: LoadedConfig, options: StartOptions) -> StartPlan:
    here = place_in_engine(loaded.run)
    if here is None and loaded.run.engine.several_processes:
        return StartPlan(StartMode.RANKS, loaded, options)
    return StartPlan(StartMode.ALONE, loaded, options, here)


def _plan_pipeline(load: Load, loaded: LoadedConfig, options: StartOptions) -> StartPlan:
    """One model over several processes or machines. Each worker is a stage; this process, or the server, runs the first."""
    run = loaded.run
    if not options.invite:
        stages = Override("launch.devices_per_node", str((options.workers or 0) + 1), "--workers")
        return _plan_alone(_checked(load([stages])) if options.workers else loaded, options)
    if options.workers:
        raise ShoalError("--workers: this machine has one stage of the pipeline; `shoal train` starts all stages on one machine")
    if run.transport.kind not in ("zmq", "xmlrpc"):
        raise ShoalError(f"transport.kind: machines find their places in a pipeline over zmq or xmlrpc, and this is {run.transport.kind}")
    _check_announced(run, options)
    if not run.cluster.num_workers and not run.placed:
        raise ShoalError("how many machines join this one? --set cluster.num_workers=2, or list them in cluster.workers")
    return StartPlan(StartMode.GATHERS, loaded, options)


def _plan_job(loaded: LoadedConfig, options: StartOptions) -> StartPlan:
    """What this machine has (GPUs, packages, data) does not matter: the processes run on others."""
    if not loaded.run.alone:
        _check_transport(loaded.run, options)
    return StartPlan(StartMode.JOB, loaded, options)


def _check_transport(run: Run, options: StartOptions) -> None:
    """Raises ShoalError where workers of other machines could not connect."""
    if run.transport.kind == "in-process":
        raise ShoalError("transport.kind: other machines do not reach workers that are threads of this process: choose zmq or postgres")
    if isinstance(run.transport, Postgres) and len(options.hosts) > (run.transport.host == "embedded"):
        raise ShoalError("--host: a database of the run's own listens at one address, and another one listens where it does")


def _plan_invited(loaded: LoadedConfig, options: StartOptions) -> StartPlan:
    """A coordinator that workers of other machines join."""
    run = loaded.run
    if run.alone:
        answers = run.chosen_task.kind == "ppo"
        advice = "--set strategy.kind=rollouts" if answers else "--set strategy.kind=syncps (or edp, async, diloco)"
        raise ShoalError(f"strategy.kind is local, so there are no workers to coordinate: {advice}")
    _check_transport(run, options)
    _check_announced(run, options)
    use_passive_waiting()
    if options.up:
        workers = options.workers or run.cluster.num_workers or run.launch.nodes or 0
        if not workers:
            raise ShoalError("how many workers? Name them in cluster.workers, or say --workers N (--num_nodes N)")
    else:
        workers = int(run.coordinator.trains) if options.workers is None else options.workers
    return StartPlan(StartMode.COORDINATES, loaded, options, workers=workers)


def _check_announced(run: Run, options: StartOptions) -> None:
    """Raises ShoalError where nothing can be announced, or workers could not check who answers at an address that was announced."""
    if not options.announce:
        return
    require_zeroconf()
    own_database = isinstance(run.transport, Postgres) and run.transport.host == "embedded"
    if run.transport.kind != "zmq" and not own_database:
        what = "a database of others" if isinstance(run.transport, Postgres) else run.transport.kind
        raise ShoalError(f"--announce: workers cannot check the key of {what}: choose transport.kind zmq, or a class's own database")


def _plan_torchrun(loaded: LoadedConfig, options: StartOptions, here: RankPlace) -> StartPlan:
    """One of the processes that torchrun started. Each runs a worker, or a part of one."""
    from shoal.launch.torchrun import TorchrunGroup

    group = TorchrunGroup(loaded.run, here)
    if options.workers not in (None, group.workers):
        raise ShoalError(f"{options.workers} workers are asked for, and torchrun started {group.workers}: leave that out")
    if not group.first:
        return StartPlan(StartMode.FOLLOWS, loaded, options, torchrun=group)
    if (folder := group.run_begun_before()) is not None:
        options = options._replace(run_dir=folder, resume=True)
    return StartPlan(StartMode.COORDINATES, loaded, options, workers=group.workers, torchrun=group)
