"""The class's token: from a file, the environment or the keyboard; and a line to join with that every shell leaves as it is."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shoal.cli import join, join_options
from shoal.cli.output import quoted
from shoal.errors import ShoalError
from shoal.transports.database_address import parse
from shoal.transports.interface import wrong_token

ADDRESS = "postgresql://class@192.168.1.10:40233/shoal?pin=acaefe20e847802e276561bc0a9b825c"


def asked(**given: str) -> argparse.Namespace:
    options = {"address": ADDRESS, "token": None, "token_file": None, "key": None, "key_was_announced": False}
    return argparse.Namespace(**{**options, **given})


def test_a_token_needs_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("from a file\n")
    assert parse(join_options.typed(asked(token_file=str(file))).address).password == "from a file"
    monkeypatch.setenv("SHOAL_TOKEN", "from the environment")
    assert parse(join_options.typed(asked()).address).password == "from the environment"
    monkeypatch.delenv("SHOAL_TOKEN")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda prompt, stream: "typed")
    assert parse(join_options.typed(asked()).address).password == "typed"
    assert join_options.typed(asked(address="tcp://h:1")).token == "typed"
    with pytest.raises(ShoalError, match="--token-file"):
        join_options.typed(asked(token_file=str(tmp_path / "none")))


def test_a_token_file_that_other_users_can_read_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text("mine\n")
    file.chmod(0o600)
    assert join_options.typed(asked(token_file=str(file), address="tcp://h:1")).token == "mine"
    assert capsys.readouterr().err == ""
    file.chmod(0o640)
    assert join_options.typed(asked(token_file=str(file), address="tcp://h:1")).token == "mine"
    assert f"chmod 600 {file}" in capsys.readouterr().err


def test_the_pin_survives_the_way_from_the_line_to_the_connection() -> None:
    assert parse(join_options.typed(asked(token="t")).address).options == "pin=acaefe20e847802e276561bc0a9b825c"


def test_zsh_and_powershell_leave_the_line_as_it_is() -> None:
    assert quoted(ADDRESS) == f"'{ADDRESS}'"
    assert quoted("postgresql://class@h:1/shoal") == "postgresql://class@h:1/shoal"


@pytest.mark.parametrize("address", ["tcp://h:1", ADDRESS.replace("class@", "class:wrong@")])
def test_a_wrong_token_is_asked_for_again_at_a_terminal(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three times; without a terminal a wrong token ends the command."""
    arguments, tried = asked(address=address, token="wrong", stdin=False), []

    def work() -> int:
        invitation = join_options.typed(arguments)
        tried.append(invitation.token or parse(invitation.address).password)
        if tried[-1] != "right":
            raise wrong_token(arguments.address)
        return 0

    with pytest.raises(ShoalError, match="the token is wrong"):
        join._with_another_token(arguments, work)
    assert tried == ["wrong"]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    keys = iter(["worng", "right", "wrong", "", *["wrong"] * 9])
    monkeypatch.setattr("getpass.getpass", lambda prompt, stream: next(keys))
    assert join._with_another_token(arguments, work) == 0
    assert tried[1:] == ["wrong", "worng", "right"]
    assert "the token is wrong: the coordinator at" in capsys.readouterr().err
    for count in (2, 4):  # nothing is typed; nothing but wrong ones
        tried.clear()
        arguments.token = "wrong"
        with pytest.raises(ShoalError, match="the token is wrong"):
            join._with_another_token(arguments, work)
        assert len(tried) == count
