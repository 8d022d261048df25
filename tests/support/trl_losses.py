"""A small model and a batch of preferences, and the losses and gradients that TRL's own trainers compute for them.

`python -m tests.support.trl_losses` prints the figures of `tests/tasks/test_losses_of_trl.py`, in an environment with TRL 1.12.0.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, PAD, IGNORED = 8, 3, 0, -100
PROMPTS = ([1, 2], [3, 4, 5], [6])
CHOSEN = ([3, 4, 7], [2], [1, 5])
REJECTED = ([5, 7], [6, 1, 2, 7], [4])
LABELS = (True, False, True)
"""Of single answers, which are the chosen answers above."""
CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.3},
    "ipo": {"beta": 0.3},
    "hinge": {"beta": 0.3},
    "robust": {"beta": 0.3, "label_smoothing": 0.1},
    "kto": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    "orpo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "gamma": 0.4, "label_smoothing": 0.1},
}
"""The settings of the task, by its loss."""


class SmallModel(nn.Module):
    """Logits of the next token from the mean of all tokens so far. `shift` makes models that differ."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        places = torch.arange(VOCABULARY * WIDTH, dtype=torch.float64).view(VOCABULARY, WIDTH)
        self.table = nn.Parameter(torch.sin(places + shift))
        self.output = nn.Parameter(torch.cos(2 * places + shift))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        counts = torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float64)[:, None]
        return self.as_output((self.table[input_ids].cumsum(1) / counts) @ self.output.T)

    def as_output(self, logits: Tensor) -> Any:
        return logits


class TransformersModel(SmallModel):
    """The same with the output that TRL reads."""

    is_gradient_checkpointing = False

    def as_output(self, logits: Tensor) -> Any:
        return SimpleNamespace(logits=logits)


def _padded(rows: list[list[int]], fill: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def columns(prompts: Any, answers: Any) -> dict[str, Tensor]:
    """Prompts and answers as TRL's collators lay them out."""
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    learned = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    labels = [[IGNORED] * len(prompt) + [*answer] for prompt, answer in zip(prompts, answers, strict=True)]
    return {
        "input_ids": _padded(texts, PAD),
        "attention_mask": _padded([[1] * len(text) for text in texts], 0),
        "completion_mask": _padded(learned, 0),
        "labels": _padded(labels, IGNORED),
    }


def turned(answers: Any) -> Any:
    """Each answer at the place of the next one."""
    return [*answers[-1:], *answers[:-1]]


def _trainer(kind: Any, model: nn.Module, **more: Any) -> Any:
    """A trainer with what its loss reads, and nothing else."""
    trainer = object.__new__(kind)
    same = lambda value: value  # noqa: E731
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same, unwrap_model=same)
    values = {"model": model, "accelerator": accelerator, "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)}}
    values |= {"aux_loss_enabled": False, "args": SimpleNamespace(gradient_checkpointing_kwargs=None), "_total_train_tokens": 0}
    vars(trainer).update(values | more)
    return trainer


def _pair_loss(model: nn.Module, reference: nn.Module, loss: str, settings: dict[str, Any]) -> Tensor:
    from trl.trainer.dpo_trainer import DPOTrainer

    more = {"ld_alpha": None, "precompute_ref_logps": False, "f_divergence_type": "reverse_kl", "use_weighting": False}
    more |= {"loss_types": [loss], "loss_weights": [1.0], "label_smoothing": 0.0} | settings
    batch = columns([*PROMPTS, *PROMPTS], [*CHOSEN, *REJECTED])
    del batch["labels"]
    return _trainer(DPOTrainer, model, ref_model=reference, **more)._compute_loss(model, batch, False)


def _kto_loss(model: nn.Module, reference: nn.Module, settings: dict[str, Any]) -> Tensor:
    from trl.trainer.kto_trainer import KTOTrainer

    trainer = _trainer(
        KTOTrainer,
        model,
        ref_model=reference,
        loss_type="kto",
        calculate_KL=True,
        precompute_ref_logps=False,
        use_liger_kernel=False,
        **settings,
    )
    own, other = columns(PROMPTS, CHOSEN), columns(PROMPTS, turned(CHOSEN))
    batch = own | {f"KL_{name}": value for name, value in other.items()} | {"label": torch.tensor(LABELS)}
    del batch["labels"], batch["KL_labels"]
    return trainer._compute_loss(model, batch, False)


def _loss_without_reference(model: nn.Module, loss: str, settings: dict[str, Any]) -> Tensor:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    more = {"padding_value": PAD, "pad_token_id": PAD, "is_encoder_decoder": False, "label_smoothing": 0.0, "alpha": 0.0, "cpo_alpha": 0.0}
    more |= {"max_length": 16, "loss_type": loss, "simpo_gamma": settings.get("gamma")} | settings
    batch = {
        f"{side}_{name}": value
        for side, answers in (("chosen", CHOSEN), ("rejected", REJECTED))
        for name, value in columns(PROMPTS, answers).items()
        if name != "completion_mask"
    }
    return _trainer(ORPOTrainer if loss == "orpo" else CPOTrainer, model, **more).get_batch_loss_metrics(model, batch)[0]


def figures(loss: str) -> tuple[float, list[float]]:
    """TRL's loss, and its slope by each number of the model's table."""
    model, reference, settings = TransformersModel(0.0), TransformersModel(-0.4), CASES[loss]
    if loss == "kto":
        value = _kto_loss(model, reference, settings)
    elif loss in ("orpo", "simpo"):
        value = _loss_without_reference(model, loss, settings)
    else:
        value = _pair_loss(model, reference, loss, settings)
    value.backward()
    assert model.table.grad is not None
    return float(value.detach()), model.table.grad.flatten().tolist()


if __name__ == "__main__":
    for loss in CASES:
        value, slopes = figures(loss)
        print(f'    "{loss}": ({value:.10f}, [{", ".join(f"{slope:.8f}" for slope in slopes)}]),')
