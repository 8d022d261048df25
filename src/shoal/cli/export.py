"""`shoal export RUN FOLDER`: writes a run's model for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.main import warn
from shoal.cli.options import parse_with_plugins

EPILOG = """\
A Hugging Face model is written for AutoModelForCausalLM.from_pretrained, with its tokenizer and with LoRA merged in; --adapters writes
the LoRA matrices alone. A model of Shoal's own is written as a folder for `shoal generate`; with --transformers it is written for
AutoModelForCausalLM.from_pretrained, if Llama, GPT-2 or GPT-NeoX, or for a mixture of experts Mixtral, computes the same. Sharded
checkpoints are merged.
"""


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "shoal export", description="Write a run's model into a folder, for other programs.", epilog=EPILOG, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, or one of its checkpoints")
    parser.add_argument("folder", metavar="FOLDER", help="the new folder")
    parser.add_argument("--adapters", action="store_true", help="only the LoRA matrices, as peft loads them")
    parser.add_argument("--transformers", action="store_true", help="a model of Shoal's own as one of Transformers that computes the same")
    arguments = parse_with_plugins(parser, argv)

    from shoal.runs.export.folder import export

    if arguments.adapters and arguments.transformers:
        parser.error("--adapters and --transformers contradict each other: give one of them")
    export(arguments.run, Path(arguments.folder), warn, adapters=arguments.adapters, transformers=arguments.transformers)
    print(f"written: {arguments.folder}")
    return 0
