"""docs/finetune.md: its commands lead from a model's folder and conversations to a model that answers over HTTP.

The first commands of docs/islands.md train on the same files.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest
import yaml

from shoal.cli.main import main
from shoal.serve.load_model import open_served
from tests.support.chat_folders import conversations
from tests.support.processes import HANG_S
from tests.support.small_service import running
from tests.whole.test_one_text_format import small_chat_model

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "finetune.md").read_text(encoding="utf-8")
ISLANDS = (DOCS / "islands.md").read_text(encoding="utf-8")


def prepared(folder: Path, page: str = PAGE, name: str = "finetune.yaml") -> list[list[str]]:
    """Write the files of the page into the folder, its first YAML block under the name, and return its commands, block by block."""
    small_chat_model(folder / "my-model", "smollm2")
    example = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    config = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert example is not None
    assert config is not None
    rows = [json.loads(example[1]), *({"messages": chat} for chat in conversations(30))]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / name).write_text(config[1])
    assert yaml.safe_load(config[1])["model"]["pretrained"] == "my-model"
    return [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)]


@pytest.mark.long
def test_two_islands_learn_from_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    (command,) = next(block for block in prepared(tmp_path) if "diloco" in block[0])
    smaller = ["--set", "training.device=cpu", "--set", "training.epochs=1", "--set", "strategy.inner_steps=2"]
    assert main([*shlex.split(command)[1:], *smaller]) == 0
    assert "completed" in capsys.readouterr().out
    assert (tmp_path / "islands" / "model" / "tokenizer.json").exists()


@pytest.mark.long
def test_the_first_commands_of_the_page_of_islands_train_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    commands = prepared(tmp_path, ISLANDS, "islands.yaml")[0]
    assert [command.split()[1] for command in commands] == ["config", "train", "generate"]
    for command in commands:
        smaller = ["training.device=cpu", "training.epochs=1", "strategy.inner_steps=2"] if " train " in command else []
        assert main([*shlex.split(command)[1:], *(word for one in smaller for word in ("--set", one))]) == 0, command
        assert "error" not in "".join(capsys.readouterr()), command


def test_the_commands_of_the_page_lead_to_a_served_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    *before, serve = [shlex.split(line) for line in prepared(tmp_path)[0]]
    assert len(before) == 5
    for words in before:
        smaller = ["--set", "training.device=cpu", "--set", "training.epochs=1"] if words[1] == "train" else []
        assert main([*words[1:], *smaller]) == 0, words
        printed = capsys.readouterr()
        assert "error" not in printed.out + printed.err
        if words[1] == "train":
            assert re.search(r"rows are conversations: \d+ assistant turns", printed.err)
    assert serve[:2] == ["shoal", "serve"]
    served = open_served(serve[2:], [], lambda text: None)
    with running(served) as service:
        asked = {"model": served.name, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{service.ports[0]}/v1/chat/completions", json=asked, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"
