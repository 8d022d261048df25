"""The end of a demo: the trained network reads, writes or draws something."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from shoal.cli.main import warn
from shoal.data.text.python_source import zen
from shoal.runs.build_run import assemble
from shoal.runs.trained_model import generate_text, open_run
from shoal.tasks.images import as_text

_DIGITS, _DRAWN = 6, 6
_PROMPT, _TOKENS = "def ", 200
_LINE, _RECITED = "Beautiful is", 400


def show(what: str, folder: Path) -> None:
    """Show what the run in a folder has learned."""
    {"digits": _show_digits, "text": _show_text, "poem": _show_poem, "drawing": _show_drawing}[what](folder)


def _show_digits(folder: Path) -> None:
    trained = open_run(str(folder), warn)
    samples = assemble(trained.run).data.eval
    assert samples is not None
    network = trained.task.players["model"]
    batch = samples.batch(range(_DIGITS))
    with torch.no_grad():
        guesses = network(batch["image"].to(next(network.parameters()).device)).argmax(1).tolist()
    pictures = [as_text(image[0]) for image in batch["image"]]
    print("\nDigits that none of them had seen, and what their network reads:\n")
    for line in zip(*pictures, strict=True):
        print("   ".join(line).rstrip())
    words = (f"reads {guess}, is {label}" for guess, label in zip(guesses, batch["label"].tolist(), strict=True))
    print("   ".join(text.ljust(len(pictures[0][0])) for text in words))


def _show_drawing(folder: Path) -> None:
    trained = open_run(str(folder), warn)
    pictures = [as_text(image.mean(0)) for image in trained.task.images()[:_DRAWN]]
    print("\nDigits that the class's generator has drawn (longer training draws better ones: --seconds 120):\n")
    for line in zip(*pictures, strict=True):
        print("   ".join(line).rstrip())
    print(f"\nmore of them: shoal generate {folder} --grid digits.png")


def _show_text(folder: Path) -> None:
    trained = open_run(str(folder), warn)
    print(f"\nWhat it writes after {_PROMPT!r}; it has read Python's own source, byte by byte:\n\n{_PROMPT}", end="")
    decoding = trained.run.serving.decoding
    calm = decoding.replace(active="top_k", top_k=decoding.top_k.replace(temperature=0.6))
    for piece in generate_text(trained, _PROMPT, max_new_tokens=_TOKENS, seed=1, decoding=calm):
        print(piece, end="", flush=True)
    print()
    if (folder / "experts.png").exists():
        _show_loads(folder)


def _show_loads(folder: Path) -> None:
    """How the last recorded tokens were spread over the experts of a mixture."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = next(record for record in reversed(records) if "layers/0/load/0" in record)
    print("\nHow many of 100 choices fell on each expert, layer by layer:\n")
    for layer in range(sum(f"layers/{number}/load/0" in last for number in range(len(last)))):
        shares = [last[f"layers/{layer}/load/{expert}"] for expert in range(len(last)) if f"layers/{layer}/load/{expert}" in last]
        print(f"  layer {layer}  " + " ".join(f"{round(100 * share):3}" for share in shares))
    print(f"\ndrawn: {folder / 'experts.png'}")


def _show_poem(folder: Path) -> None:
    """Generate the poem from its first line, and count the leading letters that are correct."""
    trained, poem = open_run(str(folder), warn), zen()
    print(f"\nThe Zen of Python, as they know it by now. It is given {_LINE!r}, and says what comes next:\n\n{_LINE}", end="")
    surest = trained.run.serving.decoding.replace(active="greedy")
    said = "".join(generate_text(trained, _LINE, max_new_tokens=_RECITED, seed=1, decoding=surest))
    print(said)
    original = poem[poem.index(_LINE) + len(_LINE) :]
    right = next((place for place, (one, other) in enumerate(zip(said, original, strict=False)) if one != other), len(said))
    unknown = "It does not know the poem yet: let it learn for longer (--seconds 60)."
    print(f"\nIts first {right} letters are the poem's." if right else f"\n{unknown}")
