"""Starting processes on this machine: workers, the ranks of an engine, and the run's own database."""

from shoal.launch.engine_processes import LOST, Crew, LocalIsland, LocalRanks, RankLost, place_in
from shoal.launch.local import LocalWorkers, wait_quietly
from shoal.launch.postgres.server import EmbeddedPostgres

__all__ = [
    "LOST",
    "Crew",
    "EmbeddedPostgres",
    "LocalIsland",
    "LocalRanks",
    "LocalWorkers",
    "RankLost",
    "place_in",
    "wait_quietly",
]
