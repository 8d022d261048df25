"""A coordinator that may open 1,024 files, and a thousand connections that say nothing: the run finishes, and keeps its state."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.runs.connections import JoinOptions
from shoal.runs.worker_run import JoinedWorker
from shoal.transports import addresses
from shoal.transports.keys import key_from_text
from tests.support.processes import HANG_S, Command

FILES, IDLE = 1024, 1000
CONFIG = """\
dialect: shoal
model: {kind: mlp, hidden_sizes: [4]}
training: {max_steps: 40, batch_size: 16}
evaluation: {strategy: never}
checkpoint: {strategy: steps, every_steps: 10}
transport: {kind: zmq, port: 0}
cluster: {num_workers: 1}
strategy: {kind: async}
"""
LIMITED = (
    "import resource, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))\n"
    "from shoal.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
)


@pytest.fixture
def files() -> None:
    """This process holds the other ends of the connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * IDLE:
        pytest.skip(f"this machine lets a process open no more than {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * IDLE), hard))


def invitation_in(told: str) -> JoinOptions:
    words = told[told.index("shoal join") :].split()
    found = {name: words[words.index(f"--{name}") + 1] for name in ("token", "key") if f"--{name}" in words}
    return JoinOptions(words[words.index("join") + 1], found["token"], key_from_text(found["key"]) if "key" in found else None, name="ada")


@pytest.mark.whole
def test_a_run_finishes_and_keeps_its_state_beside_a_thousand_idle_connections(tmp_path: Path, files: None) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    arguments = ["coordinate", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run"), "--host", "127.0.0.1"]
    (tmp_path / "limited.py").write_text(LIMITED.format(FILES))
    with contextlib.ExitStack() as ending:
        coordinator = Command(["limited.py", *arguments], tmp_path, errors=True)
        ending.callback(coordinator.close)
        told = ""
        while not re.search(r"shoal join \S+ --token \S+", told):
            told += coordinator.stdout.readline()
            assert coordinator.poll() is None, told
        worker = JoinedWorker(invitation_in(told)._replace(state=tmp_path / "ada"), lambda text: None)
        worker.prepare()
        place = addresses.parse(worker.options.address)
        for number in range(IDLE):
            here = (f"127.0.0.{2 + number // 50}", 0)  # of twenty machines: each may have a few
            ending.enter_context(socket.create_connection((place.host, place.port), timeout=HANG_S, source_address=here))
        worker.work()
        said = told + "".join(coordinator.communicate(HANG_S))
        assert coordinator.returncode == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 40)
    assert "Too many open files" not in said
    assert "cannot" not in said, said
    assert list((tmp_path / "run" / "coordinator").glob("*/step-*")), "it has a snapshot"
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) > 1
    assert main(["audit", str(tmp_path / "run")]) == 0
