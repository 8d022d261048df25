"""A pipeline over machines, and a stranger on their network: nothing listens to it, and it learns and changes nothing."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import struct
import sys
from pathlib import Path

import pytest
import zmq

from shoal.transports import keys
from tests.support.eventually import HANG_S, eventually
from tests.support.processes import processes_in, wait_for_line
from tests.whole.test_stages_of_a_model import CONFIG, stages_of, wait_until_saved, weights_of

pytestmark = [pytest.mark.whole, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net, and needs two loopback addresses")]
TWO = CONFIG.replace("num_workers: 2", "num_workers: 1").replace("max_steps: 40", "max_steps: 24")
HERE = "127.0.0.2"
"""The address of the coordinator's machine. Whatever listens on 127.0.0.1 is reached from this machine only."""


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """The addresses at which these processes accept connections."""
    own = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):
            own |= {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    return {
        found for name in ("tcp", "tcp6") for found, inode in listeners(Path(f"/proc/{pids[0]}/net/{name}")) if f"socket:[{inode}]" in own
    }


def listeners(table: Path) -> list[tuple[tuple[str, int], str]]:
    """All addresses at which anything listens, with the inode of the socket."""
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [(address(row[1]), row[9]) for row in rows if row[3] == "0A"]


def address(field: str) -> tuple[str, int]:
    host, port = field.split(":")
    raw = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    return str(ipaddress.ip_address(raw)), int(port, 16)


def stages(folder: Path) -> list[int]:
    """The processes of all stages that run in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cwd").resolve() == folder.resolve() and b"train" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def test_stages_listen_to_nobody_else_and_train_as_one_machine_does(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(TWO)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    with processes_in(tmp_path) as processes:
        coordinator, command = processes.coordinate("--host", HERE)
        machine = processes.start(*command, "--name", "mini2")
        wait_for_line(coordinator, "2 stages begin")
        wait_until_saved(tmp_path / "run", 8)
        found = listening([coordinator.pid, machine.pid, *stages(tmp_path)])
        assert {host for host, _ in found} <= {"127.0.0.1", HERE}, found
        open_ports = [port for host, port in found if host == HERE]
        assert len(open_ports) == 2, "the coordinator's, and its tunnel's"
        for port in open_ports:
            try_everything(port)
        output, _ = coordinator.communicate(timeout=HANG_S)
        assert coordinator.returncode == 0, output
        assert "a machine was lost" not in output
        machine.communicate(timeout=HANG_S)
        assert machine.returncode == 0
        processes.here("train", "config.yaml", "--run-dir", "alone", "--workers", "1")
    one, other = weights_of(tmp_path / "run"), weights_of(tmp_path / "alone")
    assert all((value - other[name]).abs().max() < 1e-5 for name, value in one.items())
    assert one.keys() == other.keys()


def try_everything(port: int) -> None:
    """What a stranger tries: megabytes in torch's own words, and a handshake with keys that nobody gave out."""
    for _ in range(3):
        with socket.create_connection((HERE, port), HANG_S) as line, contextlib.suppress(OSError):
            line.sendall(b"\x00\x3c\x85\x5f" + bytes(8 << 20))
    own = keys.new_keys()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = context.socket(zmq.DEALER)
    line.linger = 0
    line.curve_publickey, line.curve_secretkey, line.curve_serverkey = own.public.encode(), own.secret.encode(), own.public.encode()
    line.connect(f"tcp://{HERE}:{port}")
    line.send(b"x" * 1000)
    assert not line.poll(200)
    line.close()
    context.term()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies before it begins", "stands still"])
def test_a_stage_whose_peer_is_gone_ends_with_a_message_and_the_run_goes_on(tmp_path: Path, number: int) -> None:
    (tmp_path / "config.yaml").write_text(TWO)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    with processes_in(tmp_path) as processes:
        coordinator, command = processes.coordinate("--host", HERE, "--set", "engine.timeout_s=5")
        processes.start(*command, "--name", "mini2")
        wait_for_line(coordinator, "2 stages begin")
        if number == signal.SIGSTOP:
            wait_until_saved(tmp_path / "run", 8)
        eventually(lambda: stages_of(tmp_path))
        gone = stages_of(tmp_path)[0]
        os.kill(gone, number)
        wait_for_line(coordinator, "process 0 of 2 (has lost|did not find)")
        wait_for_line(coordinator, "a machine was lost")
        if number == signal.SIGSTOP:
            os.kill(gone, signal.SIGCONT)  # it notices that it was given up, and its machine asks for a place again
        output, _ = coordinator.communicate(timeout=HANG_S)
        assert coordinator.returncode == 0, output
