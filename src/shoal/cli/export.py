"""`shoal export RUN FOLDER`: a run's model, for other programs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shoal.cli.options import add_plugin_option, load_plugins

EPILOG = """\
A Hugging Face model becomes what AutoModelForCausalLM.from_pretrained loads, with its tokenizer, and with LoRA's matrices added in;
--adapters writes those alone, which a run with LoRA also leaves in its folder. A model of Shoal's own becomes a folder that `shoal
generate` reads; with --mixtral a mixture of experts becomes what AutoModelForCausalLM.from_pretrained loads, where Mixtral computes the
same. Checkpoints of several processes are put together.
"""


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "shoal export", description="Write a run's model into a folder, for other programs.", epilog=EPILOG, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, or one of its checkpoints")
    parser.add_argument("folder", metavar="FOLDER", help="where to: a new folder")
    parser.add_argument("--adapters", action="store_true", help="of a run with LoRA: its small matrices alone, as peft loads them")
    parser.add_argument("--mixtral", action="store_true", help="of a mixture of experts: as transformers loads it")
    add_plugin_option(parser)
    arguments = parser.parse_args(argv)
    load_plugins(arguments)

    from shoal.runs.trained_model import export

    if arguments.adapters and arguments.mixtral:
        parser.error("--adapters and --mixtral contradict each other: give one of them")
    warn = lambda text: print(f"warning: {text}", file=sys.stderr)  # noqa: E731
    export(arguments.run, Path(arguments.folder), warn, adapters=arguments.adapters, mixtral=arguments.mixtral)
    print(f"written: {arguments.folder}")
    return 0
