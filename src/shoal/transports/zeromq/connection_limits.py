"""How many connections there may be: in all, and from one address.

Every connection takes a descriptor of this process, and a file that cannot be opened ends a run. So there are fewer connections than
descriptors, and nobody has all of them. ZeroMQ tells of a connection when it has accepted it. Where it is one too many, the first to come
of those that are not let in yet is ended in its place: silence keeps nobody out who has the token.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias

from shoal.protocol.address_groups import household

RESERVED_DESCRIPTORS = 256
"""For files, processes and whatever else the run opens."""
_SHARE_OF_AN_ADDRESS = 3 / 4
"""However few descriptors there are, one address leaves some to the others."""
_LEAST = 16
FirstStranger: TypeAlias = Callable[[Callable[[int], bool]], int | None]
"""Of the descriptors that the question is about, the first to come that is not let in yet."""


@contextlib.contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The connection behind a descriptor, which stays ZeroMQ's. It takes no descriptor of its own: there may be none left. Raises OSError
    where the connection has ended, and the descriptor is something else's by now."""
    line = socket.socket(fileno=descriptor)
    try:
        if line.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError("not a connection over a network")
        yield line
    finally:
        line.detach()


def hang_up(descriptor: int) -> None:
    with contextlib.suppress(OSError), borrowed(descriptor) as line:  # it may have ended meanwhile
        line.shutdown(socket.SHUT_RDWR)


def room_for(wanted: int) -> int:
    """How many connections this process can have. The system is asked for more descriptors where it allows too few."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        more = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    return wanted if soft == resource.RLIM_INFINITY else max(_LEAST, min(wanted, soft - RESERVED_DESCRIPTORS))


class Crowd:
    """The connections there are. A descriptor names one while it lasts."""

    def __init__(self, most: int, most_of_an_address: int) -> None:
        self.most = room_for(most)
        self.most_of_an_address = max(1, min(most_of_an_address, int(self.most * _SHARE_OF_AN_ADDRESS)))
        self._from: dict[int, str] = {}
        self._counts: Counter[str] = Counter()

    def accepted(self, descriptor: int, first_stranger: FirstStranger) -> bool:
        """Count a connection. Return whether there was one too many: then a stranger is ended, or this one where there is none."""
        self.ended(descriptor)
        try:
            with borrowed(descriptor) as line:
                address = household(str(line.getpeername()[0]))
        except OSError:  # it has ended meanwhile
            return False
        if self._counts[address] >= self.most_of_an_address:
            leaving = first_stranger(lambda other: self._from.get(other) == address)
        elif len(self._from) >= self.most:
            leaving = first_stranger(lambda other: other in self._from)
        else:
            self._count(descriptor, address)
            return False
        if leaving is not None:
            self.ended(leaving)
            self._count(descriptor, address)
        hang_up(descriptor if leaving is None else leaving)
        return True

    def _count(self, descriptor: int, address: str) -> None:
        self._from[descriptor] = address
        self._counts[address] += 1

    def ended(self, descriptor: int) -> None:
        address = self._from.pop(descriptor, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]
