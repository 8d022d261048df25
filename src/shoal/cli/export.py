"""`shoal export RUN FOLDER`: writes a run's model for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.main import warn
from shoal.cli.options import MODEL_HELP, parse_with_plugins
from shoal.runs.export import GGUF_TYPES

EPILOG = """\
A Hugging Face model is written for AutoModelForCausalLM.from_pretrained, with its tokenizer and with LoRA merged in; --adapters writes
the LoRA matrices alone. A model of Shoal's own is written as a folder for `shoal generate`; with --transformers it is written for
AutoModelForCausalLM.from_pretrained, if Llama, GPT-2 or GPT-NeoX, or for a mixture of experts Mixtral, computes the same. Sharded
checkpoints are merged. --gguf writes one file for llama.cpp, with tokenizer and chat template: Llama, Mistral, Qwen 2 and 3, Gemma, GPT-2
and what --transformers writes.
"""


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("shoal export", description="Write a model for other programs.", epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help=MODEL_HELP)
    parser.add_argument("target", metavar="FOLDER", help="the new folder; with --gguf the new file")
    parser.add_argument("--adapters", action="store_true", help="only the LoRA matrices, as peft loads them")
    parser.add_argument("--transformers", action="store_true", help="a model of Shoal's own as one of Transformers that computes the same")
    types = ", ".join(GGUF_TYPES)
    parser.add_argument(
        "--gguf", choices=GGUF_TYPES, metavar="TYPE", help=f"write one file for llama.cpp, with matrices of this type: {types}"
    )
    arguments = parse_with_plugins(parser, argv)

    from shoal.runs.export.folder import export, export_gguf

    if arguments.adapters + arguments.transformers + bool(arguments.gguf) > 1:
        parser.error("--adapters, --transformers and --gguf contradict each other: give one of them")
    if arguments.gguf:
        export_gguf(arguments.run, Path(arguments.target), arguments.gguf, warn)
        print(f"written: {arguments.target} ({Path(arguments.target).stat().st_size / 1e6:,.1f} MB)")
        return 0
    export(arguments.run, Path(arguments.target), warn, adapters=arguments.adapters, transformers=arguments.transformers)
    print(f"written: {arguments.target}")
    return 0
