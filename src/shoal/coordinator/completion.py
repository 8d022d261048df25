"""Whether the run is over."""

from __future__ import annotations

from shoal.coordinator.durable.replayed_state import ReplayedState
from shoal.coordinator.run_plan import RunPlan


class RunCompletion:
    """The run is over when its steps or batches are done, when no unit is left that could close a round, or when it was stopped."""

    def __init__(self, plan: RunPlan, replayed: ReplayedState) -> None:
        self.plan, self.replayed = plan, replayed
        self.total_steps = plan.total_steps
        self.stopped = ""
        """Why the run was stopped early; empty: it was not."""

    @property
    def finished(self) -> bool:
        plan, replayed = self.plan, self.replayed
        if replayed.all_units_settled and replayed.rounds.workers(replayed.state.version) < plan.needed:
            return True
        if plan.total_batches is None:
            return replayed.state.version >= self.total_steps or bool(self.stopped)
        return replayed.state.batches >= plan.total_batches or bool(self.stopped)

    def end_here(self) -> None:
        """Declare the run complete with the newest version."""
        self.total_steps = self.replayed.state.version
