"""Workers on machines that ssh reaches: looked at, started, watched, started again, and ended with the run.

The user's own ssh does all of it, with the user's keys and configuration. A worker reads its secrets from its standard input, which is the
ssh connection: when that ends for any reason, the worker leaves. Its output is sent over the same connection into its log on this machine.
"""

from __future__ import annotations

import secrets
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from shoal.config import Run
from shoal.config.schema.cluster import Host
from shoal.errors import ShoalError
from shoal.files import open_file
from shoal.launch.forkserver import OpenedProcess
from shoal.launch.local import LocalWorker, LocalWorkers, last_line
from shoal.runs.invitation import Invitation
from shoal.transports.addresses import parse
from shoal.transports.database_address import is_address
from shoal.version import __version__

_LOST = 255
"""What ssh itself ends with: there was no connection, or it broke, or the worker was killed."""
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_CHECK_S, _INSTALL_S = 60.0, 1200.0
_LOOK = "import sys, shoal; print(*sys.version_info[:2], shoal.__version__)"
_AT_ONCE = 16
_HOME_FOLDER = ".shoal"
"""The folder in the user's home there, which holds all that Shoal puts on a machine."""


class SshWorkers(LocalWorkers):
    """The workers of a run, each on a machine of its own."""

    passing = (_LOST,)

    def __init__(
        self, run: Run, folder: Path, invitation: Invitation, workers: Mapping[str, Sequence[str]], notify: Callable[[str], None]
    ) -> None:
        super().__init__(folder, invitation._asdict(), workers)
        self.settings, self.hosts, self.notify = run.launch.ssh, run.cluster.hosts, notify
        self.remote_folders = {name: f"{_HOME_FOLDER}/{secrets.token_hex(6)}" for name in workers}
        """The folder of each worker's files during the run; several machines may share a home folder."""
        self.pythons: dict[str, str] = {}

    def start(self) -> None:
        """Check all machines, and start a worker on each that passes. Raises ShoalError where none does."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            faults = dict(zip(self.workers, pool.map(self._check, self.workers), strict=True))
        for worker, fault in faults.items():
            if fault:
                worker.failed = f"{worker.name}: {fault}"
                self.notify(f"warning: {worker.name} cannot work: {fault}")
        if all(faults.values()):
            raise ShoalError(f"no worker could be started: {next(iter(self.workers)).failed}")
        for worker in self.workers:
            if not worker.failed:
                self._start(worker)

    # --- one machine ---------------------------------------------------------------------------------

    def target(self, name: str) -> str:
        """The destination of ssh: USER@HOST, or HOST."""
        host = self.hosts.get(name, Host())
        return f"{host.user}@{host.host or name}" if host.user else host.host or name

    def ssh(self, name: str, command: str) -> list[str]:
        return ["ssh", *_OPTIONS, *self.settings.options, self.target(name), command]

    def _check(self, worker: LocalWorker) -> str:
        """Check that the machine has a Python and this very version of Shoal; return the problem, or an empty string."""
        python = self.settings.python
        done = self._run(worker.name, f"{_word(python)} -c {shlex.quote(_LOOK)}", _CHECK_S)
        if done.returncode == _LOST:
            target, entry = self.target(worker.name), f"cluster.hosts.{worker.name}"
            return (
                f"`ssh {target}` does not work: {last_line(done.stderr)}. It must log in from here without asking anything; "
                f"{entry}.host and .user name another address and user"
            )
        found = done.stdout.split()
        if done.returncode == 0 and len(found) == 3 and found[2] == __version__:
            self.pythons[worker.name] = python
            return ""
        what = (
            f"it has Shoal {found[2]}" if done.returncode == 0 and len(found) == 3 else f"{python} has no Shoal: {last_line(done.stderr)}"
        )
        if self.settings.wheel is None:
            return f"{what}; this is {__version__}. Name its Python (launch.ssh.python), or a wheel to install (launch.ssh.wheel)"
        return self._install(worker, Path(self.settings.wheel))

    def _install(self, worker: LocalWorker, wheel: Path) -> str:
        """Put the wheel into an environment of its own on the machine."""
        if not wheel.is_file() or f"-{__version__}-" not in wheel.name:
            return f"launch.ssh.wheel: {wheel} is no wheel of version {__version__} (`make dist` makes one)"
        self.notify(f"installing {wheel.name} on {worker.name} …")
        place, python = f"{_HOME_FOLDER}/{__version__}", self.settings.python
        command = (
            f"mkdir -p {place} && cat > {place}/{wheel.name} && {_word(python)} -m venv {place}/venv "
            f"&& {place}/venv/bin/python -m pip install --quiet {place}/{wheel.name}"
        )
        done = self._run(worker.name, command, _INSTALL_S, wheel.read_bytes())
        if done.returncode:
            return f"{wheel.name} could not be installed: {last_line(done.stderr)}"
        self.pythons[worker.name] = f"~/{place}/venv/bin/python"
        return ""

    def _run(self, name: str, command: str, seconds: float, given: bytes = b"") -> subprocess.CompletedProcess[str]:
        """A command on a machine, to its end. One that takes too long counts as a lost connection."""
        try:
            done = subprocess.run(self.ssh(name, command), input=given, capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess([], _LOST, "", f"no answer in {seconds:.0f} s")
        except OSError as error:
            return subprocess.CompletedProcess([], _LOST, "", f"there is no ssh here: {error.strerror}")
        return subprocess.CompletedProcess([], done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    # --- what LocalWorkers asks ------------------------------------------------------------------------

    def open(self, worker: LocalWorker, log: IO[bytes]) -> OpenedProcess:
        remote = self.remote_folders[worker.name]
        join = shlex.join(["-m", "shoal", *self.command(worker, remote)])
        command = f"mkdir -p {remote} && exec {_word(self.pythons[worker.name])} {join}"
        # Ctrl-C here is for the coordinator; Windows ignores start_new_session
        return OpenedProcess(self.ssh(worker.name, command), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)

    def invitation_of(self, worker: LocalWorker) -> dict[str, Any]:
        """Each machine may reach the coordinator under an address of its own."""
        host, known = self.hosts.get(worker.name), self.invitation
        if host is None or is_address(known["address"]):
            return known
        address = parse(known["address"])
        return known | {"address": str(address._replace(host=host.server_address or address.host, port=host.server_port or address.port))}

    def close(self, patience_s: float = 10.0) -> None:
        """Ask the workers to leave, fetch their receipts, and leave nothing of the run on the machines."""
        super().close(patience_s)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(self._clear, [worker for worker in self.workers if worker.name in self.pythons]))

    def _clear(self, worker: LocalWorker) -> None:
        """The receipts are here before they are deleted there; where they cannot be fetched, all stays as it is. An installation stays."""
        remote, receipts = self.remote_folders[worker.name], f"{shlex.quote(worker.name)}.jsonl"
        fetched = self._run(worker.name, f"test ! -e {remote}/{receipts} || cat {remote}/{receipts}", _CHECK_S)
        if fetched.returncode:
            where = f"{self.target(worker.name)}:{remote}"
            self.notify(f"warning: the receipts of {worker.name} stay in {where}, and an audit lacks them: {last_line(fetched.stderr)}")
            return
        with open_file(self.folder / f"{worker.name}.jsonl", "a", private=True) as kept:  # a resumed run has some from before
            kept.write(fetched.stdout)
        self._run(worker.name, f"rm -rf {remote}; rmdir {_HOME_FOLDER} 2>/dev/null", _CHECK_S)


def _word(path: str) -> str:
    """A path as one word of a shell, which still finds the home folder."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
