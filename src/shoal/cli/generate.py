"""`shoal generate RUN`: generates text after a prompt, or a grid of images."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

from shoal.cli.main import warn
from shoal.cli.options import MODEL_HELP, parse_with_plugins
from shoal.config.schema.serving import Decoding, Serving
from shoal.errors import ShoalError
from shoal.files import writing

if TYPE_CHECKING:
    from shoal.runs.trained_model import TrainedModel

METHODS: tuple[str, ...] = get_args(get_type_hints(Decoding)["active"])
"""Decoding methods: the choices of `serving.decoding.active`."""
WEIGHTS: tuple[str, ...] = get_args(get_type_hints(Serving)["weights"])
_COMPARED = 3
"""Answers of each run that `--compare` shows."""


def run(argv: list[str]) -> int:
    arguments = _parsed(argv)

    from shoal.runs.trained_model import open_model

    if arguments.compare:
        _compare(arguments)
        return 0
    trained = open_model(arguments.run, warn, weights=arguments.weights)
    if arguments.grid:
        _draw(trained, arguments.grid)
    else:
        _write(trained, arguments)
    return 0


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("shoal generate", description="Generate text or images with a model.")
    parser.add_argument("run", metavar="RUN", nargs="?", help=MODEL_HELP)
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="print the answers of two runs side by side")
    parser.add_argument("--prompt", default="", help="beginning of the text")
    parser.add_argument("--chat", action="store_true", help="the prompt is what a user says; print the assistant's answer")
    parser.add_argument("--context", default="", help="context text for a model with cross-attention")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="length of the text (default: the run's setting)")
    parser.add_argument("--decoding", choices=METHODS, help="how a token is chosen (default: the run's setting)")
    parser.add_argument("--temperature", type=float, help="above 1 more random, below 1 less")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", choices=WEIGHTS, help="how matrices are held in memory (default: the run's setting)")
    parser.add_argument("--grid", nargs="?", const="grid.png", metavar="FILE", help="save generated images as a PNG file (GAN)")
    arguments = parse_with_plugins(parser, argv)
    if bool(arguments.run) == bool(arguments.compare):
        parser.error("name one RUN, or two with --compare BEFORE AFTER")
    if arguments.compare and arguments.grid:
        parser.error("--compare prints texts; --grid draws images")
    if arguments.chat and not arguments.prompt:
        parser.error("--chat needs a --prompt: what the user says")
    if arguments.max_new_tokens is not None and arguments.max_new_tokens < 1:
        parser.error("--max-new-tokens must be at least 1")
    if arguments.temperature is not None and not 0 <= arguments.temperature < float("inf"):
        parser.error("--temperature must be a number at least 0")
    if not 0 <= arguments.seed < 2**63:
        parser.error("--seed must be at least 0 and below 2**63")
    if arguments.grid and not arguments.grid.lower().endswith(".png"):
        parser.error("--grid takes the name of a .png file")
    return arguments


def _draw(trained: TrainedModel, file: str) -> None:
    from shoal.tasks.images import grid, save_png

    if not trained.task.draws_images:
        raise ShoalError(f"a model of kind {trained.run.model.kind} draws no images; --prompt writes text")
    with writing(file):
        save_png(grid(trained.task.images()), Path(file))
    print(f"wrote {file} (64 images, step {trained.checkpoint.step})")


def _write(trained: TrainedModel, arguments: argparse.Namespace) -> None:
    pieces = _pieces(trained, arguments, arguments.seed)
    sys.stdout.write(("" if arguments.chat else arguments.prompt) + next(pieces, ""))  # nothing is written where the model cannot write
    sys.stdout.flush()
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _pieces(trained: TrainedModel, arguments: argparse.Namespace, seed: int) -> Iterator[str]:
    from shoal.runs.trained_model import generate_text

    count = arguments.max_new_tokens or trained.run.serving.max_new_tokens
    decoding = _decoding(trained.run.serving.decoding, arguments)
    given = {"max_new_tokens": count, "seed": seed, "decoding": decoding, "context": arguments.context, "chat": arguments.chat}
    return generate_text(trained, arguments.prompt, **given)


def _compare(arguments: argparse.Namespace) -> None:
    """Print answers of two runs to the same prompt, with the same random numbers, in two columns."""
    from shoal.runs.trained_model import open_model

    names, columns = arguments.compare, []
    for name in names:
        trained = open_model(name, warn, weights=arguments.weights)
        columns.append(["".join(_pieces(trained, arguments, arguments.seed + number)) for number in range(_COMPARED)])
    print(f"prompt: {arguments.prompt}")
    for row in [tuple(names), *zip(*columns, strict=True)]:
        print("\n".join(side_by_side(*row)), end="\n\n")


def side_by_side(left: str, right: str, width: int = 58) -> list[str]:
    """Two texts in columns, as lines."""
    columns = [
        [piece for line in text.splitlines() or [""] for piece in textwrap.wrap(line, width, drop_whitespace=False) or [""]]
        for text in (left, right)
    ]
    return [f"{one:{width}} │ {other}".rstrip() for one, other in zip_longest(*columns, fillvalue="")]


def _decoding(settings: Decoding, arguments: argparse.Namespace) -> Decoding:
    """The run's decoding settings, changed by the arguments."""
    if arguments.decoding:
        settings = settings.replace(active=arguments.decoding)
    if arguments.temperature is not None:
        changed = getattr(settings, settings.active).replace(temperature=arguments.temperature)
        settings = settings.replace(**{settings.active: changed})
    return settings
