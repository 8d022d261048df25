"""The losses of preference optimization and their gradients, against figures that TRL 1.12.0's own trainers gave in float64: `DPOTrainer`,
`KTOTrainer`, `experimental.orpo` and `experimental.cpo` (`simpo`, `cpo_alpha` 0). `python -m tests.support.trl_losses` prints them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import Run
from shoal.config.schema.task import Dpo as Settings
from shoal.tasks import MetricMeans
from shoal.tasks.answer_logprobs import Reference
from shoal.tasks.dpo import build
from tests.support.trl_losses import CASES, CHOSEN, LABELS, PROMPTS, REJECTED, SmallModel, columns, turned

FIGURES: dict[str, tuple[float, list[float]]] = {
    "sigmoid": (
        0.6851991554,
        [
            *[0.00000000, 0.00000000, 0.00000000, -0.01275336, 0.00189721, 0.01117433, -0.02307312, 0.01421871],
            *[0.01123898, -0.00118930, -0.00315001, 0.00381103, -0.00282077, 0.00182500, 0.00130183, -0.02874275],
            *[0.01982611, 0.01224160, -0.01585424, 0.02325675, -0.00350221, 0.00000000, 0.00000000, 0.00000000],
        ],
    ),
    "ipo": (
        2.6940143353,
        [
            *[0.00000000, 0.00000000, 0.00000000, -0.15189492, 0.05749368, 0.10404330, -0.24330015, 0.17571782],
            *[0.09705132, -0.07529801, 0.02060972, 0.05814467, -0.08750096, 0.05782152, 0.03937647, -0.33904607],
            *[0.23294062, 0.14517106, -0.04340829, 0.26089322, -0.17373149, 0.00000000, 0.00000000, 0.00000000],
        ],
    ),
    "hinge": (
        0.9834460449,
        [
            *[0.00000000, 0.00000000, 0.00000000, -0.02465374, 0.00276104, 0.02235574, -0.04580404, 0.02822020],
            *[0.02231654, -0.00218957, -0.00638512, 0.00750387, -0.00543492, 0.00351128, 0.00251250, -0.05699951],
            *[0.03931950, 0.02427414, -0.03345645, 0.04911154, -0.00741878, 0.00000000, 0.00000000, 0.00000000],
        ],
    ),
    "robust": (
        0.6831299110,
        [
            *[0.00000000, 0.00000000, 0.00000000, -0.01583508, 0.00224234, 0.01396879, -0.02879862, 0.01774624],
            *[0.01402855, -0.00146300, -0.00394815, 0.00474902, -0.00350014, 0.00226391, 0.00161589, -0.03586769],
            *[0.02474105, 0.01527587, -0.02003629, 0.02939569, -0.00442955, 0.00000000, 0.00000000, 0.00000000],
        ],
    ),
    "kto": (
        0.5785442943,
        [
            *[0.00000000, 0.00000000, 0.00000000, 0.01007284, -0.01636977, 0.00355161, 0.00479501, -0.00863260],
            *[0.00238985, 0.01038821, -0.00995708, -0.00210099, 0.00917135, -0.00624637, -0.00397253, 0.00133555],
            *[-0.00089219, -0.00059298, -0.02513359, 0.02261761, 0.00630910, 0.00000000, 0.00000000, 0.00000000],
        ],
    ),
    "orpo": (
        2.3134330401,
        [
            *[0.00000000, 0.00000000, 0.00000000, 0.00278862, -0.03877045, 0.02947977, 0.00337078, -0.01780606],
            *[0.01144909, 0.05348770, -0.08875475, 0.02038232, 0.02313185, -0.02795070, 0.00013134, -0.02721674],
            *[0.01847006, 0.01184422, -0.07703442, 0.08214061, 0.00866931, 0.00000000, 0.00000000, 0.00000000],
        ],
    ),
    "simpo": (
        0.7961195446,
        [
            *[0.00000000, 0.00000000, 0.00000000, -0.02918995, 0.00245910, 0.02714325, -0.05934069, 0.04286331],
            *[0.02366583, -0.01776898, 0.00460745, 0.01393423, -0.02075300, 0.01370694, 0.00934480, -0.08226394],
            *[0.05652925, 0.03521501, -0.01738118, 0.09570372, -0.06227242, 0.00000000, 0.00000000, 0.00000000],
        ],
    ),
}
"""The loss, and its slopes by the model's table."""


def side(prompts: Any, answers: Any, name: str = "") -> dict[str, Tensor]:
    """The columns of answers, of which a label is the token that follows."""
    found = columns(prompts, answers)
    return {
        f"{name}input_ids": found["input_ids"][:, :-1],
        f"{name}labels": found["labels"][:, 1:],
        f"{name}attention_mask": found["attention_mask"][:, 1:].bool(),
    }


def batch_for(loss: str) -> dict[str, Tensor]:
    if loss == "kto":
        return {"desirable": torch.tensor(LABELS)} | side(PROMPTS, CHOSEN) | side(PROMPTS, turned(CHOSEN), "kl_")
    return side(PROMPTS, CHOSEN, "chosen_") | side(PROMPTS, REJECTED, "rejected_")


def task_for(loss: str, shift: float = 0.0) -> Any:
    """The task of a model that was initialised otherwise than it is now."""
    task: Any = build(Settings(loss=loss, **CASES[loss]), Run(), {"model": SmallModel(-0.4)}, None)  # type: ignore[arg-type]
    task.players["model"].load_state_dict(SmallModel(shift).state_dict())
    return task


@pytest.mark.parametrize("loss", list(CASES))
def test_losses_and_gradients_are_those_of_trl(loss: str) -> None:
    task = task_for(loss)
    (found,) = task.losses(batch_for(loss))
    value, slopes = FIGURES[loss]
    assert float(found.value.detach()) == pytest.approx(value, abs=1e-6)
    found.value.backward()
    assert task.players["model"].table.grad.flatten().tolist() == pytest.approx(slopes, abs=1e-6)
    assert loss != "kto" or float(found.metrics["kl"]) > 0.01


@pytest.mark.parametrize("loss", list(CASES))
def test_only_losses_that_compare_with_the_initial_model_keep_a_copy_of_it(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("shoal.tasks.dpo.Reference", lambda model: made.append(model) or Reference(model))
    task = task_for(loss)
    assert len(made) == (loss not in ("orpo", "simpo"))
    assert hasattr(task, "reference") == bool(made)


def test_processes_that_step_together_use_the_mean_of_their_divergences() -> None:
    task = task_for("kto")
    (alone,) = task.losses(batch_for("kto"))
    other = torch.tensor([0.5, 1.0], dtype=torch.float64)
    task.join_processes(lambda values: values + other)
    (together,) = task.losses(batch_for("kto"))
    assert float(together.metrics["kl"]) == pytest.approx((float(alone.metrics["kl"]) + 0.5) / 2)


@torch.no_grad()
def test_figures_of_good_and_of_bad_answers_are_means_over_those_alone() -> None:
    """A batch may have none of them, and batches have different numbers of them."""
    task, means, batch = task_for("kto"), MetricMeans(), batch_for("kto")
    for rows in ([0], [1, 2], [0, 2]):
        some = {name: value[rows] for name, value in batch.items()}
        means.add(task.measure(some), task.count(some))
    names = ("chosen_reward/desirable_share", "rejected_reward/undesirable_share", "chosen_reward/desirable_share")
    rewards = [float(task.measure({key: value[[row]] for key, value in batch.items()})[name]) for row, name in enumerate(names)]
    found = means.result()
    assert found["chosen_reward"] == pytest.approx((2 * rewards[0] + 2 * rewards[2]) / 4)
    assert found["rejected_reward"] == pytest.approx(rewards[1])
    assert found["desirable_share"] == pytest.approx(4 / 5)
    assert not any("/" in name for name in found)
    only_good = {name: value[[0]] for name, value in batch.items()}
    assert "rejected_reward" not in task.evaluate([only_good])
