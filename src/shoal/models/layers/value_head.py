"""Scalar heads on a language model: one number for each token, for reward and value models.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.errors import ShoalError


class ScoreModel(nn.Module):
    """A language model with a scalar head in place of its output matrix. The head starts at zero, so all texts score the same."""

    def __init__(self, trunk: Any, *, head_only: bool = False) -> None:
        super().__init__()
        if not hasattr(trunk, "hidden"):
            raise ShoalError(f"a {type(trunk).__name__} gives no hidden states, which a score is read from")
        self.trunk = trunk.requires_grad_(False) if head_only else trunk
        self.head = ScalarHead(width_of(trunk))
        if not head_only:
            output = getattr(trunk, "output", None)
            if isinstance(output, nn.Linear):  # nothing uses it; a tied matrix stays trainable as the embedding
                output.requires_grad_(False)

    def forward(self, input_ids_BL: Tensor, **given: Any) -> Tensor:
        """Scores [B, L] in float32. `given`: further arguments of the trunk."""
        return self.head(self.trunk.hidden(input_ids_BL, **given))

    def save(self, folder: Path) -> None:
        """Save as a sequence classifier with one label, for trunks of transformers. The model must not be used afterwards."""
        self.trunk.save_scored(folder, self.head.weight.detach())

    def save_adapters(self, folder: Path) -> None:
        """Save the trunk's LoRA adapters alone. The head is with the whole model, which `save` writes."""
        self.trunk.save_adapters(folder)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the language model that callers need."""
        if name in ("vocab_size", "max_seq_len", "new_beside", "gradient_checkpointing"):
            return getattr(self.trunk, name)
        return super().__getattr__(name)


def add_value_head(model: Any, kind: str) -> dict[str, nn.Module]:
    """Add the value function of a policy: a separate network, or a head on the policy itself."""
    if kind == "network":
        return {"value": ScoreModel(copy.deepcopy(model))}
    if not hasattr(model, "output_weight"):
        raise ShoalError("rlhf.value: head needs a model of Shoal's own (gpt, moe); for others choose network")
    model.value_head = ScalarHead(width_of(model))
    return {}


class ScalarHead(nn.Linear):
    """Linear head with one output. It starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Computed in the type of the weights: half precision has about three digits, too few to compare scores."""
        return (hidden_BLD.to(self.weight.dtype) * self.weight[0]).sum(-1)


def width_of(model: Any) -> int:
    return int(model.width if hasattr(model, "width") else model.output_weight.shape[1])
