"""Which worker does which task: pure functions of tasks and machines. Whoever has tasks and workers calls them; they remember nothing."""

from shoal.scheduling.matching import KINDS, Match, Matching, PendingTask, WorkerSpec, lacking
from shoal.scheduling.work_stealing import RemainingWork, StolenShare, worth_stealing

__all__ = ["KINDS", "Match", "Matching", "PendingTask", "RemainingWork", "StolenShare", "WorkerSpec", "lacking", "worth_stealing"]
