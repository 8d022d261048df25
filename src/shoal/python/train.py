"""`shoal.train`: training from Python."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.config.derived_values import USER_KINDS
from shoal.config.plugins import load as load_plugins
from shoal.errors import ShoalError
from shoal.launch.start import headline, start_run
from shoal.launch.start_mode import StartMode, StartOptions, StartPlan, plan_start
from shoal.python.arguments import (
    Config,
    ProgramObjects,
    check_objects,
    check_workers,
    loader_of,
    overrides_of,
    reporters_of,
    with_optimizer,
)
from shoal.python.result import Result, result_elsewhere, result_of
from shoal.reporters.progress import progress_for
from shoal.reporters.sinks import sinks_for
from shoal.runs.monitoring.recorder import Reporter


def train(
    config: Config,
    *,
    model: nn.Module | str | None = None,
    data: Any = None,
    eval_data: Any = None,
    collate: Callable[[list[Any]], Any] | str | None = None,
    loss: Callable[[nn.Module, Any], Any] | str | None = None,
    metrics: Mapping[str, Callable[[nn.Module, Any], Any]] | None = None,
    reward: Callable[..., float] | str | None = None,
    optimizer: torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer] | str | None = None,
    scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | str | None = None,
    reporters: Iterable[Reporter] = (),
    workers: int | None = None,
    overrides: Iterable[str] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    plugins: Iterable[str | Path] = (),
) -> Result:
    """Train, alone or with workers on this machine, and return the result.

    `config` is a file, a preset, a list of them, a dict of settings, a `TrainerConfig` or a `Run`; `overrides` are `path=value`, as on the
    command line. The other arguments replace parts of the configuration: see docs/python.md. `model`, `data`, `eval_data`, `collate`,
    `loss`, `reward`, `optimizer` and `scheduler` may be names, `"module:function"`. Workers that need live objects are threads of this
    process; others are processes. The default strategy for several workers is syncps. `progress` prints on standard error what `shoal
    train` prints. `plugins` are files or modules (docs/extending.md). Raises ConfigError for wrong settings, ShoalError if the run cannot
    continue.
    """
    _check_main()
    load_plugins(*map(str, plugins))
    check_workers(workers)
    own = with_optimizer(check_objects(model, data, eval_data, collate, loss, metrics, reward), optimizer, scheduler)
    watching = reporters_of(reporters)
    load = loader_of(config, [*own.settings, *overrides_of(overrides)])
    plan = plan_start(load, StartOptions(str(run_dir) if run_dir is not None else None, resume, workers, default_workers=1, live=own.live))
    _check_fit(plan, own)
    return _follow(plan, watching) if plan.mode is StartMode.FOLLOWS else _train(plan, own, watching, progress)


def _check_main() -> None:
    """Raise ShoalError in a data-loader process that imports a program which trains at import."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ShoalError(
            "data.loader.num_workers: the processes that load data ahead import this program, and it trains when it is imported: "
            'put the training under `if __name__ == "__main__":`, or set data.loader.num_workers to 0'
        )


def _train(plan: StartPlan, own: ProgramObjects, watching: list[Reporter], progress: bool) -> Result:
    """Train or coordinate in this process. Of an engine's processes only rank 0 reports."""
    run, speaks = plan.run, plan.here is None or plan.here.rank == 0
    shown = progress_for(sys.stderr, run.log_level, plan.mode is StartMode.COORDINATES, run.log_format)
    shown.own_metrics = own.given.loss is not None or own.given.metrics is not None
    with start_run(plan, [*([shown] if progress else []), *sinks_for(run), *watching] if speaks else [], live=own.given) as ready:
        for text in (plan.note, *(f"warning: {problem.message}" for problem in plan.loaded.problems), headline(plan, ready.loop)):
            if text:
                ready.loop.message(text)
        try:
            return result_of(ready.loop, ready.train().summary)
        except KeyboardInterrupt:
            if progress and speaks:
                sys.stderr.write(_how_to_resume(str(ready.loop.directory.path)))
            raise


def _how_to_resume(folder: str) -> str:
    return f"interrupted: the same call with run_dir={folder!r} and resume=True continues from the last checkpoint\n"


def _check_fit(plan: StartPlan, own: ProgramObjects) -> None:
    """Raise ShoalError if the program's objects and the settings do not fit together."""
    run, settings = plan.run, plan.loaded.settings
    source = run.data.source.kind if run.data.source is not None else ""
    if plan.mode is StartMode.RANKS:
        raise ShoalError(
            f"the engine {run.engine.kind} is several processes: start this program with torchrun --nproc-per-node N, or use `shoal train`"
        )
    if source in USER_KINDS and run.model.kind not in USER_KINDS:
        raise ShoalError(
            f"data= is your own, and a model of kind {run.model.kind} is made for data that settings describe: give model=, too"
        )
    for argument, section, part in _own_steps(own):
        if part is not None and any(path[:2] == ("training", section) for path in settings.history):
            raise ShoalError(f"{argument}= and training.{section} are both given: leave one of them out")
    if run.model.kind in USER_KINDS and not settings.given("data.source.kind"):
        raise ShoalError("model= is your own, and nothing says what it learns from: give data=, or name data.source in the configuration")
    if own.given.eval is not None and source not in USER_KINDS and run.chosen_task.needs != "labels":
        raise ShoalError("eval_data= goes with data=: text that settings describe has held-out text of its own")
    if run.chosen_task.needs == "tokens" and run.model.kind in USER_KINDS and not settings.given("data.tokenizer"):
        raise ShoalError("data.tokenizer: name the tokenizer that your model was made for")


def _own_steps(own: ProgramObjects) -> Iterator[tuple[str, str, Any]]:
    """Argument, section of the settings that it replaces, and the part that the program passes."""
    given = own.given.optimizer
    yield "optimizer", "optimizer", given and given.optimizer
    for section in ("schedule", "scheduler"):
        yield "scheduler", section, given and given.scheduler


def _follow(plan: StartPlan, watching: list[Reporter]) -> Result:
    """Work as a torchrun process that does not coordinate."""
    fleet = plan.torchrun
    assert fleet is not None

    def tell(text: str) -> None:
        for reporter in watching:
            reporter.message(text)

    return result_elsewhere(*fleet.work(tell))
