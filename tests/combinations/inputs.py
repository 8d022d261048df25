"""The files that the rows of the covering array read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_inputs(folder: Path) -> None:
    """Texts with contexts, conversations, pairs of answers, prompts with their right answers, and a model of Hugging Face's libraries."""
    folder.mkdir()
    colours = ("red", "green", "blue", "white")
    _write_rows(
        folder / "lines.jsonl",
        [
            {"text": f"The colour of thing {n} is {colours[n % 4]}, as you see here.", "context": f"thing {n}: {colours[n % 4]}"}
            for n in range(80)
        ],
    )
    _write_rows(
        folder / "pairs.jsonl",
        [{"prompt": f"Thing {n}? ", "chosen": colours[n % 4], "rejected": "I do not know", "context": f"thing {n}"} for n in range(64)],
    )
    _write_rows(
        folder / "prompts.jsonl", [{"prompt": f"Thing {n}? ", "answer": colours[n % 4], "context": f"thing {n}"} for n in range(64)]
    )
    _write_rows(
        folder / "chats.jsonl",
        [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": colours[n % 4]}]} for n in range(64)],
    )
    _write_gpt2(folder / "gpt2")


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_gpt2(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=300, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256)
    GPT2LMHeadModel(config).save_pretrained(folder)


def placed(settings: Any, folder: Path) -> Any:
    """The settings with the folder of the inputs in place of `DATA`."""
    if isinstance(settings, Mapping):
        return {name: placed(value, folder) for name, value in settings.items()}
    return settings.replace("DATA", str(folder)) if isinstance(settings, str) else settings
