"""What the user of a machine allows a coordinator to name: files below certain folders, and names on the hub for which a token is used.

Built-in data and data that the coordinator sends need no permission. Without a permission the folder in which the worker was started may
be read, unless the home folder is in it: then all of a user's files would be.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ShoalError, printable

_HUB = "hub:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


class Permissions(NamedTuple):
    """The permissions of this machine, as `--data` gave them."""

    folders: tuple[Path, ...] = ()
    """Allowed by name: files and folders, with symbolic links resolved."""
    hub_names: frozenset[str] = frozenset()
    """Names on the hub that may be read with this machine's own token."""

    @classmethod
    def of(cls, given: Iterable[str]) -> Permissions:
        """The permissions that `--data` options give: `PATH` or `hub:NAME`. Raises ShoalError."""
        folders, names = list[Path](), set[str]()
        for text in given:
            if text.startswith(_HUB):
                names.add(text.removeprefix(_HUB))
            elif (path := resolved(text)) is None:
                raise ShoalError(f"--data {text}: this is no path; name a file or a folder, or hub:NAME")
            else:
                folders.append(path)
        return cls(tuple(folders), frozenset(names))

    def names(self, path: str) -> bool:
        """Whether a path is below a folder that was allowed by name."""
        found = resolved(path)
        return found is not None and any(found.is_relative_to(folder) for folder in self.folders)

    def reads(self, path: str) -> bool:
        """Whether a file or folder may be read: it is below a folder that was allowed by name, whose own links its user has seen; or it is
        below the folder of the start, and its symbolic links lead nowhere else."""
        found = resolved(path)
        if found is None or self.names(path):
            return found is not None
        return _is_below_start(found) and all(_is_below_start(target) or self.names(str(target)) for target in _targets_of_links(found))


def resolved(path: str) -> Path | None:
    """The absolute path without symbolic links; None where there is no such path, as after a loop of links."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):
        return None


def start_folder() -> Path | None:
    """The folder in which this process was started; None where the user's home folder is below it, or is that folder."""
    start, home = resolved("."), resolved("~")
    return None if start is None or start == Path(start.anchor) or (home is not None and home.is_relative_to(start)) else start


def is_local(name: str) -> bool:
    """Whether a name that may be one on the hub is read as a file or folder: it exists, or is no name of the hub."""
    try:
        return not _HUB_NAME.fullmatch(name) or Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return True


def option_for(name: str) -> str:
    """The option that allows this file or folder, as a person may paste it into a shell."""
    return f"--data {shlex.quote(printable(name))}"


def _is_below_start(path: Path) -> bool:
    """Whether a path is in the folder of the start, and no hidden file."""
    start = start_folder()
    return start is not None and path.is_relative_to(start) and not any(part.startswith(".") for part in path.relative_to(start).parts)


def _targets_of_links(folder: Path) -> Iterable[Path]:
    """What the symbolic links below a folder lead to; the links of folders that are links themselves are not followed."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink():
                yield resolved(str(path)) or Path(path.anchor)
