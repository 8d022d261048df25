"""`shoal train`: trains a model, alone or with workers on this machine."""

from __future__ import annotations

import argparse

from shoal.cli.options import make_parser, parse
from shoal.config.ranks import rank_place
from shoal.errors import ShoalError


def run(argv: list[str]) -> int:
    parser = make_parser("train", "Train the model that a configuration describes, alone or with workers on this machine.")
    parser.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: a new one in output_dir)")
    parser.add_argument("--resume", action="store_true", help="resume the run in --run-dir, or the newest run with these settings")
    parser.add_argument("--workers", type=int, metavar="N", help="start a coordinator and N workers on this machine")
    parser.add_argument("--phase", metavar="NAME", help="with rlhf: train only this phase: base, answers, reward or policy")
    parser.add_argument(
        "--netem",
        metavar="WEATHER",
        help="simulate a network: good, cellular, satellite, degraded, brownout, or a rate: 50mbit",
    )
    parser.add_argument("--watch", action="store_true", help="show the run in the browser (see `shoal watch`)")
    parser.add_argument(
        "--slowdown", action="append", default=[], metavar="NAME=FACTOR", help="make a worker slower: w2=8 (may be repeated)"
    )
    arguments, overrides = parse(parser, argv)
    from shoal.cli.rlhf_phases import train_in_phases
    from shoal.cli.run_command import carry_out, goes_on_by_folder, planned, weather_and_speeds
    from shoal.launch.rlhf_phases import in_phases
    from shoal.launch.start_mode import StartOptions

    if rank_place() is not None:
        _refuse(arguments, "workers", "is for workers that Shoal starts here, and torchrun has started these: leave it out")
    plan = planned(arguments, overrides, StartOptions(arguments.run_dir, arguments.resume, arguments.workers, watch=arguments.watch))
    for option in ("netem", "slowdown"):
        if plan.torchrun is not None:
            _refuse(arguments, option, "is for workers that Shoal starts here, and torchrun has started these: leave it out")
        elif plan.run.alone:
            _refuse(arguments, option, "needs workers: add --workers N")
    if in_phases(plan.run) and not goes_on_by_folder(arguments):
        _refuse(arguments, "watch", "shows one run, and each of these phases is one: `shoal watch RUN…` shows them, also side by side")
        return train_in_phases(plan, arguments, overrides, argv)
    _refuse(arguments, "phase", "is for a task that learns from answers, which trains in phases (rlhf): leave it out")
    return carry_out(plan, argv, weather_and_speeds(arguments.netem, arguments.slowdown))


def _refuse(arguments: argparse.Namespace, option: str, why: str) -> None:
    if getattr(arguments, option):
        raise ShoalError(f"--{option} {why}")
