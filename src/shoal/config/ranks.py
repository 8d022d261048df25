"""This process's rank among an engine's processes, from the environment that torchrun or Shoal's launcher sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from shoal.config.schema import Run
from shoal.errors import ShoalError

RENDEZVOUS = "SHOAL_RENDEZVOUS"
"""File store through which processes that Shoal starts on one machine connect; torchrun's processes use an address."""
GROUP = "SHOAL_GROUP"
"""Group of torchrun processes to which this one belongs, if each group is a worker."""
APART = "SHOAL_APART"
"""Set if the processes are on machines without a shared folder, which a tunnel connects."""
STAGE = "SHOAL_STAGE"
"""Pipeline stage of the process, if it differs from its rank."""
STRATEGY_FOR_WORKERS = "syncps"
"""Default strategy for several workers: its results are those of one process."""
STRATEGY_ALONE = "local"
"""Strategy of a single worker."""
STRATEGY_FOR_ANSWERS = "rollouts"
"""Default strategy for several workers whose task answers prompts."""
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class RankPlace(NamedTuple):
    """Rank and rendezvous of one process of an engine."""

    rank: int
    size: int
    local_rank: int
    """Rank among the processes of this machine."""
    local_size: int
    file: str = ""
    address: str = ""
    port: int = 0
    hosted: bool = False
    """Whether torchrun's agent hosts the store; otherwise rank 0 does."""
    restart: int = 0
    """Number of restarts by torchrun."""
    group: str = ""
    """Group of torchrun processes; empty: all."""
    apart: bool = False
    """Whether the machines share no folder: rank 0 keeps the run's folder and sends the others what they need. A tunnel connects them."""
    stage: int | None = None
    """Pipeline stage; None: the rank."""

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


def rank_place(environ: Mapping[str, str] | None = None) -> RankPlace | None:
    """This process's rank; None if it is not one of several. Raises ShoalError for an incomplete environment."""
    environment = os.environ if environ is None else environ
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    try:
        numbers = [int(environment[name]) for name in _NAMES]
        restart, port = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")), int(environment.get("MASTER_PORT", "0"))
        stage = int(environment[STAGE]) if STAGE in environment else None
    except (KeyError, ValueError) as error:
        raise ShoalError(f"the environment has RANK and WORLD_SIZE, and is not as torchrun leaves it: {error}") from None
    file, address = environment.get(RENDEZVOUS, ""), environment.get("MASTER_ADDR", "")
    if not file and APART not in environment and not (address and port):
        raise ShoalError("the environment has RANK and WORLD_SIZE, but no MASTER_ADDR and MASTER_PORT: start with torchrun")
    rank, size, local_rank, local_size = numbers
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankPlace(
        rank, size, local_rank, local_size, file, address, port, hosted, restart, environment.get(GROUP, ""), APART in environment, stage
    )


def process_count(environ: Mapping[str, str]) -> int | None:
    """Number of processes that were started together with this one; None if it was started alone or the environment is incomplete."""
    try:
        here = rank_place(environ)
    except ShoalError:
        return None
    return here.size if here is not None else None


def batch_share(run: Run, rank: int, size: int) -> tuple[int, int]:
    """(part, parts): the part of every batch that a process reads."""
    return (0, 1) if run.engine.reads_whole_batches else (rank, size)


def rank_environment(here: RankPlace) -> dict[str, str]:
    """Environment variables of a process with this rank; torchrun's own address variables are inherited."""
    numbers = {name: str(number) for name, number in zip(_NAMES, here[:4], strict=True)}
    at = {APART: "1"} if here.apart else {}
    at |= {STAGE: str(here.stage)} if here.stage is not None else {}
    return numbers | at | {RENDEZVOUS: here.file, GROUP: here.group} | ({"TORCHELASTIC_USE_AGENT_STORE": "True"} if here.hosted else {})


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without rank variables."""
    return {name: value for name, value in environ.items() if name not in (*_NAMES, RENDEZVOUS, GROUP, APART, STAGE)}
