"""`shoal export RUN FOLDER`: writes a run's model for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from shoal.cli.main import warn
from shoal.cli.options import MODEL_HELP, parse_with_plugins
from shoal.config.load import resolve_data
from shoal.errors import ShoalError
from shoal.reporters.text_status import in_bytes
from shoal.runs.export import GGUF_TYPES

EPILOG = """\
A Hugging Face model is written for AutoModelForCausalLM.from_pretrained, with its tokenizer and with LoRA merged in; --adapters writes
the LoRA matrices alone. A model of Shoal's own is written as a folder for `shoal generate`; with --transformers it is written for
AutoModelForCausalLM.from_pretrained, if Llama, Qwen 3, GPT-2 or GPT-NeoX, or for a mixture of experts Mixtral, Qwen2-MoE, Qwen3-MoE or
OLMoE, computes the same. Sharded checkpoints are merged. --gguf writes one file for llama.cpp, with tokenizer and chat template: Llama,
Mistral, Qwen 2 and 3, Gemma, GPT-2 and what --transformers writes; with --adapters the LoRA matrices alone, for llama.cpp's --lora. --dcp
writes a checkpoint of torch.distributed.checkpoint.
"""


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("shoal export", description="Write a model for other programs.", epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help=MODEL_HELP)
    parser.add_argument("target", metavar="FOLDER", help="the new folder; with --gguf the new file, NAME.gguf")
    parser.add_argument("--adapters", action="store_true", help="only the LoRA matrices, as peft loads them, or with --gguf llama.cpp")
    parser.add_argument("--transformers", action="store_true", help="a model of Shoal's own as one of Transformers that computes the same")
    types = ", ".join(GGUF_TYPES)
    parser.add_argument(
        "--gguf", choices=GGUF_TYPES, metavar="TYPE", help=f"write one file for llama.cpp, with matrices of this type: {types}"
    )
    parser.add_argument("--dcp", action="store_true", help="a checkpoint that torch.distributed.checkpoint loads, of the weights alone")
    parser.add_argument("--push", metavar="REPO", help="then push it to this repository of the Hugging Face hub, such as me/model")
    parser.add_argument("--private", action="store_true", help="with --push: make the repository private, if it is new")
    arguments = parse_with_plugins(parser, argv)
    if arguments.private and not arguments.push:
        parser.error("--private is for --push")
    if arguments.dcp + arguments.transformers + bool(arguments.adapters or arguments.gguf) > 1:
        parser.error("--dcp, --transformers, and --adapters or --gguf contradict each other: give one of them")

    target = Path(arguments.target)
    if target.suffix == ".gguf" and not arguments.gguf:
        parser.error(f"{target} is a name for a GGUF file: say with --gguf in which form its matrices are ({', '.join(GGUF_TYPES)})")
    if arguments.gguf and target.suffix != ".gguf":
        target = target.with_name(f"{target.name}.gguf")  # by this ending programs know such a file
    push = _pusher(arguments.push, arguments.private) if arguments.push else None
    _write(arguments, target)
    print(f"written: {target}" + (f" ({in_bytes(target.stat().st_size)})" if target.is_file() else ""))
    if push is not None:
        print(f"pushed: {push(target)}")
    return 0


def _write(arguments: argparse.Namespace, target: Path) -> None:
    from shoal.runs.export.folder import export, export_dcp, export_gguf

    if arguments.gguf:
        export_gguf(arguments.run, target, arguments.gguf, warn, adapters=arguments.adapters)
    elif arguments.dcp:
        export_dcp(arguments.run, target, warn)
    else:
        export(arguments.run, target, warn, adapters=arguments.adapters, transformers=arguments.transformers)


def _pusher(repo_id: str, private: bool) -> Callable[[Path], str]:
    """A function that pushes what was written, in one commit, and returns its address. Raises ShoalError where there is no token."""
    from shoal.reporters.hub_repository import PushError, Repository

    loaded = resolve_data({"hub": {"repo_id": repo_id, "private": private}}, name="--push", dialect="shoal")
    try:
        repository = Repository(loaded.run.hub)
    except ShoalError as error:
        raise ShoalError(str(error).replace("hub.enabled", "--push").replace("before the run", "and type the command again")) from None

    def push(target: Path) -> str:
        found = sorted(path for path in target.rglob("*") if path.is_file()) if target.is_dir() else [target]
        files: dict[str, bytes | Path] = {
            (path.relative_to(target) if target.is_dir() else Path(path.name)).as_posix(): path for path in found
        }
        try:
            repository.commit(files, f"Export of {target.name}")
        except PushError as error:
            reason = str(error).replace("hub.repo_id", "--push")
            raise ShoalError(f"{target} is written, but not pushed: {reason}; then type: hf upload {repo_id} {target}") from None
        for note in repository.notes:
            warn(note.replace(f"hub.private is {str(private).lower()}", "--private was given" if private else "--private was not given"))
        return repository.url

    return push
