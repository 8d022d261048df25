"""Training from Python: `from shoal import TrainerConfig, train`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.config.load import File, Loaded, Override, parse_override, resolve
from shoal.config.trainer_config import TrainerConfig
from shoal.errors import ShoalError
from shoal.launch.starting import Asked, Way, plan, started
from shoal.runs.loop import Reporter


def train(
    config: TrainerConfig | str | Path,
    *,
    workers: int | None = None,
    overrides: Iterable[str] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    reporters: Iterable[Reporter] = (),
) -> dict[str, Any]:
    """Train what a `TrainerConfig`, a file or a preset describes, with so many workers on this machine; the run's summary.

    Several workers need a strategy between them: syncps, where the configuration names none.
    `overrides` are `path=value`, as on the command line. Raises ConfigError, or ShoalError where the run cannot go on.
    """
    settings, told = [parse_override(text) for text in overrides], [*reporters]

    def load(more: Iterable[Override]) -> Loaded:
        every = [*settings, *more]
        return config.resolve(overrides=every) if isinstance(config, TrainerConfig) else resolve([File(str(config))], every)

    made = plan(load, Asked(str(run_dir) if run_dir else None, resume, workers, otherwise=1))
    if made.way is Way.RANKS:
        raise ShoalError(f"the engine {made.run.engine.kind} is several processes: start this program with torchrun, or use `shoal train`")
    if made.way is Way.FOLLOWS:
        assert made.fleet is not None

        def tell(text: str) -> None:
            for reporter in told:
                reporter.message(text)

        made.fleet.work(tell)
        return made.fleet.outcome()
    with started(made, told) as ready:
        return ready.train().summary
