"""`shoal up` over a real ssh to two hosts: namespaces of this machine, each with a network, processes, a home and an sshd of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.launch.up_file import running_process
from tests.support.eventually import eventually

SOURCE = Path(__file__).resolve().parents[2] / "src"
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(
    not (SSHD and shutil.which("ip") and shutil.which("unshare")) or os.geteuid() != 0, reason="needs sshd, ip, unshare, and root"
)
FLEET = """\
dialect: shoal
name: small
model: {kind: mlp, hidden_sizes: [8]}
data: {source: {kind: builtin, name: digits}}
training: {epochs: 100000}
strategy: {kind: syncps, round_timeout_s: 5}
transport: {kind: zmq, port: 0}
coordinator: {heartbeat_interval_s: 0.5}
cluster:
  workers: [ann, bo]
  hosts: {ann: {server_address: 10.213.1.1}, bo: {server_address: 10.213.2.1}}
launch: {kind: ssh}
"""
SERVER = """\
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
SetEnv PYTHONPATH={source} OMP_NUM_THREADS=1
"""


def call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


class Host:
    """A machine that ssh reaches."""

    def __init__(self, folder: Path, name: str, number: int) -> None:
        self.folder, self.home, self.name = folder / name, folder / name / "home", name
        self.space, self.card = f"shoal-{name}-{os.getpid()}", f"sh{number}x{os.getpid() % 100000}"
        self.here, self.there = f"10.213.{number}.1", f"10.213.{number}.2"
        self.home.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, keys: Path) -> None:
        call("ip", "netns", "add", self.space)
        call("ip", "link", "add", self.card, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        call("ip", "addr", "add", f"{self.here}/24", "dev", self.card)
        call("ip", "link", "set", self.card, "up")
        for command in (f"addr add {self.there}/24 dev eth0", "link set eth0 up", "link set lo up"):
            call("ip", "-n", self.space, *command.split())
        users = Path("/etc/passwd").read_text().splitlines()
        mine = [f"root:x:0:0:root:{self.home}:/bin/sh" if one.startswith("root:") else one for one in users]
        (self.folder / "passwd").write_text("\n".join(mine))
        (self.folder / "sshd_config").write_text(SERVER.format(address=self.there, folder=keys, source=SOURCE))
        inside = f"mount --bind {self.folder}/passwd /etc/passwd; mkdir -p /run/sshd; exec {SSHD} -D -e -f {self.folder}/sshd_config"
        own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside]
        with (self.folder / "sshd.log").open("wb") as log:
            self.process = subprocess.Popen(["ip", "netns", "exec", self.space, *own], stdout=log, stderr=log)

    def workers(self) -> list[int]:
        """Processes of workers on this host."""
        found = []
        for pid in subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, check=False).stdout.split():
            try:
                if "join" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    found.append(int(pid))
            except OSError:
                continue
        return found

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for pid in subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, check=False).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", self.space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.card], check=False, capture_output=True)


@contextmanager
def hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts, and a configuration of ssh's that knows them."""
    keys = folder / "keys"
    keys.mkdir()
    for name in ("key", "host_key"):
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name)
    both = Host(folder, "ann", 1), Host(folder, "bo", 2)
    lines = ["StrictHostKeyChecking accept-new", f"UserKnownHostsFile {keys}/known", f"IdentityFile {keys}/key", "User root"]
    lines += [line for one in both for line in (f"Host {one.name}", f"  HostName {one.there}")]
    (folder / "ssh_config").write_text("\n".join(lines) + "\n")
    try:
        for one in both:
            one.start(keys)
            eventually(lambda one=one: "listening" in (one.folder / "sshd.log").read_text())
        yield both
    finally:
        for one in both:
            one.end()


def test_two_hosts_work_one_is_killed_and_comes_back_and_down_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    with hosts(tmp_path) as (ann, bo):
        more = ["--set", f"launch.ssh.python={sys.executable}", "--set", f"launch.ssh.options=[-F, {tmp_path}/ssh_config]"]
        assert main(["up", "fleet.yaml", *more, "--run-dir", "run"]) == 0
        log = tmp_path / "run" / "up.log"
        try:
            ledger = tmp_path / "run" / "coordinator" / "ledger.jsonl"
            eventually(lambda: ledger.exists() and '"ann"' in ledger.read_text() and '"bo"' in ledger.read_text())
            assert ann.workers()
            (killed,) = bo.workers()
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: [pid for pid in bo.workers() if pid != killed])
            eventually(lambda: main(["status", "run"]) == 0 and bo.there in capsys.readouterr().out)
        finally:
            print(log.read_text()[-3000:] if log.exists() else "nothing was said")
            main(["down", "run"])
        assert running_process(Path("run")) is None
        assert not ann.workers()
        assert not bo.workers()
        assert [list(one.home.glob(".shoal/*")) for one in (ann, bo)] == [[], []]
        assert main(["audit", "run"]) == 0
        assert "in 2 files" in capsys.readouterr().out, "the receipts came back"
