"""Get a file from the first address that has it."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.data.interfaces import Progress
from shoal.errors import ShoalError

_CHUNK = 1 << 16
_TIMEOUT_S = 20.0


def fetch(addresses: Sequence[str], file: Path, check: Callable[[Path], None], missing: str, progress: Progress | None) -> Path:
    """Download to `file`. It appears there only when it is whole and `check` let it pass. `missing` says what to do without a network."""
    unfinished = file.with_name(file.name + ".part")
    reason: Exception | None = None
    for address in addresses:
        try:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            _copy(address, unfinished, file.name, progress)
            check(unfinished)
            return unfinished.replace(file)
        except (OSError, ShoalError) as error:  # URLError is an OSError
            reason = error
            unfinished.unlink(missing_ok=True)
    why = getattr(reason, "reason", reason)
    raise ShoalError(f"{file} is not there and cannot be downloaded ({why}): {missing}")


def _copy(address: str, file: Path, what: str, progress: Progress | None) -> None:
    with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as response, file.open("wb") as output:
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        done = 0
        while chunk := response.read(_CHUNK):
            output.write(chunk)
            done += len(chunk)
            if progress:
                progress(what, done, total)
    if total is not None and done != total:
        raise OSError(f"{done:,} of {total:,} bytes came")
