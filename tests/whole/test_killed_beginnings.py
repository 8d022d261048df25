"""Runs that are killed before they have learned anything, and the same command again. Real processes, as a user starts them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import HANG_S, Command, Processes, processes_in, wait_for_line

PLUGIN = ("--plugin", str(Path(__file__).parents[1] / "support" / "watched_task.py"))
CONFIG = """\
dialect: shoal
task: {kind: watched}
model: {kind: forgetful}
data: {source: {kind: builtin, name: digits}}
training: {max_steps: 4, batch_size: 8, device: cpu}
evaluation: {strategy: never}
logging: {every_steps: 1}
"""
ENDLESS = (
    "--workers",
    "1",
    "--set",
    "training.max_steps=10000000",
    "--set",
    "strategy.kind=diloco",
    "--set",
    "strategy.inner_steps=10000000",
)
ANEW = "run held a run that was killed before it had learned anything: it is begun anew"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with processes_in(tmp_path) as made:
        yield made


def started(processes: Processes, *more: str) -> Command:
    return processes.start("train", "config.yaml", "--run-dir", "run", *PLUGIN, *more)


def waiting_at(processes: Processes, step: int) -> Command:
    """A run whose process waits in a step."""
    (processes.folder / "alone.wish").write_text(f"wait {step}")
    run = started(processes)
    wait_for_line(run, f"waiting at step {step}")
    return run


def end(run: Command) -> tuple[int, str]:
    output, _ = run.communicate(timeout=HANG_S)
    return run.wait(), output


def test_a_run_killed_in_its_first_step_is_begun_anew_and_a_running_one_is_not(processes: Processes) -> None:
    run = waiting_at(processes, 1)
    (processes.folder / "run" / "notes.txt").write_text("mine")
    code, output = end(started(processes))
    assert (code, "run holds a run already: add --resume" in output) == (2, True), output
    run.kill()
    run.wait()
    code, output = end(started(processes))
    assert (code, ANEW in output) == (0, True), output
    assert json.loads((processes.folder / "run" / "summary.json").read_text())["steps"] == 4
    assert (processes.folder / "run" / "notes.txt").exists(), "files of others stay"
    assert end(started(processes))[0] == 2


def test_a_run_that_was_killed_when_it_had_learned_is_not_begun_anew(processes: Processes) -> None:
    run = waiting_at(processes, 3)
    run.kill()
    run.wait()
    code, output = end(started(processes))
    assert (code, "run holds a run already: add --resume" in output) == (2, True), output
    assert (processes.folder / "run" / "metrics.jsonl").read_text()


def test_a_run_with_workers_that_was_killed_before_any_contribution_is_begun_anew(processes: Processes) -> None:
    for expects_a_word in (False, True):
        run = started(processes, *ENDLESS)
        if expects_a_word:
            wait_for_line(run, ANEW)
        wait_for_line(run, "w1 joined")
        if not expects_a_word:
            run.kill()
            run.wait()
    run.send_signal(signal.SIGINT)
    assert end(run)[0] == 130
