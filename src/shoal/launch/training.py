"""Training from Python: `from shoal import TrainerConfig, train`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.config.load import File, Loaded, parse_override, resolve
from shoal.config.problems import ConfigError
from shoal.config.schema.cluster import XmlRpc, Zmq
from shoal.config.trainer_config import TrainerConfig
from shoal.errors import ShoalError
from shoal.launch.local import LocalWorkers, gpus_of
from shoal.launch.ranks import Crew, place_in, refuse_torchrun
from shoal.strategies import coordinating, local
from shoal.strategies.trained import save_final
from shoal.worker import Loop, Reporter


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
        alone = local.prepare(loaded, **common, here=here)
        return _finished(alone, alone.train())
    refuse_torchrun()
    if not isinstance(loaded.run.transport, (Zmq, XmlRpc)):
        raise ShoalError(f"transport.kind {loaded.run.transport.kind}: start this run with `shoal train`, or choose zmq")
    near = loaded.run.transport.replace(host=None, port=0)
    made = coordinating.prepare(loaded, **common, workers=workers, hosts=("127.0.0.1",), transport=near)
    loop = made.loop
    names = [f"w{number}" for number in range(1, loop.coordinator.plan.expected + 1)]
    crew = Crew.of(loop.run, "join", loop.message, len(names))
    told = made.invitation._asdict() | ({"crew": crew} if crew is not None else {})
    started = LocalWorkers(loop.directory.path / "workers", told, dict.fromkeys(names, ()), gpus_of(loop.run))
    loop.beside = lambda: started.look_after(loop.message)
    try:
        started.start()
        return _finished(loop, loop.train())
    finally:
        started.close()
        loop.server.close()


def _finished(loop: Loop, summary: dict[str, Any]) -> dict[str, Any]:
    if loop.engine.world.first:
        save_final(loop.run, loop.directory.path, summary)
    return summary


def _loaded(config: TrainerConfig | str | Path, overrides: Iterable[str]) -> Loaded:
    settings = [parse_override(text) for text in overrides]
    return config.resolve(overrides=settings) if isinstance(config, TrainerConfig) else resolve([File(str(config))], settings)
