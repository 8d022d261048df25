"""Who is at fault where a request's numbers are not finite, or a machine could not compute them.

The server decides from what it saw itself, never from what one machine says of another: it computes each stage again from the input that it
sent, beginning with the stage where the fault showed. A stage is at fault if the server's own output is right and the machine's is not. If
the server's own output is not finite either, the fault is in the input, and the stage before is looked at. If all stages are as the server
computes them, the model gives no finite numbers for this text.

Shapes: L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from shoal.serve.nodes.output_checks import agrees
from shoal.serve.nodes.placement import RouteStage


class StageEvidence(NamedTuple):
    """What one stage computed of a request."""

    stage: RouteStage
    x_1LD: Tensor
    y_1LD: Tensor | None
    """The output, or its last tokens. None: no output, or one that is not finite."""


@dataclass
class Inquiry:
    """The stages of a request that may be at fault, the latest first."""

    batch_number: int
    request: int
    ids: tuple[int, ...]
    problem: str
    """What the machine did where the fault showed."""
    evidence: Sequence[StageEvidence]
    at: int = 0

    @property
    def current(self) -> StageEvidence:
        return self.evidence[self.at]

    def judge(self, own_1LD: Tensor | None) -> Literal["machine", "next", "text"]:
        """Judge the current stage by the server's output of it; None: the server cannot compute it. `next`: look at the stage before."""
        _, _, y_1LD = self.current
        if y_1LD is None:
            is_right = own_1LD is not None and not own_1LD.isfinite().all()
        else:
            is_right = own_1LD is None or agrees(own_1LD[:, -y_1LD.shape[1] :], y_1LD)
        if not is_right:
            return "machine"
        self.at += 1
        return "next" if self.at < len(self.evidence) else "text"

    @property
    def fault(self) -> str:
        """What the machine of the current stage did wrong."""
        if self.current.y_1LD is None:
            return self.problem
        layers = self.current.stage.layers
        return f"its output of the layers {layers.first}–{layers.last - 1} is not what this machine computes"
