"""Settings of runs that take a second, and a run of text with its export."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import main

DIGITS = """\
dialect: shoal
model: {kind: mlp, hidden_sizes: [16]}
data: {source: {kind: builtin, name: digits}}
"""
TEXT = """\
dialect: shoal
model: {kind: gpt, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 16}
data: {source: {kind: text, path: text.txt}, tokenizer: characters, sequence_length: 8}
checkpoint: {every_steps: 2, strategy: steps}
"""


def train_and_export_text(folder: Path, more: str) -> None:
    """`folder/run` and `folder/export`, of `config.yaml` and `text.txt` beside them. `more`: settings besides those of `TEXT`."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (folder / "config.yaml").write_text(TEXT + more)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "config.yaml", "--run-dir", "run"]) == 0
        assert main(["export", "run", "export"]) == 0
