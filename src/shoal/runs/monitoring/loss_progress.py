"""Whether the loss of a run has moved, and what to try if it has not."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.config.schema.training import Training

_MOVED = {"step": 0.05, "train": 0.02, "eval": 0.01}
"""Share of the first loss by which it must have fallen, or risen, to have moved. A single batch is the noisiest."""


class LossProgress:
    """The first and the newest loss: of the first step, of the training figures, and of the evaluations."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        """By split: `step` (the first one alone), `train`, `eval`."""
        self.newest: dict[str, float] = {}

    def note(self, split: str, metrics: Mapping[str, object]) -> None:
        """Note a figure named `loss`, if there is one. Losses of other names, such as those of two networks that compete, need not fall."""
        if (loss := metrics.get("loss")) is None:
            return
        value = float(loss)  # type: ignore[arg-type]  # a number, or a tensor with one
        if split not in self.first:
            self.first[split] = value
        else:
            self.newest[split] = value
        if split == "train":
            self.newest["step"] = value

    def warning(self, training: Training, phase: str = "") -> str:
        """What to tell the user at the end of a run whose loss has not fallen; empty: it has fallen, or the run has too few figures.

        `phase`: the setting that has the learning rate, the epochs and the batch size of a phase of learning from feedback.
        """
        moves = {split: (self.newest[split] / first - 1) / _MOVED[split] for split, first in self.first.items() if self._is_known(split)}
        if not moves or min(moves.values()) < -1:
            return ""
        split = next(split for split in ("eval", "train", "step") if split in moves)
        numbers = f"{self.first[split]:.4g} at first, {self.newest[split]:.4g} at the end"
        known = getattr(training.optimizer, "learning_rate", None)
        rate = "learning rate" if known is None else f"{phase or 'training.optimizer'}.learning_rate (it is {known:g})"
        if min(moves.values()) > 1:
            return f"warning: the loss has risen: {numbers}. Try a smaller {rate}, or a limit for the gradient: training.clipping.max_norm"
        of = phase or "training"
        length = f"{of}.max_steps (it is {training.max_steps})" if training.max_steps else f"{of}.epochs (it is {training.epochs})"
        return (
            f"warning: the loss has hardly moved: {numbers}. Try ten times the {rate}; more steps: {length}; or a smaller "
            f"{of}.batch_size (it is {training.batch_size}), which makes more steps of the same data"
        )

    def _is_known(self, split: str) -> bool:
        return split in self.newest and self.first[split] > 0

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {"first": dict(self.first), "newest": dict(self.newest)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        self.first, self.newest = dict(state["first"]), dict(state["newest"])
