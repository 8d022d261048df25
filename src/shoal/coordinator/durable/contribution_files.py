"""Files in which contributions wait for their round where they are too large for memory: one for each, as it was encoded.

The files have no names, so nothing is left of them when the process ends; after a crash the journal has the contributions. Their pages
are the system's cache: it writes them to the disk and drops them when memory is needed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.protocol.messages import Frames


class ContributionFiles:
    """Makes such files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, frames: Frames) -> Frames:
        """Read-only views of the same bytes, in a file. Raises ShoalError if there is no room for them."""
        views = [memoryview(frame).cast("B") for frame in frames]
        if not any(view.nbytes for view in views):
            return tuple(views)
        try:
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                for view in views:
                    _write(file.fileno(), view)
                mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise _no_room(self.folder, error) from None
        starts = [sum(view.nbytes for view in views[:index]) for index in range(len(views))]
        return tuple(mapped[start : start + view.nbytes] for start, view in zip(starts, views, strict=True))

    def rows(self, count: int, size: int) -> Tensor:
        """A matrix [count, size] in a file. Raises ShoalError if there is no room for it."""
        try:
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, 4 * count * size)  # a full disk is an error here, and would be a signal later
                else:
                    file.truncate(4 * count * size)
                return torch.frombuffer(mmap.mmap(file.fileno(), 4 * count * size), dtype=torch.float32).view(count, size)
        except OSError as error:
            raise _no_room(self.folder, error) from None


def _write(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _no_room(folder: Path, error: OSError) -> ShoalError:
    return ShoalError(
        f"contributions wait in files in {folder}, and that fails: {error.strerror}. coordinator.held_in: memory needs no disk"
    )
