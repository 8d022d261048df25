"""Parameters and optimizer state that DeepSpeed keeps on a disk."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

from shoal.errors import ShoalError

_PREFIX, _LOCK = "shoal-", "lock"
_open: WeakSet[ScratchFolder] = WeakSet()


class ScratchFolder:
    """A folder for this process's offloaded parameters and optimizer state, removed when the process ends. A folder that a killed
    process left is removed by the next process: its lock is free."""

    def __init__(self, where: str) -> None:
        import fcntl

        try:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=where)
            self.close = finalize(self, _remove, Path(self.path))
            new = Path(self.path) / "new"
            self._lock = new.open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            new.rename(new.with_name(_LOCK))  # the lock file appears only once it is held
        except OSError as error:
            raise ShoalError(f"engine.nvme_path: {where} cannot be used ({error.strerror}): name a folder on a local disk") from None
        _open.add(self)
        for lock in Path(where).glob(f"{_PREFIX}*/{_LOCK}"):
            with suppress(OSError), lock.open() as left:
                fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(lock.parent)


def _remove(folder: Path) -> None:
    """Rename the folder first, so that nothing is written to it any more; remove the lock last, so that an interrupted removal is found
    again."""
    gone = folder.with_name(f"{folder.name}-gone")
    with suppress(OSError):
        folder.rename(gone)
        for inside in gone.iterdir():
            if inside.name != _LOCK:
                shutil.rmtree(inside, ignore_errors=True)
        shutil.rmtree(gone, ignore_errors=True)


def leave_nothing() -> None:
    """Remove this process's folders before it ends without running its exit handlers."""
    for scratch in tuple(_open):
        scratch.close()


class DiskWindow:
    """The group of parameters that is in memory. DeepSpeed would read and write a whole group for each value that it is asked for; here a
    group stays until another one is wanted, or DeepSpeed goes on by itself."""

    def __init__(self, zero: Any) -> None:
        self.zero = zero
        self.open: int | None = None
        self._on_disk = getattr(zero, "_swappable_optimizer_subgroup", None)
        if self._on_disk is not None:
            zero._swappable_optimizer_subgroup = lambda number: number != self.open and self._on_disk(number)

    def show(self, parameter: Any) -> None:
        """Load the group that a parameter belongs to into memory."""
        if self._on_disk is None:
            return
        number, *_ = self.zero.grad_position[self.zero.get_param_id(parameter)]
        self.show_group(number)

    def show_group(self, number: int) -> None:
        if self._on_disk is None or self.open == number:
            return
        self.close()
        if self._on_disk(number):
            self.zero._optimizer_states_and_gradient_swap_in(number)
            self.open = number

    def close(self) -> None:
        """Write back what was shown last: it may have been changed."""
        if self.open is not None:
            number, self.open = self.open, None
            self.zero._writeback_swap_state(number, write_opt_state=True, write_gradients=True)


def check_disk_access() -> None:
    """DeepSpeed reads and writes through a library of the system's. Raises ShoalError where it is not there."""
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        raise ShoalError(
            "engine.nvme_offload: DeepSpeed needs libaio and a compiler for it, and they are not here (apt install libaio-dev)"
        )
