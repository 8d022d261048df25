"""`shoal up`: starts a coordinator and all its workers, as launch.kind says."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import add_listening_options, load, make_parser, parse, require
from shoal.config.load import Override
from shoal.errors import ShoalError
from shoal.files import make_folder, open_file, write_file
from shoal.process_title import set_title

if TYPE_CHECKING:
    from shoal.launch.batch_scripts import BatchScript
    from shoal.launch.start_mode import StartPlan

_WHAT = """Start a coordinator here and all its workers as launch.kind says (local, ssh, ray), and return; or write files for Slurm or
Kubernetes. `shoal down RUN` ends the run."""
_LOG = "up.log"
_STDIN = "--stdin"
"""The process in the background reads its arguments from standard input: one may be a secret, and other users see a command line."""
_POLL_INTERVAL_S = 0.1
_OPEN_S = 1800.0
"""Time limit for the coordinator to start listening and to try all machines; it may download data, and install a wheel on them."""


def run(argv: list[str]) -> int:
    warns = argv != [_STDIN]  # else the process that started this one has printed the warnings
    if not warns:
        argv = json.loads(sys.stdin.readline())
        set_title([sys.executable, "-m", "shoal", "up", *argv])
    parser = make_parser("up", _WHAT)
    parser.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: a new one in output_dir)")
    parser.add_argument("--resume", action="store_true", help="resume the run in --run-dir")
    parser.add_argument("--workers", type=int, metavar="N", help="number of workers (default: those of the configuration)")
    parser.add_argument(
        "--num_nodes", "--num-nodes", type=int, metavar="N", help="number of machines: one worker each, or one engine over all"
    )
    parser.add_argument("--num_gpus", "--num-gpus", metavar="N", help="GPUs of each machine (launch.devices_per_node)")
    add_listening_options(parser)
    parser.add_argument("--foreground", action="store_true", help="stay in the terminal; Ctrl-C ends everything")
    arguments, overrides = parse(parser, argv)
    if arguments.resume and not arguments.run_dir:
        raise ShoalError("--resume: say which run goes on, with --run-dir DIR")
    overrides += _counts(arguments, overrides)
    plan = _planned(arguments, overrides, warns=warns)
    folder = Path(arguments.run_dir or Path(plan.run.output_dir) / f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.run.name or 'up'}")
    if plan.run.launch.written:
        return _write(plan, folder, arguments)
    if arguments.foreground:
        return _stay(arguments, overrides, folder, argv)
    return _leave_running(plan, folder, argv, bool(arguments.run_dir))


def _counts(arguments: argparse.Namespace, overrides: list[Override]) -> list[Override]:
    """Number of machines and GPUs, as settings."""
    given = [Override("launch.devices_per_node", arguments.num_gpus, f"--num_gpus {arguments.num_gpus}")] if arguments.num_gpus else []
    if arguments.num_nodes is None or arguments.resume:
        return given
    if not require(load(arguments, [*overrides, *given])).run.alone:
        arguments.workers = arguments.workers or arguments.num_nodes
        return given
    return [*given, Override("launch.nodes", str(arguments.num_nodes), f"--num_nodes {arguments.num_nodes}")]


def _planned(arguments: argparse.Namespace, overrides: list[Override], *, warns: bool) -> StartPlan:
    from shoal.cli.run_command import coordinator_options, planned

    return planned(arguments, overrides, coordinator_options(arguments, up=True), warns=warns)


# --- for other schedulers ------------------------------------------------------------------------------


def _write(plan: StartPlan, folder: Path, arguments: argparse.Namespace) -> int:
    """Write the script or the manifests, and print how to use them."""
    from shoal.launch import batch_scripts

    if arguments.public_address:
        raise ShoalError(f"--public-address: launch.kind {plan.run.launch.kind} gives its workers the address itself; leave it out")
    if (folder / "config.yaml").exists():
        raise ShoalError(f"{folder} holds something already: choose another --run-dir")
    run, count = plan.run, arguments.workers or plan.run.cluster.num_workers or plan.run.launch.nodes
    if not count:
        raise ShoalError("the number of machines is missing: add --num_nodes N, or --workers N")
    make_folder(folder)
    folder = folder.absolute()
    config = folder / "config.yaml"
    write_file(config, _settings(plan))
    writer = batch_scripts.slurm if run.launch.kind == "slurm" else batch_scripts.kubernetes
    _show(writer(run, run.name or folder.name, folder, config, count))
    return 0


def _settings(plan: StartPlan) -> str:
    """The whole configuration as one file. Secrets come from the environment again."""
    from shoal.config.fields import as_data
    from shoal.config.show import resolved_text

    return resolved_text(as_data(plan.run, mask=None))


def _show(written: BatchScript) -> None:
    write_file(written.path, written.text, private=True)
    print(f"wrote {written.path}\nstart it with:\n  {written.start}\nend it with:\n  {written.end}")


# --- from here -----------------------------------------------------------------------------------------


def _stay(arguments: argparse.Namespace, overrides: list[Override], folder: Path, argv: list[str]) -> int:
    """Coordinate in this process until the run ends."""
    from shoal.cli.run_command import carry_out
    from shoal.launch.up_file import written_while_up

    arguments.run_dir = str(folder)
    plan = _planned(arguments, overrides, warns=False)  # they are printed already
    with written_while_up(folder):
        return carry_out(plan, argv)


def _leave_running(plan: StartPlan, folder: Path, argv: list[str], named: bool) -> int:
    """Start a background process, wait until workers can join, and return."""
    from shoal.launch.forkserver import OpenedProcess, write_line
    from shoal.launch.ray_workers import require_ray
    from shoal.launch.start_mode import StartMode
    from shoal.launch.up_file import running_process, unfit_workers

    if plan.run.launch.kind == "ray":
        require_ray()
    if running_process(folder) is not None:
        raise ShoalError(f"{folder} is up already: `shoal down {folder}` ends it")
    make_folder(folder)
    log = folder / _LOG
    spoken = log.stat().st_size if log.exists() else 0
    arguments = [*argv, *([] if named else ["--run-dir", str(folder)]), "--foreground"]
    with open_file(log, "ab", private=True) as stream:
        command = [sys.executable, "-m", "shoal", "up", _STDIN]
        process = OpenedProcess(command, stdin=subprocess.PIPE, stdout=stream, stderr=stream, start_new_session=True)
    with suppress(OSError):  # it has ended, which is noticed below
        write_line(process, json.dumps(arguments))
        process.stdin.close()
    until, unfit = time.monotonic() + _OPEN_S, None
    coordinates = plan.mode is StartMode.COORDINATES  # else machines join a pipeline by themselves
    while process.poll() is None and time.monotonic() < until:
        unfit = unfit_workers(folder) if coordinates else {} if b"shoal join " in log.read_bytes()[spoken:] else None
        if unfit is not None:
            break
        time.sleep(_POLL_INTERVAL_S)
    if process.poll() not in (None, 0):
        sys.stderr.write(log.read_bytes()[spoken:].decode(errors="replace"))
        _remove_unbegun(folder, log)
        return process.poll() or 1
    where = os.path.relpath(folder)
    count = plan.workers - len(unfit or ())
    print(f"{count} worker{'s are' if count != 1 else ' is'} being started ({plan.run.launch.kind}); their logs are in {where}/workers")
    print(f"see it:       shoal status {where}\nwhat it says: {where}/{_LOG}\nend it:       shoal down {where}")
    return _report_unfit(unfit, plan.workers, where) if unfit else 0


def _remove_unbegun(folder: Path, log: Path) -> None:
    """Remove the folder of a run that did not begin: nothing but this log is in it."""
    with suppress(OSError):
        if list(folder.iterdir()) == [log]:
            log.unlink()
            folder.rmdir()


def _report_unfit(unfit: Mapping[str, str], workers: int, where: str) -> int:
    """Say which machines cannot work, and what to do; returns the exit code."""
    reasons = "\n".join(f"  {reason}" for reason in unfit.values())
    sys.stderr.write(f"error: {len(unfit)} of {workers} workers cannot work; the run is up without them:\n{reasons}\n")
    sys.stderr.write(f"when these machines are ready: shoal down {where} && shoal up --run-dir {where} --resume\n")
    return 2
