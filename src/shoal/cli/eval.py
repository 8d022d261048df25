"""`shoal eval RUN`: judge a run's newest checkpoint on its held-out data."""

from __future__ import annotations

import argparse
import json
import sys

from shoal.cli.options import add_plugin_option, load_plugins
from shoal.errors import ShoalError


def run(argv: list[str]) -> int:
    made = argparse.ArgumentParser("shoal eval", description="Judge a run's newest checkpoint on its held-out data.")
    made.add_argument("run", metavar="RUN", help="a run's folder, or one of its checkpoints")
    made.add_argument("--format", choices=("text", "json"), default="text")
    add_plugin_option(made)
    arguments = made.parse_args(argv)
    load_plugins(arguments)

    from shoal.runs.assembly import assemble, held_out
    from shoal.runs.trained import open_run

    trained = open_run(arguments.run, lambda text: print(f"warning: {text}", file=sys.stderr))
    parts = assemble(trained.run, tokenizer_of=trained.root)
    batches = held_out(trained.run.replace(evaluation=trained.run.evaluation.replace(strategy="epoch")), parts.data.eval)
    if batches is None:
        raise ShoalError("this run's data has nothing held out to judge it on")
    parts.engine.load_weights(trained.checkpoint.weights)
    metrics = parts.engine.evaluate(batches())
    if arguments.format == "json":
        print(json.dumps({"checkpoint": str(trained.checkpoint.path), "step": trained.checkpoint.step, "metrics": metrics}, indent=2))
    else:
        print(f"{trained.checkpoint.path} on {parts.data.info.name}")
        print("\n".join(f"  {name:<24} {value:.6g}" for name, value in metrics.items()))
    return 0
