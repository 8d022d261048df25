"""The processes of one engine on this machine: started together, watched, and ended together.

What the first one prints goes where this process prints; what the others say is kept, and its end is shown when one of them fails. Each
leaves when its standard input is closed, so none is left behind whatever happens to the process that started them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.config.ranks import Place, environment_of
from shoal.errors import ShoalError
from shoal.launch.local import fair_threads, last_line

LOST = 75
"""The exit code of a process that ended since another one had."""
_LOOK_S = 0.05
_PATIENCE_S = 5.0


class LocalRanks:
    """So many processes of `shoal`, each with a rank."""

    def __init__(self, count: int, arguments: Sequence[str], on_cpu: bool) -> None:
        self.count, self.arguments, self.on_cpu = count, list(arguments), on_cpu
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """Start them and wait for their end; the exit code of the first. Raises ShoalError when one fails that cannot tell itself."""
        with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
            try:
                for rank in range(self.count):
                    self.processes.append(self._start(rank, Path(folder)))
                while all(process.poll() in (None, 0) for process in self.processes):
                    if all(process.poll() == 0 for process in self.processes):
                        return 0
                    time.sleep(_LOOK_S)
                return self._failed(Path(folder))
            finally:
                self._end()

    def _start(self, rank: int, folder: Path) -> subprocess.Popen[bytes]:
        here = Place(rank, self.count, rank, self.count, file=str(folder / "meeting"))
        environ = dict(os.environ) | environment_of(here) | ({"DS_ACCELERATOR": "cpu"} if self.on_cpu else {})
        if "OMP_NUM_THREADS" not in environ:
            environ |= {"OMP_NUM_THREADS": str(fair_threads(self.count)), "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-m", "shoal", *self.arguments]
        with (folder / f"{rank}.log").open("wb") as log:
            output = None if rank == 0 else log
            # Ctrl-C reaches this process alone, which passes it on
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environ, start_new_session=True)

    def stop(self, number: int) -> None:
        """Pass a signal on. One process is told; it tells the others, and all stop after the same step."""
        if self.processes and self.processes[0].poll() is None:
            self.processes[0].send_signal(number)

    def _failed(self, folder: Path) -> int:
        """One has ended badly: let the others notice, end them, and find the one it began with."""
        self._wait(_PATIENCE_S)
        codes = [process.poll() for process in self.processes]
        guilty = [rank for rank, code in enumerate(codes) if code not in (None, 0, LOST)]
        rank = guilty[0] if guilty else next(rank for rank, code in enumerate(codes) if code)
        code = codes[rank] or 0
        if rank == 0 and code > 0:
            return code  # it has said why
        said = last_line(folder / f"{rank}.log").removeprefix("error: ") if rank else ""
        if code == 2:
            raise ShoalError(said)
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}: {said}"
        raise ShoalError(f"process {rank} of {self.count} {how}; the others were ended. --resume goes on from the last checkpoint")

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(process.poll() is None for process in self.processes):
            time.sleep(_LOOK_S)

    def _end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        self._wait(_PATIENCE_S)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
