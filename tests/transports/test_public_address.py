"""`--public-address`: where workers reach a coordinator that listens elsewhere. It is printed, kept, and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.runs.invitation import CoordinatorSecrets, keep_public_address, reached_address
from shoal.transports.addresses import PublicAddress
from shoal.transports.keys import new_keys
from tests.support.processes import processes_in


@pytest.mark.parametrize(
    ("listening", "public", "expected"),
    [
        ("tcp://10.0.0.5:65432", "shoal.example.org", "tcp://shoal.example.org:65432"),
        ("tcp://10.0.0.5:65432", "203.0.113.7:9000", "tcp://203.0.113.7:9000"),
        ("tcp://10.0.0.5:65432", "[2001:db8::5]:9000", "tcp://[2001:db8::5]:9000"),
        ("tcp://10.0.0.5:65432", "2001:db8::5", "tcp://[2001:db8::5]:65432"),
        ("http://10.0.0.5:8000", "h:1", "http://h:1"),
        ("postgresql://student@10.0.0.5:5432/shoal?pin=ab", "school.example:443", "postgresql://student@school.example:443/shoal?pin=ab"),
    ],
)
def test_the_public_address_stands_for_the_one_of_the_server(listening: str, public: str, expected: str) -> None:
    assert reached_address(listening, public) == expected
    assert PublicAddress.parse(PublicAddress.parse(public).text) == PublicAddress.parse(public)


BAD = ["", "tcp://h:1", "h:0", "h:70000", "h:x", "h/x", "u@h", "h h", "h;rm", "h'", "$(id)", "h?x", "h#x", ":9", "-h", "\x1b[2J", "a" * 300]


@pytest.mark.parametrize("given", BAD)
def test_what_is_no_host_is_refused_and_the_form_is_shown(given: str) -> None:
    with pytest.raises(ShoalError, match="is not HOST or HOST:PORT"):
        PublicAddress.parse(given)


def test_an_invitation_has_the_public_address_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CoordinatorSecrets("token", new_keys(), 5, 3, "tcp://10.0.0.5:5", True).save(tmp_path)
    assert keep_public_address(tmp_path, "shoal.example.org") == "shoal.example.org"
    assert keep_public_address(tmp_path, None) == "shoal.example.org", "a run that is resumed keeps it"
    assert main(["invite", "ada", "--run", str(tmp_path)]) == 0
    assert "shoal join tcp://shoal.example.org:5 --token " in capsys.readouterr().out


def test_a_coordinator_prints_its_public_address_and_joins_are_by_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("dialect: shoal\nmodel: {kind: mlp}\nstrategy: {kind: edp}\ntransport: {port: 0}\n")
    with processes_in(tmp_path) as processes:
        _, command = processes.coordinate("--public-address", "shoal.example.org:7000")
        assert command[1] == "tcp://shoal.example.org:7000"
        assert "--key" in command, "it listens for other machines, so the command has its key"
        processes.here("invite", "ada", "--run", "run")
        code, output = processes.run("coordinate", "config.yaml", "--host", "127.0.0.1", "--public-address", "shoal.example.org")
        assert code == 2
        assert "listens for this machine only" in output
