"""`shoal demo`: two small trainings on built-in data, and what they learned."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from shoal.config.load import File, parse_override, resolve

SHOWN = 6


def run(argv: list[str]) -> int:
    made = argparse.ArgumentParser("shoal demo", description="Train two small models on built-in data: under two minutes on two cores.")
    made.add_argument("--run-dir", metavar="DIR", help="where the runs go (default: a temporary folder)")
    made.add_argument("--quick", action="store_true", help="a few seconds only, to see that it works")
    arguments = made.parse_args(argv)
    folder = Path(arguments.run_dir or tempfile.mkdtemp(prefix="shoal-demo-"))
    print("1. Handwritten digits: 1,437 images of 8 × 8 pixels, a small network\n")
    if code := _train("starter", folder / "digits", ["training.epochs=2"] if arguments.quick else []):
        return code
    _show_digits(folder / "digits")
    print("\n2. Python's own source, byte by byte, and a small GPT\n")
    if code := _train("demo-gpt", folder / "gpt", ["training.max_steps=5", "training.schedule.warmup_steps=1"] if arguments.quick else []):
        return code
    _show_text(folder / "gpt", "def ")
    print(f'\nTry next: shoal generate {folder / "gpt"} --prompt "import " --max-new-tokens 200')
    print("          shoal init && shoal train config.yaml")
    return 0


def _train(preset: str, folder: Path, settings: list[str]) -> int:
    from shoal.cli.running import train
    from shoal.launch.starting import Asked, plan

    overrides = [parse_override(text) for text in settings]
    return train(plan(lambda more: resolve([File(preset)], [*overrides, *more], environ={}), Asked(str(folder))))


def _show_digits(folder: Path) -> None:
    import torch

    from shoal.runs.assembly import assemble
    from shoal.runs.trained import open_run
    from shoal.tasks.images import as_text

    trained = open_run(str(folder), lambda text: print(text, file=sys.stderr))
    samples = assemble(trained.run).data.eval
    assert samples is not None
    batch = samples.batch(range(SHOWN))
    with torch.no_grad():
        guesses = (
            trained.task.players["model"](batch["image"].to(next(trained.task.players["model"].parameters()).device)).argmax(1).tolist()
        )
    pictures = [as_text(image[0]) for image in batch["image"]]
    print()
    for line in zip(*pictures, strict=True):
        print("   ".join(line))
    print(
        "   ".join(
            f"reads {guess}, is {label}".ljust(len(pictures[0][0])) for guess, label in zip(guesses, batch["label"].tolist(), strict=True)
        )
    )


def _show_text(folder: Path, prompt: str) -> None:
    from shoal.runs.trained import generate_text, open_run

    trained = open_run(str(folder), lambda text: print(text, file=sys.stderr))
    print(f"\nwhat it writes after {prompt!r}:\n\n{prompt}", end="")
    decoding = trained.run.serving.decoding
    calm = decoding.replace(active="top_k", top_k=decoding.top_k.replace(temperature=0.6))
    for piece in generate_text(trained, prompt, max_new_tokens=240, seed=1, decoding=calm):
        print(piece, end="", flush=True)
    print()
