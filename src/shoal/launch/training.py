"""Training from Python: `from shoal import TrainerConfig, train`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.config.load import File, Loaded, parse_override, resolve
from shoal.config.problems import ConfigError
from shoal.config.trainer_config import TrainerConfig
from shoal.launch.local import LocalWorkers
from shoal.strategies import coordinating, local
from shoal.worker import Reporter


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

    `overrides` are `path=value`, as on the command line. Raises ConfigError, or ShoalError where the run cannot go on.
    """
    loaded = _loaded(config, overrides)
    if not loaded.ok:
        raise ConfigError(loaded.problems)
    common: dict[str, Any] = {"run_dir": str(run_dir) if run_dir else None, "resume": resume, "reporters": [*reporters]}
    if loaded.run.strategy.kind == "local":
        return local.prepare(loaded, **common).train()
    here = loaded.run.transport.replace(host=None, port=0)
    made = coordinating.prepare(loaded, **common, workers=workers, hosts=("127.0.0.1",), transport=here)
    loop = made.loop
    names = [f"w{number}" for number in range(1, loop.coordinator.plan.expected + 1)]
    started = LocalWorkers(loop.directory.path / "workers", made.invitation._asdict(), dict.fromkeys(names, ()))
    loop.beside = lambda: started.look_after(loop.message)
    try:
        started.start()
        return loop.train()
    finally:
        started.close()
        loop.server.close()


def _loaded(config: TrainerConfig | str | Path, overrides: Iterable[str]) -> Loaded:
    settings = [parse_override(text) for text in overrides]
    return config.resolve(overrides=settings) if isinstance(config, TrainerConfig) else resolve([File(str(config))], settings)
