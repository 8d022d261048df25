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
and what --transformers writes; with --adapters the LoRA matrices alone, for llama.cpp's --lora. --dcp writes a checkpoint of
torch.distributed.checkpoint.
"""


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("shoal export", description="Write a model for other programs.", epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help=MODEL_HELP)
    parser.add_argument("target", metavar="FOLDER", help="the new folder; with --gguf the new file")
    parser.add_argument("--adapters", action="store_true", help="only the LoRA matrices, as peft loads them, or with --gguf llama.cpp")
    parser.add_argument("--transformers", action="store_true", help="a model of Shoal's own as one of Transformers that computes the same")
    types = ", ".join(GGUF_TYPES)
    parser.add_argument(
        "--gguf", choices=GGUF_TYPES, metavar="TYPE", help=f"write one file for llama.cpp, with matrices of this type: {types}"
    )
    parser.add_argument("--dcp", action="store_true", help="a checkpoint that torch.distributed.checkpoint loads, of the weights alone")
    arguments = parse_with_plugins(parser, argv)
    if arguments.dcp + arguments.transformers + bool(arguments.adapters or arguments.gguf) > 1:
        parser.error("--dcp, --transformers, and --adapters or --gguf contradict each other: give one of them")

    from shoal.runs.export.folder import export, export_dcp, export_gguf

    target = Path(arguments.target)
    if arguments.gguf:
        export_gguf(arguments.run, target, arguments.gguf, warn, adapters=arguments.adapters)
        print(f"written: {target} ({target.stat().st_size / 1e6:,.1f} MB)")
        return 0
    if arguments.dcp:
        export_dcp(arguments.run, target, warn)
    else:
        export(arguments.run, target, warn, adapters=arguments.adapters, transformers=arguments.transformers)
    print(f"written: {target}")
    return 0
