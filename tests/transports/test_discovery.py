"""What a server announces on its network, and which announcements of strangers are read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.launch import side_processes
from shoal.transports.discovery import CLASS, COORDINATOR, Announcement, announced_name, announcement_of, checked, require_long_token
from shoal.transports.keys import fingerprint, key_text, new_keys

KEY = key_text(new_keys().public)
HONEST = Announcement(COORDINATOR, "shelf", KEY, ("192.168.1.5",), 65432)
DATABASE = Announcement(CLASS, "lesson", "0" * 32, ("192.168.1.5",), 5432, "class", "shoal")


def test_what_a_server_announces_is_read_as_it_was_meant() -> None:
    assert checked(HONEST) == HONEST
    assert checked(DATABASE) == DATABASE
    assert HONEST.address("192.168.1.5") == "tcp://192.168.1.5:65432"
    assert DATABASE.address("192.168.1.5") == (
        "postgresql://class@192.168.1.5:5432/shoal?pin=00000000000000000000000000000000&require_auth=scram-sha-256"
    )


STRANGE = [
    {"kind": "printer"},
    {"kind": ""},
    {"name": ""},
    {"name": "\x1b[2Jshelf"},
    {"name": "shelf\nkey: the right one"},
    {"name": "shelf\u202egnirehto"},
    {"name": "z\u0351\u0352algo"},
    {"name": "[bold]shelf[/bold]"},
    {"name": " shelf"},
    {"name": "x" * 41},
    {"key": ""},
    {"key": KEY + "\n"},
    {"key": KEY[:-1]},
    {"key": "\u0430" * 43},
    {"port": 0},
    {"port": 65536},
    {"port": -1},
    {"hosts": ()},
    {"user": "postgres"},
    {"database": "shoal"},
    {"kind": CLASS},
    {"kind": CLASS, "key": "0" * 32, "user": "class@elsewhere", "database": "shoal"},
    {"kind": CLASS, "key": "0" * 32, "user": "class", "database": "shoal?sslmode=disable"},
    {"kind": CLASS, "key": "0" * 31 + "&", "user": "class", "database": "shoal"},
]


@pytest.mark.parametrize("change", STRANGE, ids=lambda change: " ".join(change))
def test_an_announcement_that_no_server_makes_is_not_read(change: dict[str, object]) -> None:
    assert checked(HONEST._replace(**change)) is None


STRANGE_HOSTS = [
    "",
    "printer",
    "127.0.0.1",
    "::1",
    "0.0.0.0",
    "::",
    "224.0.0.251",
    "255.255.255.255",
    "fe80::1",
    "::ffff:127.0.0.1",
    "1.2.3",
]


@pytest.mark.parametrize("host", STRANGE_HOSTS)
def test_a_host_that_no_other_machine_can_have_is_left_out(host: str) -> None:
    assert checked(HONEST._replace(hosts=(host,))) is None
    assert checked(HONEST._replace(hosts=(host, "192.168.1.5"))) == HONEST


def test_of_many_hosts_a_few_are_read_and_ipv4_comes_first() -> None:
    many = tuple(f"10.0.{number}.1" for number in range(200))
    read = checked(HONEST._replace(hosts=("fd00::2", *many)))
    assert read is not None
    assert read.hosts == tuple(sorted(many)[:8])
    assert checked(HONEST._replace(hosts=("fd00::2", "10.0.0.1"))) == HONEST._replace(hosts=("10.0.0.1", "fd00::2"))


@settings(max_examples=50)
@given(some.text())
def test_any_name_of_a_run_can_be_announced_and_read(name: str) -> None:
    assert checked(HONEST._replace(name=announced_name(name))) is not None


@given(some.text())
def test_a_name_that_is_read_changes_nothing_else_on_a_terminal(name: str) -> None:
    read = checked(HONEST._replace(name=name))
    assert read is None or (read.name.isprintable() and len(read.name) <= 40 and not set(read.name) & set('[]<>"\\`|:=/'))


@settings(max_examples=30)
@given(some.text(max_size=60))
def test_a_key_that_is_read_is_a_public_key(key: str) -> None:
    assert checked(HONEST._replace(key=key)) is None


def test_a_fingerprint_is_short_and_belongs_to_one_key() -> None:
    assert re.fullmatch(r"([a-z2-7]{4}-){3}[a-z2-7]{4}", HONEST.fingerprint)
    assert len({fingerprint(key_text(new_keys().public)) for _ in range(50)}) == 50


def test_a_server_is_announced_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.transports.addresses.local_addresses", lambda: ["192.168.1.5", "10.0.0.5", "fd00::5"])
    key = new_keys().public

    def made(*hosts: str) -> Announcement:
        return announcement_of(COORDINATOR, "runs/shelf", "tcp://192.168.1.5:65432", key, hosts)

    assert made("0.0.0.0") == Announcement(COORDINATOR, "runs-shelf", key_text(key), ("10.0.0.5", "192.168.1.5"), 65432)
    assert made("::").hosts == ("10.0.0.5", "192.168.1.5", "fd00::5")
    assert made("10.0.0.5").hosts == ("10.0.0.5",)
    database = announcement_of(COORDINATOR, "lesson", f"postgresql://class:secret@10.0.0.5:5432/shoal?pin={'a' * 32}", None, ["10.0.0.5"])
    assert database == Announcement(CLASS, "lesson", "a" * 32, ("10.0.0.5",), 5432, "class", "shoal")
    assert "secret" not in str(database)


@pytest.mark.parametrize(("key", "host"), [(None, "192.168.1.5"), (new_keys().public, "127.0.0.1")], ids=["no key", "this machine only"])
def test_a_server_that_others_cannot_join_safely_is_not_announced(key: str | None, host: str) -> None:
    with pytest.raises(ShoalError, match="--announce: other machines could not join"):
        announcement_of(COORDINATOR, "shelf", f"tcp://{host}:65432", key, [host])


def test_a_token_that_could_be_guessed_is_not_used_with_an_announced_key() -> None:
    require_long_token("x" * 16)
    with pytest.raises(ShoalError, match="has 15 characters"):
        require_long_token("x" * 15)


def test_without_the_package_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.transports.discovery.find_spec", lambda name: None)
    config = tmp_path / "config.yaml"
    config.write_text("strategy: {kind: edp}\ndata: {source: {kind: builtin, name: digits}}\n")
    for command in (["join"], ["serve", "run", "--announce"], ["coordinate", str(config), "--announce"]):
        assert main(command) == 2
        assert "pip install 'shoal[discovery]'" in capsys.readouterr().err


def test_an_announcer_that_says_nothing_ends_and_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_processes, "_ANNOUNCING_S", 0.05)
    command = ["sh", "-c", "exec sleep 1000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        with pytest.raises(ShoalError, match="said nothing for 0 s; start without --announce"):
            side_processes._begin(process, HONEST)
        assert process.wait() == -9
