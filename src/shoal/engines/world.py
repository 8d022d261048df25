"""Process group of an engine: the processes that step one model together, and their messages other than gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from shoal.config.ranks import RankPlace
from shoal.engines.tunnelled_store import TunnelledStore
from shoal.errors import ShoalError
from shoal.protocol.tunnel import LoopbackTunnel

_MEET_S = 120.0
"""Seconds that a process waits for all others to start."""
_SILENCE = timedelta(days=2)
"""Timeout of a message from another process. It is long because an island waits for its coordinator; a dead process is noticed at once."""
_LONGEST_PIECE = 64 << 20
Result = TypeVar("Result")


class World:
    """This process and the others that it steps with. In a world of one process all methods return at once."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        talk: dist.ProcessGroup | None = None,
        here: RankPlace | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.rank, self.size, self.apart = rank, size, here is not None and here.apart
        """`apart`: the processes have no shared folder."""
        self.stage = rank if here is None or here.stage is None else here.stage
        """The pipeline stage that this process runs."""
        self.rendezvous = rendezvous
        self.talk = talk
        """The process group for small tensors in main memory. Gradients use the default group, which is NCCL's on GPUs."""
        self.leaving = False
        """Whether this process has been asked to stop."""
        self.all_leave = False
        """Whether any process has been asked to stop. All processes know it, and stop after the same step."""

    @property
    def first(self) -> bool:
        """Whether this is the first process, which prints, records and writes files for all."""
        return self.rank == 0

    def begin_sum(self, numbers: list[float]) -> PendingSum:
        """Begin to sum numbers over all processes, while this process continues to compute."""
        if self.size == 1:
            return PendingSum(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        return PendingSum(values, dist.all_reduce(values, group=self.talk, async_op=True))

    def total(self, figures: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sum over all processes, name by name; all have the same names."""
        if self.size == 1 or not figures:
            return figures
        names = list(figures)
        stacked = torch.stack([figures[name].detach().double() for name in names])
        dist.all_reduce(stacked)
        return dict(zip(names, stacked.float(), strict=True))

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of all processes' tensors, on the device they compute on."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        return self.begin_sum([float(flag)]).wait()[0] > 0

    def broadcast_numbers(self, numbers: list[float]) -> list[float]:
        """The first process's numbers, in all processes."""
        if self.size == 1:
            return numbers
        return list(self.broadcast(torch.tensor(numbers, dtype=torch.float64)).tolist())

    def broadcast_text(self, text: str) -> str:
        """The first process's text, in all processes."""
        return self.broadcast_bytes(text.encode()).decode()

    def broadcast(self, values: Tensor) -> Tensor:
        """The first process's tensor, in all processes; the others pass a tensor of its size, which is filled."""
        if self.size > 1:
            dist.broadcast(values, 0, group=self.talk)
        return values

    def each(self, own: Tensor) -> list[Tensor]:
        """The tensors of all processes, which have the same size, in the order of the ranks."""
        if self.size == 1:
            return [own]
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own.contiguous(), group=self.talk)
        return found

    def texts(self, own: str) -> list[str]:
        """The texts of all processes, in the order of the ranks."""
        if self.size == 1:
            return [own]
        written = own.encode()
        lengths = [int(length) for length in self.each(torch.tensor([len(written)]))]
        letters = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        letters[: len(written)] = torch.tensor(list(written), dtype=torch.uint8)
        return [bytes(one[:length].tolist()).decode() for one, length in zip(self.each(letters), lengths, strict=True)]

    def collected(self, own: bytes) -> Iterator[bytes]:
        """Yield the bytes of each other process, in the first process only. All processes must iterate to the end."""
        for rank in range(1, self.size):
            length = torch.tensor([len(own)])
            if self.first:
                dist.recv(length, rank, group=self.talk)
                found = torch.empty(int(length), dtype=torch.uint8)
                for piece in torch.split(found, _LONGEST_PIECE):
                    dist.recv(piece, rank, group=self.talk)
                yield found.numpy().tobytes()
            elif self.rank == rank:
                dist.send(length, 0, group=self.talk)
                for piece in torch.split(torch.frombuffer(bytearray(own), dtype=torch.uint8), _LONGEST_PIECE):
                    dist.send(piece, 0, group=self.talk)

    def broadcast_bytes(self, content: bytes) -> bytes:
        """The first process's bytes, in all processes."""
        if self.size == 1 or not int(length := self.broadcast(torch.tensor([len(content)]))):
            return content if self.size == 1 else b""
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8) if self.first else torch.empty(int(length), dtype=torch.uint8)
        for piece in torch.split(values, _LONGEST_PIECE):
            self.broadcast(piece)
        return content if self.first else values.numpy().tobytes()

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            dist.barrier(group=self.talk)

    def close(self) -> None:
        """Shut down the process groups together, in this order: with any other a process sometimes aborts after a successful run."""
        if self.talk is not None:
            gc.collect()
            self.wait()
            dist.destroy_process_group()
            self.size, self.talk = 1, None
            if self.rendezvous is not None:
                self.rendezvous.close()


class PendingSum:
    """A sum over all processes that is being computed."""

    def __init__(self, values: Tensor | list[float], work: dist.Work | None = None) -> None:
        self._values, self._work = values, work

    def wait(self) -> list[float]:
        if self._work is not None:
            self._work.wait()
        return self._values.tolist() if isinstance(self._values, Tensor) else self._values


class Rendezvous:
    """The key-value store by which an engine's processes find each other. The first process may leave messages in it for the others."""

    def __init__(self, here: RankPlace, tunnel: LoopbackTunnel | None = None) -> None:
        """`tunnel`: to the machines of the other processes, where the processes are apart."""
        self.here, self.tunnel = here, tunnel
        self.store = self._found(lambda: _store(here) if tunnel is None else _tunnelled_store(here, tunnel))

    def put(self, name: str, value: str | bytes) -> None:
        """Store a message under a name."""
        self.store.set_timeout(timedelta(seconds=_MEET_S))
        self._found(lambda: self.store.set(name, value))  # type: ignore[arg-type]

    def wait_for(self, name: str, patience_s: float) -> bytes:
        """Wait for the message under a name and return it. Raises ShoalError."""
        self.store.set_timeout(timedelta(seconds=patience_s))
        return self._found(lambda: self.store.get(name))

    def get(self, name: str) -> str | None:
        """The message under a name, or None if there is none yet. Raises ShoalError."""
        return self._found(lambda: self.store.get(name).decode() if self.store.check([name]) else None)

    def enter(self, device: torch.device) -> World:
        """Create the process groups. Raises ShoalError."""
        return self._found(lambda: self._enter(device))

    def _enter(self, device: torch.device) -> World:
        on_gpu = device.type == "cuda"
        own = torch.device("cuda", device.index or 0) if on_gpu else None
        backend, patience = ("nccl", None) if on_gpu else ("gloo", _SILENCE)
        dist.init_process_group(backend, store=self.store, rank=self.here.rank, world_size=self.here.size, timeout=patience, device_id=own)
        talk = dist.new_group(backend="gloo", timeout=_SILENCE) if on_gpu else dist.group.WORLD
        return World(self.here.rank, self.here.size, talk, self.here, self)

    def close(self) -> None:
        """End the connections to other machines, after the process groups were shut down."""
        if self.tunnel is not None:
            self.tunnel.close()

    def _found(self, operation: Callable[[], Result]) -> Result:
        try:
            return operation()
        except (RuntimeError, ValueError, OSError) as error:
            raise OthersNotFound(f"process {self.here.rank} of {self.here.size} did not find the others: {error}") from None


class OthersNotFound(ShoalError):
    """The other processes did not start, or have ended."""


def enter(here: RankPlace | None, device: torch.device, tunnel: LoopbackTunnel | None = None) -> World:
    """Meet the other processes and create the process groups. Raises ShoalError."""
    return Rendezvous(here, tunnel).enter(device) if here is not None else World()


def _store(here: RankPlace) -> Store:
    """The store of a rendezvous. Processes that are restarted must not read the messages of the processes before them."""
    if here.file:
        return FileStore(here.file, here.size)
    listening = here.rank == 0 and not here.hosted
    store = TCPStore(here.address, here.port, here.size, listening, timeout=timedelta(seconds=_MEET_S), wait_for_workers=False)
    return PrefixStore(here.group or f"start-{here.restart}", store)


def _tunnelled_store(here: RankPlace, tunnel: LoopbackTunnel) -> Store:
    store = TunnelledStore(here.rank, here.size, tunnel, timedelta(seconds=_MEET_S))
    store.connect_all(here.size)
    return store


def is_process_lost(error: Exception) -> bool:
    """Whether an error only says that another process is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
