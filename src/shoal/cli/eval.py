"""`shoal eval MODEL`: evaluates a model on its run's held-out data, on other data, or on tasks of lm-eval."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.cli.generate import WEIGHTS
from shoal.cli.main import warn
from shoal.cli.options import MODEL_HELP, parse_with_plugins
from shoal.config.load import Override, parse_override
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.runs.build_run import RunParts


class CheckpointEvaluation(NamedTuple):
    """Metrics of a model on data."""

    checkpoint: str
    step: int
    data: str
    samples: int
    """Samples that were evaluated."""
    held_out: bool
    """Whether they are the held-out part of the run's data; otherwise they are all of other data."""
    metrics: dict[str, float]


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "shoal eval", description="Evaluate a model on its run's held-out data, on other data, or on tasks of lm-eval."
    )
    parser.add_argument("run", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--data", metavar="PATH", help="evaluate on all of this data: texts, or files of the kind that the run reads")
    parser.add_argument("--tasks", metavar="NAME,…", help="evaluate on these tasks of lm-eval instead")
    parser.add_argument("--task-folder", metavar="DIR", help="a folder with descriptions of further tasks of lm-eval")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N samples of each task of lm-eval")
    parser.add_argument("--weights", choices=WEIGHTS, help="how matrices are held in memory (default: the run's setting)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="PATH=VALUE", help="set one value")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parse_with_plugins(parser, argv)
    if arguments.tasks is None and (arguments.task_folder or arguments.limit is not None):
        parser.error("--task-folder and --limit are for --tasks")
    if arguments.tasks is not None and (arguments.data or arguments.settings):
        parser.error("--tasks bring their own data: leave out --data and --set")
    if arguments.limit is not None and arguments.limit < 1:
        parser.error("--limit must be at least 1")
    return _evaluate_tasks(arguments) if arguments.tasks is not None else _evaluate_data(arguments)


def _evaluate_data(arguments: argparse.Namespace) -> int:
    settings = [*arguments.settings, *([f"serving.weights={arguments.weights}"] if arguments.weights else [])]
    evaluation = evaluate(arguments.run, arguments.data, [parse_override(text) for text in settings])
    if arguments.format == "json":
        print(json.dumps({"checkpoint": evaluation.checkpoint, "step": evaluation.step, "metrics": evaluation.metrics}, indent=2))
        return 0
    what = f"held-out samples (of the run's data, {evaluation.data})" if evaluation.held_out else f"samples ({evaluation.data})"
    print(f"{evaluation.checkpoint} on {evaluation.samples:,} {what}")
    print("\n".join(f"  {name:<24} {value:.6g}" for name, value in evaluation.metrics.items()))
    return 0


def _evaluate_tasks(arguments: argparse.Namespace) -> int:
    from shoal.runs.lm_eval_tasks import evaluate_tasks
    from shoal.runs.trained_model import open_model

    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    opened = partial(open_model, arguments.run, warn, weights=arguments.weights)
    metrics = evaluate_tasks(opened, names, arguments.task_folder, arguments.limit)
    if arguments.format == "json":
        print(json.dumps({"checkpoint": arguments.run, "tasks": metrics}, indent=2))
        return 0
    for task, values in metrics.items():
        print(f"{arguments.run} on {task}")
        print("\n".join(f"  {name:<24} {value:.6g}" for name, value in values.items()))
    return 0


def evaluate(target: str, other_data: str | None = None, overrides: list[Override] | None = None) -> CheckpointEvaluation:
    """Evaluate a model on its run's held-out data, or on all of other data. Raises ShoalError."""
    from shoal.models.packed.layers import pack_linear_layers
    from shoal.runs.build_run import assemble
    from shoal.runs.trained_model import find_model, is_run, settings_of, weights_for_task
    from shoal.runs.training.initial_weights import run_folder_of

    overrides = overrides or []
    found = find_model(target, warn)
    trained = is_run(Path(found))
    held_out = other_data is None and not any(one.path.startswith("data.source") for one in overrides)
    if not trained and held_out:
        raise ShoalError(f"{target} comes without data: add --data FILE, a text to evaluate it on")
    run = settings_of(found, warn, overrides)
    if other_data is not None:
        run = settings_of(found, warn, [*overrides, *_reading(run, other_data)])
    parts = assemble(run, tokenizer_of=run_folder_of(found) if trained else None)
    step, path = 0, target  # what is found may be a copy that was converted
    if trained:
        checkpoint = weights_for_task(found, parts.engine.task, warn)
        parts.engine.load_weights(checkpoint.weights)
        step, path = checkpoint.step, str(checkpoint.path)
    pack_linear_layers(parts.engine.task.players["model"], run.serving.weights)
    limited = held_out or any(one.path.startswith("evaluation") for one in overrides)
    count, batches = _samples_of(parts, held_out, parts.run.evaluation.batches if limited else None)
    return CheckpointEvaluation(path, step, parts.data.info.name, count, held_out, parts.engine.evaluate(batches))


def _samples_of(parts: RunParts, held_out: bool, most: int | None) -> tuple[int, Iterator[Any]]:
    """The number of samples to evaluate, and their batches: of the held-out part, or of all data. `most`: batches."""
    from shoal.runs.build_run import held_out_batches, held_out_count

    run = parts.run.replace(evaluation=parts.run.evaluation.replace(strategy="epoch", batches=None))
    chosen: list[Any] = [parts.data.eval] if held_out else [parts.data.train, parts.data.eval]
    samples = [one for one in chosen if one is not None]
    batches: list[Callable[[], Iterator[Any]]] = [made for one in samples if (made := held_out_batches(run, one)) is not None]
    if not batches:
        raise ShoalError("this run's data has no held-out part to evaluate on: add --data FILE")
    limit = run.replace(evaluation=run.evaluation.replace(batches=most))
    count = sum(held_out_count(run, one) for one in samples)
    if most is not None:
        count = min(count, max(held_out_count(limit, one) for one in samples))
    return count, islice(chain.from_iterable(make() for make in batches), most)


def _reading(run: Run, path: str) -> list[Override]:
    """Settings that read other data: of the run's own kind where that is read from a path, else texts."""
    if not Path(path).exists():
        raise ShoalError(f"--data: there is no file or folder {path}")
    kind: list[Override] = []
    if getattr(run.data.source, "path", None) is None:
        if run.chosen_task.needs != "tokens":
            needs = run.chosen_task.needs
            raise ShoalError(f"--data names texts, and the task {run.chosen_task.kind} needs {needs}: set data.source with --set instead")
        kind = [Override("data.source.kind", "text", f"--data {path}")]
    values = {"data.source.path": json.dumps(str(Path(path).resolve())), "data.streaming": "false", "data.loader.drop_last": "false"}
    return [*kind, *(Override(name, value, f"--data {path}") for name, value in values.items())]
