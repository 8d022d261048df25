"""A coordinator that wants more of a worker than work: secrets of its environment, processes, private files, the token for the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shoal.config.environment import usable_cores
from tests.support.eventually import HANG_S
from tests.support.fake_hub import serving
from tests.support.hostile_coordinator import HostileCoordinator, hostile_coordinator, private_folder, settings
from tests.support.processes import Command

SECRET = "wJalrXUtnFEMI7MDENG"
IMAGES = {"source": {"kind": "images", "path": "PLACE"}}
TEXT = {"model": {"kind": "gpt", "hidden_size": 8, "num_layers": 1, "num_heads": 1}}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home folder of a worker's user, with a folder `work` in it."""
    (tmp_path / "work").mkdir()
    return tmp_path


def join(coordinator: HostileCoordinator, home: Path, *options: str, folder: str = "work") -> tuple[int, str]:
    """Run `shoal join` in a folder of this home; its exit code and what it printed."""
    environ = dict(os.environ) | {"HOME": str(home), "AWS_SECRET_ACCESS_KEY": SECRET, "XDG_STATE_HOME": str(home / "state")}
    command = Command(["-m", "shoal", *coordinator.join_command(*options)], home / folder, environ)
    try:
        said, _ = command.communicate(HANG_S)
        return command.wait(), said
    finally:
        command.close()


def test_a_secret_of_the_environment_stays_there(home: Path) -> None:
    with hostile_coordinator(settings(data=IMAGES), text="/no/${AWS_SECRET_ACCESS_KEY}/here") as coordinator:
        code, said = join(coordinator, home)
        assert (code, SECRET in coordinator.said, SECRET in said) == (2, False, False)
        assert "${AWS_SECRET_ACCESS_KEY}" in coordinator.reasons[0], "what the coordinator sent comes back as it was"
        code, said = join(coordinator, home, "--data", f"/no/{SECRET}", "--set", "data.source.path=/no/${AWS_SECRET_ACCESS_KEY}/here")
        assert (code, SECRET in said) == (2, True), "the user sees the own path"
        assert SECRET not in coordinator.said


def test_no_more_processes_are_started_than_the_machine_has_cores(home: Path) -> None:
    many = usable_cores() + 22
    with hostile_coordinator(settings(engine={"kind": "ddp"}, launch={"devices_per_node": many})) as coordinator:
        code, said = join(coordinator, home)
        assert (code, len(coordinator.reasons)) == (2, 1)
        assert f"--set launch.devices_per_node={many}" in said
    stages = [{"id": f"t{number}", "model_share": 0.001} for number in range(100)]
    alone = {"strategy": {"kind": "local"}, "engine": {"kind": "pipeline"}, "scheduler": {"kind": "priority", "tasks": stages}}
    with hostile_coordinator(settings(**TEXT, **alone, data={"source": {"kind": "builtin", "name": "zen"}})) as coordinator:
        code, said = join(coordinator, home)
        assert (code, "nothing to join" in said) == (2, True)


@pytest.mark.parametrize("where", ["outside", "link", "home"])
def test_a_private_file_is_not_read(home: Path, where: str) -> None:
    private = private_folder(home)
    (home / "work" / "link").symlink_to(private)
    path = {"outside": str(private), "link": "link/diary.txt", "home": "private"}[where]
    source = {"kind": "text", "path": "PLACE"}
    with hostile_coordinator(settings(**TEXT, data={"source": source}), text=path) as coordinator:
        code, said = join(coordinator, home, folder="" if where == "home" else "work")
        assert (code, f"--data {path}" in said) == (2, True), said
        assert "does not allow" in coordinator.reasons[0]
        _, said = join(coordinator, home, "--data", str(private), folder="" if where == "home" else "work")
        assert "does not allow" not in said, "its user allowed it"


@pytest.mark.parametrize(
    "header",
    [
        {"images_path": "/etc"},
        {"size": 10**15},
        {"size": "many"},
        {"heartbeat_s": 1e-9},
        {"tokenizer": ["../../x"] * 1000},
        {"config": "a: ${HOME}"},
        {"name": "/../../../work/precious"},
    ],
)
def test_a_welcome_that_is_none_ends_the_worker_with_a_message(home: Path, header: dict[str, Any]) -> None:
    data = {"source": {"kind": "builtin", "name": "digits"}}
    precious = home / "work" / "precious"
    precious.write_text("of the user")
    with hostile_coordinator(settings(data=data), header=header) as coordinator:
        code, said = join(coordinator, home)
        assert (code, "Traceback" in said) == (2, False), said
        assert "/etc" not in said
        assert precious.read_text() == "of the user"


DIGITS = {"source": {"kind": "builtin", "name": "digits"}}


@pytest.mark.parametrize(("answer", "code"), [("no\n", 3), ("", 3), ("yes\n", 2)])
def test_a_worker_shows_what_it_is_asked_to_do_and_waits_for_a_yes(home: Path, answer: str, code: int) -> None:
    with hostile_coordinator(settings(data=DIGITS)) as coordinator:
        command = Command(["-m", "shoal", *coordinator.join_command("--ask")], home / "work", dict(os.environ) | {"HOME": str(home)})
        try:
            command.process.stdin.write(answer.encode())
            command.process.stdin.close()
            said, _ = command.communicate(HANG_S)
            assert command.wait() == code, said
        finally:
            command.close()
        shown = [line.split(":")[0].strip() for line in said.splitlines() if line.startswith("  ")]
        assert shown[:5] == ["model", "data", "processes", "memory", "writes"]
        assert "100 weights" in said
        assert (coordinator.reasons == [""]) == (code == 3)


def test_the_token_for_the_hub_is_sent_for_names_that_were_allowed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"source": {"kind": "images", "path": "PLACE", "download": "eve/faces"}}
    with serving() as hub, hostile_coordinator(settings(data=source), text="pictures") as coordinator:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        assert join(coordinator, home)[0] == 2
        assert hub.asked
        assert not any("authorization" in str(asked.headers).lower() for asked in hub.asked)
        assert join(coordinator, home, "--data", "hub:eve/other")[0] == 2
        assert not any("hf_mine" in str(asked.headers) for asked in hub.asked)
        assert join(coordinator, home, "--data", "hub:eve/faces")[0] == 2
        assert any("hf_mine" in str(asked.headers) for asked in hub.asked)
        assert "hf_mine" not in coordinator.said


def test_a_server_makes_a_node_read_no_file(home: Path) -> None:
    model = {"settings": {"kind": "huggingface", "pretrained": f"/no/${{AWS_SECRET_ACCESS_KEY}}/{home.name}"}, "vocab_size": 9, "width": 8}
    with hostile_coordinator(settings(data=DIGITS), header={"model": model}) as coordinator:
        code, said = join(coordinator, home, "--node")
        assert (code, "does not allow" in said, SECRET in said) == (2, True, False), said
        assert {header["kind"] for header in coordinator.heard} == {"node"}
