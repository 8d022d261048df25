"""A service of the system that runs a command while its user is logged in: a systemd user unit, a launchd agent, or a Windows task."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from shoal.files import writing

_RESTART_S = 300
"""A worker that failed is started again after this time: its coordinator may be back."""


class ServiceCommand(NamedTuple):
    """What a service runs."""

    name: str
    """The worker's name."""
    command: Sequence[str]
    folder: Path

    @property
    def identifier(self) -> str:
        """The name with letters and digits only, for files and commands."""
        return "shoal-" + (re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-") or "worker")


class Service(NamedTuple):
    """A file that describes a service, and the commands of its user."""

    path: Path
    content: bytes
    enable: str
    log: str
    remove: str

    def write(self) -> None:
        with writing(self.path):
            self.path.write_bytes(self.content)


def service_here(wanted: ServiceCommand) -> Service:
    """The service of this system."""
    if sys.platform == "darwin":
        return launchd_agent(wanted, Path.home() / "Library")
    if sys.platform == "win32":
        return windows_task(wanted, Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "shoal")
    return systemd_unit(wanted, Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"))


def systemd_unit(wanted: ServiceCommand, config: Path) -> Service:
    name, words = wanted.identifier, " ".join(map(_systemd_word, wanted.command))
    path = config / "systemd" / "user" / f"{name}.service"
    text = f"""\
[Unit]
Description=Shoal worker {wanted.name}

[Service]
ExecStart={words}
WorkingDirectory={str(wanted.folder).replace("%", "%%")}
Restart=on-failure
RestartSec={_RESTART_S}
TimeoutStopSec=20
KillMode=mixed
CPUWeight=idle
IOWeight=1

[Install]
WantedBy=default.target
"""
    start, stop = f"systemctl --user enable --now {name}", f"systemctl --user disable --now {name}"
    remove = f"{stop} && rm {shlex.quote(str(path))}"
    return Service(path, text.encode(), f"systemctl --user daemon-reload && {start}", f"journalctl --user -u {name} -f", remove)


def _systemd_word(word: str) -> str:
    """A word of a command line as systemd reads it, where `%` and `$` stand for themselves."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if re.search(r"[^A-Za-z0-9_./:=@%$-]", escaped) or not escaped else escaped


def launchd_agent(wanted: ServiceCommand, library: Path) -> Service:
    name = wanted.identifier
    path, log = library / "LaunchAgents" / f"{name}.plist", library / "Logs" / f"{name}.log"
    content = plistlib.dumps(
        {
            "Label": name,
            "ProgramArguments": list(wanted.command),
            "WorkingDirectory": str(wanted.folder),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_S,
            "ProcessType": "Background",
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
        }
    )
    file = shlex.quote(str(path))
    return Service(
        path,
        content,
        f"launchctl bootstrap gui/$(id -u) {file}",
        f"tail -f {shlex.quote(str(log))}",
        f"launchctl bootout gui/$(id -u)/{name} && rm {file}",
    )


def windows_task(wanted: ServiceCommand, folder: Path) -> Service:
    name, path = wanted.identifier, folder / f"{wanted.identifier}.xml"
    program, *words = wanted.command
    text = f"""\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <Triggers><LogonTrigger><Enabled>true</Enabled></LogonTrigger></Triggers>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT{_RESTART_S // 60}M</Interval><Count>999</Count></RestartOnFailure>
  </Settings>
  <Actions>
    <Exec>
      <Command>{escape(program)}</Command>
      <Arguments>{escape(subprocess.list2cmdline(words))}</Arguments>
      <WorkingDirectory>{escape(str(wanted.folder))}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
"""
    create = f'schtasks /Create /TN {name} /XML "{path}" && schtasks /Run /TN {name}'
    remove = f'schtasks /End /TN {name} & schtasks /Delete /TN {name} /F & del "{path}"'
    return Service(path, text.encode("utf-16"), create, f"schtasks /Query /TN {name} /V /FO LIST", remove)
