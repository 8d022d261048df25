"""The interface of a tunnel between machines, as the processes of an engine use it."""

from __future__ import annotations

from abc import ABC, abstractmethod


class LoopbackTunnel(ABC):
    """This machine's end of a tunnel to the machines of an engine's other processes. It carries TCP connections from 127.0.0.1 here to
    127.0.0.1 there."""

    addresses: tuple[str, ...]
    """Where machines of higher rank reach this one; empty where there are none."""

    @abstractmethod
    def store_listener(self) -> tuple[int, int]:
        """Descriptor and port of a socket for the TCPStore, on the first machine."""

    @abstractmethod
    def store_port(self) -> int:
        """A port of this machine that leads to the first machine's TCPStore."""

    @abstractmethod
    def expose(self, port: int) -> None:
        """Let the other machines connect to a port of this machine."""

    @abstractmethod
    def dial(self, rank: int, address: str) -> None:
        """Connect to a machine of lower rank."""

    @abstractmethod
    def port_to(self, rank: int, port: int) -> int:
        """A port of this machine that leads to an exposed port of a machine of lower rank, which was dialled."""

    @abstractmethod
    def close(self) -> None:
        """Deliver what was sent, then end all connections."""
