"""Which worker does which task: pure functions of tasks and machines. Whoever has tasks and workers calls them; they remember nothing."""

from shoal.scheduling.matching import KINDS, Job, Machine, Match, Matching, lacking
from shoal.scheduling.work_stealing import Burden, Theft, worth_stealing

__all__ = ["KINDS", "Burden", "Job", "Machine", "Match", "Matching", "Theft", "lacking", "worth_stealing"]
