"""`shoal eval RUN`: evaluates a run's newest checkpoint on its held-out data."""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

from shoal.cli.main import warn
from shoal.cli.options import parse_with_plugins
from shoal.errors import ShoalError


class CheckpointEvaluation(NamedTuple):
    """Metrics of a checkpoint on held-out data."""

    checkpoint: str
    step: int
    data: str
    samples: int
    """Held-out samples that were evaluated."""
    metrics: dict[str, float]


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("shoal eval", description="Evaluate a run's newest checkpoint on its held-out data.")
    parser.add_argument("run", metavar="RUN", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parse_with_plugins(parser, argv)

    evaluation = evaluate(arguments.run)
    if arguments.format == "json":
        print(json.dumps({"checkpoint": evaluation.checkpoint, "step": evaluation.step, "metrics": evaluation.metrics}, indent=2))
    else:
        print(f"{evaluation.checkpoint} on {evaluation.samples:,} held-out samples (of the run's data, {evaluation.data})")
        print("\n".join(f"  {name:<24} {value:.6g}" for name, value in evaluation.metrics.items()))
    return 0


def evaluate(path: str) -> CheckpointEvaluation:
    """Evaluate the newest checkpoint of a run, or one of its checkpoints. Raises ShoalError."""
    from shoal.runs.build_run import assemble, held_out_batches, held_out_count
    from shoal.runs.trained_model import open_run

    trained = open_run(path, warn)
    parts = assemble(trained.run, tokenizer_of=trained.root)
    run, samples = trained.run.replace(evaluation=trained.run.evaluation.replace(strategy="epoch")), parts.data.eval
    batches = held_out_batches(run, samples)
    if batches is None or samples is None:
        raise ShoalError("this run's data has no held-out part to evaluate on")
    parts.engine.load_weights(trained.checkpoint.weights)
    count, found = held_out_count(run, samples), trained.checkpoint
    return CheckpointEvaluation(str(found.path), found.step, parts.data.info.name, count, parts.engine.evaluate(batches()))
