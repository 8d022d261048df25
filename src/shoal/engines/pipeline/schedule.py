"""Schedule of forward and backward passes in one pipeline stage: pure rules, without clock, tensors or links.

A step's batches are cut into micro-batches, which all stages take in the same order. The caller reports what has arrived; the schedule
returns the next pass. Holds: arrival times change only how forward and backward passes alternate, never the order within either kind, so
the sums of gradients are the same however slow a stage or a link is.
"""

from __future__ import annotations

from typing import NamedTuple


class ScheduledPass(NamedTuple):
    """One pass of one micro-batch through a stage."""

    forward: bool
    micro_batch: int


class PassSchedule:
    """The passes of one stage in one step.

    `1f1b`: a backward pass if its gradient has arrived, else a forward pass while fewer than (stages − stage) micro-batches are in flight,
    which bounds the activations that the stage keeps. `gpipe`: all forward passes, then all backward passes.
    """

    def __init__(self, stage: int, stages: int, micro_batches: int, schedule: str) -> None:
        self.first, self.last = stage == 0, stage == stages - 1
        self.micro_batches, self.all_forward_first = micro_batches, schedule == "gpipe"
        self.most_under_way = micro_batches if self.all_forward_first else stages - stage
        self.inputs = micro_batches if self.first else 0
        """Micro-batches whose input is here."""
        self.gradients = 0
        """Micro-batches whose output's gradient is here."""
        self.forward = self.backward = 0
        """Passes that have been taken."""

    @property
    def done(self) -> bool:
        return self.backward == self.micro_batches

    def next(self) -> ScheduledPass | None:
        """The pass to take now, which then counts as taken; None: something must arrive first."""
        if self._backward_is_due():
            self.backward += 1
            return ScheduledPass(False, self.backward - 1)
        if self.forward < self.inputs and self.forward - self.backward < self.most_under_way:
            self.forward += 1
            self.gradients += self.last  # the last stage makes its gradient itself
            return ScheduledPass(True, self.forward - 1)
        return None

    def _backward_is_due(self) -> bool:
        return self.backward < self.gradients and not (self.all_forward_first and self.forward < self.micro_batches)
