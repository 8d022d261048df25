"""The differential-privacy budget that a run with workers has spent."""

from __future__ import annotations

from shoal.config import Run
from shoal.coordinator import Coordinator
from shoal.coordinator.driver_interfaces import LeaseDatabase
from shoal.strategies import Policies, RunLength
from shoal.updates import privacy


class PrivacyBudget:
    """Computes ε from the contributions that workers have sent; those that were refused count too."""

    def __init__(self, run: Run, coordinator: Coordinator, policies: Policies, length: RunLength, board: LeaseDatabase | None) -> None:
        self.settings, self.coordinator, self.policies, self.length, self.board = run.updates.privacy, coordinator, policies, length, board
        per_shard = length.batches_per_shard
        self.sampling_rate = min(1.0, length.batches_per_contribution / per_shard) if per_shard else 1.0

    def epsilon(self) -> float:
        """ε of any one sample so far."""
        state, accountant = self.coordinator.state, self._accountant()
        if self.policies.feed.leased:  # all units are of the same data
            late = sum(one["late"] + one["cancelled"] for one in self.board.workers()) if self.board is not None else 0
            accountant.record("units", sum(state.contributions.values()) + late)
        elif self._shares_data:
            accountant.record("tasks", sum(last + 1 for last in state.sequences.values()))
        else:
            for name, seat in state.seats.items():
                accountant.record(f"seat {seat}", state.sequences.get(name, -1) + 1)
        return accountant.spent()

    def warning(self, setting: str) -> str:
        """A warning where the whole run will spend too large an ε; else empty. `setting`: the user's name of the noise multiplier."""
        spent, length = self._accountant(), self.length
        contributions = length.steps * length.batches_per_step / length.batches_per_contribution
        spent.record("whole run", max(1, round(contributions / (1 if self._shares_data else self.coordinator.plan.expected))))
        if self.settings.protects(spent.spent()):
            return ""
        return (
            f"warning: at its end this run will have spent ε ≈ {spent.spent():.4g} at δ = {spent.delta:g}, too much to protect the data "
            f"(ε up to {self.settings.protects_up_to:g} does): raise {setting}, or train for fewer steps"
        )

    @property
    def _shares_data(self) -> bool:
        """Whether all workers learn from the same data, instead of each from its own shard."""
        return self.policies.feed.leased or self.coordinator.tasks is not None

    def _accountant(self) -> privacy.Accountant:
        noise = self.settings.noise_multiplier
        multiplier = noise if self.settings.unit == "sample" else privacy.sample_level_multiplier(noise)
        return privacy.Accountant(multiplier, self.sampling_rate, self.settings.delta)
