"""manifest.json of a folder with a model: the SHA-256 of every file in it. Readers of the folder refuse a damaged file by name.

A folder without it, such as one of the Hugging Face hub, is read unchecked. Notes (*.md) and hidden files are not listed. The manifest
shows damage, not an attack: an attacker who can change a file can change the manifest, too.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from shoal.errors import ShoalError
from shoal.files import DamagedFileError, JsonFormat, file_digest

FILE = "manifest.json"
FORMAT = JsonFormat("manifest", 1, ("files",))
_AT_ONCE = 4
"""Files that are read together: SHA-256 takes about a second for each GB on one core."""


def write_manifest(folder: Path, names: Iterable[str] | None = None) -> int:
    """List these files, or all files of the folder, with their digests. Return how many there are. Raises ShoalError."""
    found = sorted(listed_files(folder) if names is None else names)
    FORMAT.write(folder / FILE, {"files": _digests(folder, found)}, indent=1)
    return len(found)


def manifest_of(files: Mapping[str, Path | bytes]) -> bytes:
    """The content of the manifest of files that are not in one folder, by their names in it."""
    listed = {name: file for name, file in files.items() if _is_listed(name)}
    digests = {name: file_digest(file) if isinstance(file, Path) else hashlib.sha256(file).hexdigest() for name, file in listed.items()}
    return FORMAT.text({"files": digests}, indent=1).encode()


def check_manifest(folder: Path, among: Callable[[str], bool] = lambda name: True) -> int | None:
    """Check files of a folder against its manifest. Return how many it lists; None where there is no manifest. Raises DamagedFileError.

    `among`: whether a file, by its name, is checked.
    """
    fields = FORMAT.read(folder / FILE) if folder.is_dir() else None
    if fields is None:
        return None
    files = _entries(folder, fields["files"])
    names = sorted(filter(among, files))
    for name, digest in _digests(folder, names).items():
        if digest != files[name]:
            raise DamagedFileError(
                f"{folder / name} is not as {FILE} beside it says: it was damaged or edited. Put the file back; if you edited it on "
                f"purpose, `shoal manifest {folder} --write` takes the folder as it is now"
            )
    return len(files)


def is_small(name: str) -> bool:
    """Whether a file of a model holds no weights, of which each GB takes about a second to check."""
    return not name.endswith(".safetensors")


def listed_files(folder: Path) -> list[str]:
    """The names of all files of a folder that belong into its manifest."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [name for name in names if _is_listed(name)]


def _is_listed(name: str) -> bool:
    return name != FILE and not name.endswith(".md") and not any(part.startswith(".") for part in name.split("/"))


def _entries(folder: Path, files: Any) -> dict[str, str]:
    """The digests by name. Raises DamagedFileError where a name is not that of a file below the folder."""
    if not isinstance(files, dict) or not all(_is_below(name) and isinstance(digest, str) for name, digest in files.items()):
        raise DamagedFileError(f"{folder / FILE} is not a valid {FORMAT.kind}: it names no files of its folder")
    return files


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    """The SHA-256 of each file. Raises ShoalError where one is missing or cannot be read."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(_digest, (folder / name for name in names)), strict=True))


def _digest(path: Path) -> str:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DamagedFileError(f"{path} is listed in {FILE} and is no regular file: put the file back")
        return _digest_as_of(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing, and {FILE} lists it: put the file back") from None
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror or error}") from None


@lru_cache(maxsize=4096)
def _digest_as_of(path: Path, *_: int) -> str:
    """The SHA-256 of a file while its stamp is the same: the parts of a model open the same folder one after another."""
    return file_digest(path)
