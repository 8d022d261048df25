"""`shoal train` with rlhf: trains the phases, each as a separate run."""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.cli.options import base_command, load
from shoal.cli.run_command import carry_out, weather_and_speeds
from shoal.config.load import LoadedConfig, Override
from shoal.config.missing_parts import missing_files
from shoal.config.problems import ConfigError
from shoal.config.ranks import rank_place
from shoal.errors import ShoalError
from shoal.launch.rlhf_phases import Phase, is_done, phases
from shoal.launch.start_mode import StartOptions, StartPlan, plan_start
from shoal.runs.folder.phases import ANSWERS, BASE, POLICY


def train_in_phases(plan: StartPlan, arguments: argparse.Namespace, overrides: list[Override], argv: list[str]) -> int:
    """Train every phase that is not done yet; returns the last exit code. What a later phase refuses is refused before the first starts."""
    root = _root(plan, arguments)
    all_phases = list(phases(plan.run, root, base_command(arguments)))
    _check_phase(arguments.phase, [phase.name for phase in all_phases])
    asked = [phase for phase in all_phases if arguments.phase in (None, phase.name)]
    plans = {phase.name: _plan_phase(phase, arguments, overrides, root / phase.name) for phase in asked if not is_done(root / phase.name)}
    if len(plans) > 1:
        _check_pairs(plans)
    code, speaks = 0, plan.here is None or (plan.here.rank == 0 and not plan.here.file)
    for number, phase in enumerate(all_phases, 1):
        folder = root / phase.name
        if phase not in asked:
            continue
        if phase.name not in plans:
            _print(f"phase {number}, {phase.name}: done already, in {folder}", speaks)
            continue
        _print(f"phase {number}, {phase.name}: {phase.why}", speaks)
        workers = weather_and_speeds(arguments.netem, arguments.slowdown) if phase.with_workers else weather_and_speeds(None, ())
        code = carry_out(plans[phase.name], [*argv, "--run-dir", str(root), "--phase", phase.name], workers)
        if not is_done(folder):
            return code
    if speaks and is_done(root / POLICY):
        _print_comparison(plan, root)
    return code


def _check_pairs(plans: Mapping[str, StartPlan]) -> None:
    """Raise ShoalError where the pairs of a phase do not make one batch: an earlier phase may take hours."""
    from shoal.runs.build_run import check_batches

    for name, plan in plans.items():
        if plan.run.chosen_task.needs != "prompts" and name != BASE:
            try:
                check_batches(plan.run)
            except ShoalError as error:
                raise ShoalError(f"phase {name}: {error}") from None


def _check_phase(asked: str | None, names: Sequence[str]) -> None:
    """Raise ShoalError for an unknown phase, or if torchrun's processes, which train one phase, have no --phase."""
    if asked is not None and asked not in names:
        raise ShoalError(f"--phase: there is no `{asked}` in this training; there are {', '.join(names)}")
    if asked is None and len(names) > 1 and rank_place() is not None:
        raise ShoalError(f"torchrun's processes train one phase: start them for each of {', '.join(names)}, with --run-dir and --phase")


def _print(text: str, speaks: bool) -> None:
    if speaks:
        sys.stderr.write(f"{text}\n")


def _print_comparison(plan: StartPlan, root: Path) -> None:
    """Print the command that compares base and policy."""
    assert plan.run.rlhf is not None
    before = next((str(root / name) for name in (ANSWERS, BASE) if (root / name).is_dir()), plan.run.rlhf.policy)
    if before is not None:
        sys.stderr.write(f'what changed: shoal generate --compare {before} {root / POLICY} --prompt "…"\n')


def _root(plan: StartPlan, arguments: argparse.Namespace) -> Path:
    if arguments.run_dir:
        root = Path(arguments.run_dir)
        if root.exists() and any(root.iterdir()) and not arguments.resume and arguments.phase is None:
            raise ShoalError(f"{root} holds something already: add --resume to continue it, or choose another --run-dir")
        return root
    if arguments.resume:
        raise ShoalError("--resume of a run in phases needs its folder: add --run-dir")
    if rank_place() is not None:
        raise ShoalError("torchrun's processes must agree on the folder of a run in phases: add --run-dir")
    return Path(plan.run.output_dir) / f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.run.name or 'rlhf'}"


def _plan_phase(phase: Phase, arguments: argparse.Namespace, overrides: list[Override], folder: Path) -> StartPlan:
    """How one phase starts, with workers if it can use them. Raises ConfigError or ShoalError where it cannot."""
    chosen = copy.copy(arguments)
    if phase.below_rlhf:
        chosen.rlhf_config = None

    def resolved(more: Sequence[Override]) -> LoadedConfig:
        return load(chosen, [*overrides, *more, *phase.settings])

    asked = StartOptions(str(folder), (folder / "config.yaml").exists(), arguments.workers if phase.with_workers else None)
    plan = plan_start(resolved, asked)
    if problems := missing_files(plan.loaded, severity="error"):
        raise ConfigError(problems)
    return plan
