"""Starting processes on this machine: workers, the ranks of an engine, and the run's own database."""

from shoal.launch.engine_processes import LOST, EngineProcesses, LocalIsland, LocalRanks, RankLost, place_in_engine
from shoal.launch.local import LocalWorkers, use_passive_waiting
from shoal.launch.postgres.server import EmbeddedPostgres

__all__ = [
    "LOST",
    "EmbeddedPostgres",
    "EngineProcesses",
    "LocalIsland",
    "LocalRanks",
    "LocalWorkers",
    "RankLost",
    "place_in_engine",
    "use_passive_waiting",
]
