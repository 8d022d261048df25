"""The page for teachers tells the truth: its `shoal db` commands run, and what it says of messages is what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.launch.postgres.server import EmbeddedPostgres

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "classroom.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def test_the_commands_run(server: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a server that is there. What needs a class at work is run elsewhere (tests/whole/test_classroom.py)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DB_PASSWORD", str(server.access.password))
    commands = [line.split()[1:] for line in COMMANDS if line.split()[1] not in ("coordinate", "status", "audit")]
    assert len(commands) >= 8
    assert main(commands[0]) == 0
    settings = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[-1]
    for there, here in (("db.school.example", server.access.host), ("5432", str(server.access.port)), ("teacher", "shoal")):
        assert there in settings
        settings = settings.replace(there, here)
    with Path("classroom.yaml").open("a") as file:
        file.write(settings)
    for command in sorted(commands[1:], key=lambda words: "init" not in words):
        assert main(command) == 0, command


def test_the_messages_it_explains_are_in_the_source() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    explained = re.findall(r"^\| `([^`]*)` \|", PAGE.partition("| it says | then |")[2], re.MULTILINE)
    assert explained
    for message in explained:
        for part in message.split("…"):
            assert part.strip(" ,") in source, message
