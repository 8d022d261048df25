"""`shoal train` where a policy is to learn from feedback: one run after the other."""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.cli.options import LAYERS, load
from shoal.cli.running import train, weather_and_speeds
from shoal.config.load import Loaded, Override
from shoal.errors import ShoalError
from shoal.launch.phases import Phase, is_done, phases
from shoal.launch.starting import Asked, Plan, plan


def train_in_phases(made: Plan, arguments: argparse.Namespace, overrides: list[Override], argv: list[str]) -> int:
    """Train every phase that is not done yet; the exit code of the last."""
    root = _root(made, arguments)
    code = 0
    for number, phase in enumerate(phases(made.run, root, _command(arguments)), 1):
        folder = root / phase.name
        if is_done(folder):
            sys.stderr.write(f"phase {number}, {phase.name}: done already, in {folder}\n")
            continue
        sys.stderr.write(f"phase {number}, {phase.name}: {phase.why}\n")
        code = _train(phase, arguments, overrides, folder)
        if not is_done(folder):
            return code
    _tell_how_to_compare(made, root)
    return code


def _tell_how_to_compare(made: Plan, root: Path) -> None:
    """Say how to see what the policy has learned."""
    assert made.run.rlhf is not None
    before = next((str(root / name) for name in ("answers", "base") if (root / name).is_dir()), made.run.rlhf.policy)
    if before is not None:
        sys.stderr.write(f'what changed: shoal generate --compare {before} {root / "policy"} --prompt "…"\n')


def _root(made: Plan, arguments: argparse.Namespace) -> Path:
    if arguments.run_dir:
        root = Path(arguments.run_dir)
        if root.exists() and any(root.iterdir()) and not arguments.resume:
            raise ShoalError(f"{root} holds something already: add --resume to continue it, or choose another --run-dir")
        return root
    if arguments.resume:
        raise ShoalError("--resume of a run in phases needs its folder: add --run-dir")
    return Path(made.run.output_dir) / f"{time.strftime('%Y%m%d-%H%M%S')}-{made.run.name or 'rlhf'}"


def _command(arguments: argparse.Namespace) -> str:
    """What trains the base, as one would type it."""
    layers = [f"--{layer} {path}" for layer in LAYERS if layer != "rlhf_config" and (path := getattr(arguments, layer))]
    return " ".join(["shoal train", *arguments.files, *layers])


def _train(phase: Phase, arguments: argparse.Namespace, overrides: list[Override], folder: Path) -> int:
    """Train one phase, with the workers that the command asks for where the phase has some."""
    chosen = copy.copy(arguments)
    if phase.below_rlhf:
        chosen.rlhf_config = None

    def resolved(more: Sequence[Override]) -> Loaded:
        return load(chosen, [*overrides, *more, *phase.settings])

    asked = Asked(str(folder), (folder / "config.yaml").exists(), arguments.workers if phase.with_workers else None)
    made = plan(resolved, asked)
    return train(made, weather_and_speeds(arguments.netem, arguments.slowdown)) if phase.with_workers else train(made)
