"""Which of an engine's processes this is: what torchrun, or Shoal's own launcher, puts into the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from shoal.errors import ShoalError

RENDEZVOUS = "SHOAL_RENDEZVOUS"
"""A file in which the processes that Shoal starts on one machine find each other; torchrun's find each other at an address."""
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Place(NamedTuple):
    """One process among those of an engine."""

    rank: int
    size: int
    local_rank: int
    """Among those of this machine."""
    local_size: int
    file: str = ""
    address: str = ""
    port: int = 0
    hosted: bool = False
    """torchrun's agent listens at the address; else the first process does."""
    restart: int = 0
    """How often torchrun has started the processes again."""

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


def place(environ: Mapping[str, str] | None = None) -> Place | None:
    """This process's place; None if it is not one of several."""
    there = os.environ if environ is None else environ
    if "RANK" not in there or "WORLD_SIZE" not in there:
        return None
    try:
        numbers = [int(there[name]) for name in _NAMES]
        restart, port = int(there.get("TORCHELASTIC_RESTART_COUNT", "0")), int(there.get("MASTER_PORT", "0"))
    except (KeyError, ValueError) as error:
        raise ShoalError(f"the environment has RANK and WORLD_SIZE, and is not as torchrun leaves it: {error}") from None
    file, address = there.get(RENDEZVOUS, ""), there.get("MASTER_ADDR", "")
    if not file and not (address and port):
        raise ShoalError("the environment has RANK and WORLD_SIZE, but no MASTER_ADDR and MASTER_PORT: start with torchrun")
    rank, size, local_rank, local_size = numbers
    hosted = there.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, size, local_rank, local_size, file, address, port, hosted, restart)


def environment_of(here: Place) -> dict[str, str]:
    """The variables that tell a process its place."""
    numbers = zip(_NAMES, here[:4], strict=True)
    return {name: str(number) for name, number in numbers} | {RENDEZVOUS: here.file}
