"""Training from Python: `from shoal import TrainerConfig, train`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.config.load import File, Loaded, Override, parse_override, resolve
from shoal.config.problems import ConfigError
from shoal.config.ranks import place
from shoal.config.schema.cluster import Collectives, XmlRpc, Zmq
from shoal.config.trainer_config import TrainerConfig
from shoal.errors import ShoalError
from shoal.launch.fleet import Fleet
from shoal.launch.local import LocalWorkers, gpus_of, names_for
from shoal.launch.ranks import Crew, facts_of, place_in
from shoal.runs import alone, coordinating
from shoal.runs.cluster_loop import ClusterLoop
from shoal.runs.coordinating import Coordinating
from shoal.runs.loop import Loop
from shoal.runs.recorder import Reporter
from shoal.runs.trained import save_final


def train(
    config: TrainerConfig | str | Path,
    *,
    workers: int = 1,
    overrides: Iterable[str] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    reporters: Iterable[Reporter] = (),
) -> dict[str, Any]:
    """Train what a `TrainerConfig`, a file or a preset describes, with so many workers on this machine; the run's summary.

    Several workers need a strategy between them: syncps, where the configuration names none.
    `overrides` are `path=value`, as on the command line. Raises ConfigError, or ShoalError where the run cannot go on.
    """
    overrides = [*overrides]
    loaded = _loaded(config, overrides)
    if loaded.ok and loaded.run.strategy.kind == "local" and workers > 1:
        loaded = _loaded(config, [*overrides, "strategy.kind=syncps"])
    if not loaded.ok:
        raise ConfigError(loaded.problems)
    common: dict[str, Any] = {"run_dir": str(run_dir) if run_dir else None, "resume": resume, "reporters": [*reporters]}
    if loaded.run.strategy.kind == "local":
        here = place_in(loaded.run)
        if loaded.run.engine.kind != "single" and here is None:
            raise ShoalError(
                f"the engine {loaded.run.engine.kind} is several processes: start this program with torchrun, or use `shoal train`"
            )
        loop = alone.prepare(loaded, **common, here=here)
        return _finished(loop, loop.train())
    if not isinstance(loaded.run.transport, (Zmq, XmlRpc, Collectives)):
        raise ShoalError(f"transport.kind {loaded.run.transport.kind}: start this run with `shoal train`, or choose zmq")
    here = place()
    if facts := facts_of(loaded.run, here, workers):
        loaded = _loaded(config, overrides, facts)
    if loaded.run.transport.kind == "collectives":
        workers = 1  # to the coordinator they are one
    fleet = Fleet(loaded.run, here) if here is not None else None
    if fleet is not None and workers not in (1, fleet.workers):
        raise ShoalError(f"workers is {workers}, and torchrun started {fleet.workers}: leave it out")
    if fleet is None or fleet.first:
        return _coordinate(loaded, common, workers if fleet is None else fleet.workers, fleet)

    def tell(text: str) -> None:
        for reporter in common["reporters"]:
            reporter.message(text)

    fleet.work(tell)
    return fleet.outcome()


def _coordinate(loaded: Loaded, common: dict[str, Any], workers: int, fleet: Fleet | None) -> dict[str, Any]:
    """With workers on this machine; with `fleet`, those that torchrun started."""
    transport, hosts = loaded.run.transport, fleet.hosts if fleet is not None else ("127.0.0.1",)
    near = transport.replace(host=None, port=0) if isinstance(transport, (Zmq, XmlRpc)) else Zmq(port=0)
    if fleet is not None and (begun := fleet.begun()) is not None:
        common |= {"run_dir": begun, "resume": True}
    made = coordinating.prepare(loaded, **common, workers=workers, hosts=hosts, transport=near)
    names = names_for(made.loop.coordinator.plan.expected, ())
    summary = _finished(made.loop, train_with(made, dict.fromkeys(names, ()), fleet))
    if fleet is not None:
        fleet.end(summary)
    return summary


def train_with(made: Coordinating, workers: Mapping[str, Sequence[str]], fleet: Fleet | None) -> dict[str, Any]:
    """Coordinate a run with workers of this machine, each by its name with arguments of its own; with `fleet`, each of the processes that
    torchrun started has its own."""
    loop = made.loop
    with closing(loop.server):
        if fleet is not None:
            started, loop.goodbye_s = fleet.announce(made.invitation, loop.directory.path), math.inf
        else:
            crew = Crew.of(loop.run, "join", loop.message, max(1, len(workers)))
            told = made.invitation._asdict() | ({"crew": crew} if crew is not None else {})
            started = LocalWorkers(loop.directory.path / "workers", told, workers, gpus_of(loop.run))
        loop.beside = lambda: started.look_after(loop.message, loop.exited)
        with closing(started):
            started.start()
            return loop.train()


def _finished(loop: Loop | ClusterLoop, summary: dict[str, Any]) -> dict[str, Any]:
    if loop.engine.world.first:
        save_final(loop.run, loop.directory.path, summary)
    return summary


def _loaded(config: TrainerConfig | str | Path, overrides: Iterable[str], facts: Iterable[Override] = ()) -> Loaded:
    settings = [*(parse_override(text) for text in overrides), *facts]
    return config.resolve(overrides=settings) if isinstance(config, TrainerConfig) else resolve([File(str(config))], settings)
