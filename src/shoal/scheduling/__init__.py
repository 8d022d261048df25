"""Scheduling: which worker does which task, and which machine gets which layers. Pure functions without state."""

from shoal.scheduling.matching import KINDS, Match, Matching, PendingTask, WorkerSpec, lacking
from shoal.scheduling.work_stealing import RemainingWork, StolenShare, worth_stealing

__all__ = ["KINDS", "Match", "Matching", "PendingTask", "RemainingWork", "StolenShare", "WorkerSpec", "lacking", "worth_stealing"]
