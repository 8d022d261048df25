"""Which of an engine's processes this is: what torchrun, or Shoal's own launcher, puts into the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from shoal.config.schema import Run
from shoal.errors import ShoalError

RENDEZVOUS = "SHOAL_RENDEZVOUS"
"""A file in which the processes that Shoal starts on one machine find each other; torchrun's find each other at an address."""
GROUP = "SHOAL_GROUP"
"""Which of several groups of torchrun's processes it belongs to, where each is a worker of its own."""
APART = "SHOAL_APART"
"""Says that the processes are on machines that share no folder."""
STAGE = "SHOAL_STAGE"
"""Which stage of a pipeline the process has, where that does not follow from its rank."""
STRATEGY_FOR_WORKERS = "syncps"
"""The strategy where several workers are asked for and none is configured: its results are those of one process."""
STRATEGY_ALONE = "local"
"""The strategy of one worker, without others."""
STRATEGY_FOR_ANSWERS = "rollouts"
"""The strategy where several workers are asked for, and the task has them answer prompts."""
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class RankPlace(NamedTuple):
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
    group: str = ""
    """Which part of torchrun's processes these are; empty: all."""
    apart: bool = False
    """The processes are on machines that share no folder: the first one keeps the run's, and hands out what others need of it."""
    stage: int | None = None
    """The stage of a pipeline that it has; None: that of its rank."""

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


def rank_place(environ: Mapping[str, str] | None = None) -> RankPlace | None:
    """This process's place; None if it is not one of several."""
    there = os.environ if environ is None else environ
    if "RANK" not in there or "WORLD_SIZE" not in there:
        return None
    try:
        numbers = [int(there[name]) for name in _NAMES]
        restart, port = int(there.get("TORCHELASTIC_RESTART_COUNT", "0")), int(there.get("MASTER_PORT", "0"))
        stage = int(there[STAGE]) if STAGE in there else None
    except (KeyError, ValueError) as error:
        raise ShoalError(f"the environment has RANK and WORLD_SIZE, and is not as torchrun leaves it: {error}") from None
    file, address = there.get(RENDEZVOUS, ""), there.get("MASTER_ADDR", "")
    if not file and not (address and port):
        raise ShoalError("the environment has RANK and WORLD_SIZE, but no MASTER_ADDR and MASTER_PORT: start with torchrun")
    rank, size, local_rank, local_size = numbers
    hosted = there.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankPlace(rank, size, local_rank, local_size, file, address, port, hosted, restart, there.get(GROUP, ""), APART in there, stage)


def process_count(environ: Mapping[str, str]) -> int | None:
    """How many processes somebody has started together, this one among them; None: nobody has, or `rank_place` will say what is wrong."""
    try:
        here = rank_place(environ)
    except ShoalError:
        return None
    return here.size if here is not None else None


def uses_several_processes(run: Run) -> bool:
    """Whether a worker of this run is several processes."""
    return run.engine.several_processes


def batch_share(run: Run, rank: int, size: int) -> tuple[int, int]:
    """Which part of every batch a process of a worker reads, and of how many."""
    return (0, 1) if run.engine.reads_whole_batches else (rank, size)


def rank_environment(here: RankPlace) -> dict[str, str]:
    """The variables that tell a process its place; those that say where torchrun's meet are there already."""
    numbers = {name: str(number) for name, number in zip(_NAMES, here[:4], strict=True)}
    at = {"MASTER_ADDR": here.address, "MASTER_PORT": str(here.port), APART: "1"} if here.apart else {}
    at |= {STAGE: str(here.stage)} if here.stage is not None else {}
    return numbers | at | {RENDEZVOUS: here.file, GROUP: here.group} | ({"TORCHELASTIC_USE_AGENT_STORE": "True"} if here.hosted else {})


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for a process that is not one of several."""
    return {name: value for name, value in environ.items() if name not in (*_NAMES, RENDEZVOUS, GROUP, APART, STAGE)}
