"""The key-value store of processes on several machines that a tunnel connects: a TCPStore in which gloo finds addresses that it can reach.

gloo listens on 127.0.0.1, and publishes that address in the store. Of two processes the one with the larger address connects to the other.
So that both agree, a process reads the address of one of higher rank as the largest address there is, to which it never connects; and the
address of one of lower rank as 0.0.0.0, which is this machine too, with a port from which the tunnel leads there.
"""

from __future__ import annotations

import re
import struct
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from shoal.protocol.tunnel import LoopbackTunnel

_LOOPBACK = re.compile(rb"(?<=\x02\x00|\x10\x02)(..)\x7f\x00\x00\x01", re.DOTALL)
"""The system's form of 127.0.0.1 and a port, in gloo's addresses: on Linux, or with a length before it (macOS)."""
_NEVER = b"\xff" * 6
"""The largest port and address."""
_PORT = _OWNER = struct.Struct(">H")
_ADDRESS = "tunnel of {}"


class TunnelledStore(Store):
    """A store whose values begin with the rank of the process that set them. The process group calls its methods, from C++."""

    def __init__(self, rank: int, size: int, tunnel: LoopbackTunnel, timeout: timedelta) -> None:
        super().__init__()
        self._rank, self._tunnel = rank, tunnel
        first = rank == 0
        descriptor, port = tunnel.store_listener() if first else (None, tunnel.store_port())
        self._store = TCPStore(
            "127.0.0.1", port, size, first, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=False
        )
        self._longest_wait = timeout

    def connect_all(self, size: int) -> None:
        """Connect the tunnel to the machines of the processes of lower rank."""
        if self._tunnel.addresses:
            self.set(_ADDRESS.format(self._rank), self._tunnel.addresses[0])
        for rank in range(1, min(self._rank, size)):
            self._tunnel.dial(rank, self.get(_ADDRESS.format(rank)).decode())

    def set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else value
        if (found := _LOOPBACK.search(value)) is not None:
            self._tunnel.expose(*_PORT.unpack(found[1]))
        self._store.set(key, _OWNER.pack(self._rank) + value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        content = self._store.get(key)
        (owner,), value = _OWNER.unpack(content[: _OWNER.size]), content[_OWNER.size :]
        if owner == self._rank or (found := _LOOPBACK.search(value)) is None:
            return value
        here = _NEVER if owner > self._rank else _PORT.pack(self._tunnel.port_to(owner, *_PORT.unpack(found[1]))) + bytes(4)
        return value[: found.start()] + here + value[found.end() :]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; never longer than processes may take to start, whatever a process group allows its messages."""
        self._store.wait(keys, min(timeout or self._longest_wait, self._longest_wait))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)
