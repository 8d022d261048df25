"""Learning from feedback in phases, each a run with a folder of its own: a base where there is none, chosen answers, a reward model, the
policy.

A phase is the same configuration with a few settings on top. The base is trained with the layers below rlhf alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shoal.config import Run
from shoal.config.load import Override
from shoal.config.ranks import STRATEGY_ALONE
from shoal.config.schema.model import Moe
from shoal.config.schema.rlhf import FineTune, SumReward, TrainedReward
from shoal.errors import ShoalError
from shoal.runs.folder.phases import ANSWERS, BASE, POLICY, REWARD

_SMALL = 30_000_000
"""Parameters of a base that is trained first without being asked for. gpu/tiny has about 20 million, and takes some minutes on a CPU."""


class Phase(NamedTuple):
    """One run of several."""

    name: str
    why: str
    settings: tuple[Override, ...]
    below_rlhf: bool = False
    """Without the rlhf layer."""
    with_workers: bool = False


def in_phases(run: Run) -> bool:
    """Whether a run is the last of several phases."""
    return run.rlhf is not None and run.chosen_task.needs == "prompts"


def phases(run: Run, root: Path, command: str) -> Iterator[Phase]:
    """What is trained, one after the other, in folders below `root`. `command` is what trains the base, for people. Raises ShoalError."""
    assert run.rlhf is not None
    policy, reward = run.rlhf.policy, run.rlhf.reward
    start: list[Override] = []
    alone = (_set("strategy.kind", STRATEGY_ALONE),) if run.strategy.gives_answers else ()  # answers are for the policy's phase
    if policy is None and run.model.kind != "huggingface":
        refuse_large_base(run, command)
        yield Phase(
            BASE,
            "rlhf.policy is not given, and the model is small: its base is trained first",
            (_set("rlhf", "null"), _set("task.kind", "language-modelling"), *alone),
            below_rlhf=True,
        )
        start = [_set("rlhf.policy", str(root / BASE))]
    if run.rlhf.fine_tune is not None:
        answers = _of_pairs("language-modelling", run.rlhf.fine_tune, run.rlhf.fine_tune.preferences)
        yield Phase(ANSWERS, "the policy learns the chosen answers of the pairs", (*start, *answers, *alone))
        start = [_set("rlhf.policy", str(root / ANSWERS))]
    folders: list[str] = []
    for one in reward.untrained:
        assert one.preferences is not None  # a rule sees to that
        name = REWARD if not folders else f"{REWARD}-{len(folders) + 1}"
        yield Phase(name, "the reward model learns from the pairs", (*start, *_of_pairs("reward", one, one.preferences), *alone))
        folders.append(str(root / name))
    if folders:
        start += [_set("rlhf.reward.runs", json.dumps(folders)) if isinstance(reward, SumReward) else _set("rlhf.reward.run", *folders)]
    yield Phase(POLICY, f"the policy learns from its own answers ({run.rlhf.algorithm})", tuple(start), with_workers=not run.alone)


def _set(path: str, value: str) -> Override:
    return Override(path, value, f"--set {path}={value}")


def _of_pairs(task: str, learned: TrainedReward | FineTune, path: str) -> Iterator[Override]:
    """Settings of a phase that learns from pairs."""
    yield _set("task.kind", task)
    yield _set("data.source.kind", "preferences")
    yield _set("data.source.path", path)
    yield _set("training.epochs", str(learned.epochs))
    yield _set("training.max_steps", "null")
    yield _set("training.optimizer.kind", "torch")
    yield _set("training.optimizer.learning_rate", str(learned.learning_rate))
    yield _set("training.batch_size", str(learned.batch_size))


def refuse_large_base(run: Run, command: str) -> None:
    """Raises ShoalError where no base is given and to train one would take long: the user must decide that."""
    if run.model.kind == "huggingface" or (run.rlhf is not None and run.rlhf.policy is not None):
        return
    model = run.model
    width, layers = getattr(model, "hidden_size", 0), getattr(model, "num_layers", 0)
    inner = getattr(model, "intermediate_size", None) or 4 * width
    if isinstance(model, Moe):
        inner = (model.experts.intermediate_size or inner) * model.experts.count + (model.experts.shared_size or 0)
    size = layers * width * (4 * width + 3 * inner)  # roughly: the parameters in its blocks
    if size > _SMALL:
        raise ShoalError(
            f"rlhf.policy: there is no model to start from, and one of about {size / 1e6:,.0f} million parameters is not trained on the "
            f"side. Train it first: {command} --run-dir base; then add --set rlhf.policy=base"
        )


def is_done(folder: Path) -> bool:
    """Whether a phase's run was completed."""
    from shoal.runs.folder.run_reader import read_summary

    return read_summary(folder).get("status") in ("completed", "stopped early")
