"""A Slurm of two nodes on this machine, for as long as a test takes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.transports.addresses import free_port
from tests.support.eventually import eventually

CONF = """\
ClusterName=tiny
SlurmctldHost=localhost
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def tiny_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands mean this one. Skips where Slurm is not installed."""
    programs = [shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("slurmctld", "slurmd")]
    if None in programs or os.geteuid() != 0:
        pytest.skip("needs Debian's slurmctld, slurmd and slurm-client, and root")
    (folder / "state").mkdir(parents=True)
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=[free_port("127.0.0.1") for _ in range(3)]))
    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    controller, daemon = map(str, programs)
    commands = [[controller, "-D", "-c"], *([daemon, "-D", "-N", name] for name in ("n1", "n2"))]
    running = [subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands]
    try:
        eventually(lambda: "idle n[1-2]" in " ".join(_told(["sinfo", "--noheader"], environ).split()), f"{folder}/slurmctld.log says why")
        yield environ
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()


def _told(command: list[str], environ: dict[str, str]) -> str:
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout
