"""Searches for the secrets of a run where other users of the machine could find them: in files, and in the command lines of processes."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_INTERVAL_S = 0.01
_SECRET_FIELDS = ("token", "secret", "password", "identity")
_SECRET_FILES = ("receipts.key", "class_token", "metrics-token", "identity-*")
_SHORTEST = 12


class CommandLines:
    """The command lines that `ps` shows to every user, collected until the end of the block. The thread looks again and again, so what is
    shown for less than a few milliseconds may be missed."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.open_environments: set[str] = set()
        """Command lines of processes whose environment other users could read."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._look, name="command-lines")

    def __enter__(self) -> CommandLines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ending.wait(_INTERVAL_S):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if line and (process / "environ").stat().st_mode & 0o077:
                        self.open_environments.add(line)
                except OSError:  # it has ended
                    continue
                self.seen.add(line)

    def showing(self, secrets: Mapping[str, str]) -> list[str]:
        """What was shown that only its owner may see."""
        return [f"{where}: {line}" for secret, where in secrets.items() for line in self.seen if secret in line]


def secrets_below(*folders: Path) -> dict[str, str]:
    """Every secret that Shoal wrote below these folders, and the name of its file."""
    found: dict[str, str] = {}
    for path in _files(folders):
        if any(path.match(pattern) for pattern in _SECRET_FILES):
            found[path.read_text().strip()] = path.name
        elif path.name == "postgres.key":
            found |= dict.fromkeys(path.read_text().splitlines()[1:-1], path.name)
        elif path.suffix == ".json":
            found |= {secret: f"{path.name}, {field}" for field, secret in _secret_fields(_json(path))}
        elif path.name == "manifests.yaml":
            found |= {
                line.partition(": ")[2]: path.name
                for line in path.read_text().splitlines()
                if line.strip().startswith(("token: ", "key: "))
            }
    return {secret.strip("'\""): where for secret, where in found.items() if len(secret) >= _SHORTEST}


def readable_by_others(secrets: Mapping[str, str], *folders: Path) -> list[str]:
    """Files below these folders that hold a secret, and that other users can read by their mode."""
    wanted = {secret.encode(): where for secret, where in secrets.items()}
    shown = []
    for path in _files(folders):
        content = path.read_bytes() if stat.S_IMODE(path.stat().st_mode) & 0o077 else b""
        shown += [f"{path} holds the secret of {where}" for secret, where in wanted.items() if secret in content]
    return shown


def open_locks(*folders: Path) -> list[Path]:
    """Lock files that other users can open, and hold."""
    return [path for path in _files(folders) if path.name == "lock" and path.stat().st_mode & 0o077]


def _files(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        for above, _, names in os.walk(folder):
            for name in names:
                if stat.S_ISREG(os.lstat(path := Path(above) / name).st_mode):
                    yield path


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def _secret_fields(value: Any) -> Iterator[tuple[str, str]]:
    """Fields with a secret; the guests of guests.json each have a list that begins with their token."""
    if isinstance(value, dict):
        for name, one in value.items():
            if isinstance(one, str) and name in _SECRET_FIELDS:
                yield name, one
            elif name == "guests" and isinstance(one, dict):
                yield from ((f"guest {guest}", given[0]) for guest, given in one.items())
            else:
                yield from _secret_fields(one)
    elif isinstance(value, list):
        for one in value:
            yield from _secret_fields(one)
