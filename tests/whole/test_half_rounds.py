"""Workers that are killed in the middle of a round, and go on there. Real processes, as a user starts them; each counts its steps."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import plugins
from shoal.runs.folder.checkpoint import Checkpoints
from tests.support.eventually import eventually
from tests.support.processes import HANG_S, Command, Processes, processes_in, wait_for_line

CONFIG = """\
dialect: shoal
task: {kind: watched}
model: {kind: forgetful}
data: {source: {kind: builtin, name: digits}}
training: {max_steps: 60, batch_size: 8, device: cpu}
strategy: {kind: diloco, inner_steps: 20}
evaluation: {strategy: never}
checkpoint: {strategy: steps, every_steps: 6}
transport: {port: 0}
coordinator: {heartbeat_interval_s: 100.0}
cluster: {num_workers: 2}
"""
PLUGIN = ("--plugin", str(Path(__file__).parents[1] / "support" / "watched_task.py"))
STREAMING = ("--set", "strategy.fragments=2", "--set", "strategy.overlap_steps=3")
COLLECTIVES = ("--set", "engine.kind=collectives", "--set", "launch.devices_per_node=2")
SHARDED = ("--set", "engine.kind=fsdp", "--set", "launch.devices_per_node=2")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with processes_in(tmp_path) as made:
        yield made
    for plugin in list(plugins.LOADED.values()):
        plugins.unload(plugin)


def joined(processes: Processes, command: list[str], name: str, *settings: str) -> Command:
    *line, _, _ = command  # the plugin is in another folder than the line says
    return processes.start(*line, *PLUGIN, "--name", name, "--state", f"state-{name}", *settings)


def finished(process: Command) -> str:
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output
    return output


def steps_of(processes: Processes, name: str) -> int:
    """Steps that all lives of a worker have begun, from here on anew."""
    path = processes.folder / f"{name}.steps"
    steps = path.stat().st_size
    path.unlink()
    return steps


def weights_of(processes: Processes, run: str) -> dict[str, Tensor]:
    found = Checkpoints(processes.folder / run / "checkpoints", 1).newest(lambda text: None)
    assert found is not None
    return dict(found.weights)


def status_of(processes: Processes) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((processes.folder / "run" / "status.json").read_text())
    return status


def accepted_in(processes: Processes) -> int:
    """Contributions that the coordinator has taken."""
    return int(status_of(processes)["contributions"].get("accepted", 0))


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def undisturbed(processes: Processes, *settings: str, workers: int = 2, more: int = 0) -> dict[str, Tensor]:
    processes.here("train", "config.yaml", "--run-dir", "whole", "--workers", str(workers), *PLUGIN, *settings)
    for path in processes.folder.glob("*.steps"):
        assert 60 <= path.stat().st_size <= 60 + more, path.name
        path.unlink()
    return weights_of(processes, "whole")


@pytest.mark.parametrize(
    ("settings", "more", "dies", "kept", "told"),
    [
        ((), 0, 33, 30, "round 2, after step 10 of 20"),
        pytest.param(STREAMING, 3, 38, 36, "round 4, after step 6 of 10", marks=pytest.mark.long),
    ],
    ids=["plain", "streaming"],
)
def test_a_worker_that_is_killed_goes_on_in_the_middle_of_its_round(
    processes: Processes, settings: tuple[str, ...], more: int, dies: int, kept: int, told: str
) -> None:
    """A worker that streams goes on for three steps more at most, before it hears that the run is over."""
    expected = undisturbed(processes, *settings, more=more)
    coordinator, command = processes.coordinate(*PLUGIN, *settings)
    (processes.folder / "w2.wish").write_text(f"die {dies}")
    first, second = joined(processes, command, "w1"), joined(processes, command, "w2")
    assert second.wait(HANG_S) == -9
    assert f"going on in the middle of {told}" in finished(joined(processes, command, "w2"))
    finished(first)
    finished(coordinator)
    assert_equal(weights_of(processes, "run"), expected)
    assert 60 <= steps_of(processes, "w1") <= 60 + more
    assert 60 <= steps_of(processes, "w2") - dies + kept <= 60 + more, "what was kept of the round was not computed again"
    processes.audit("run")
    assert not list(processes.folder.glob("state-*/half-round")), "nothing is left of rounds that are over"


def test_a_run_of_which_all_processes_are_killed_goes_on_in_the_middle_of_the_round(processes: Processes) -> None:
    expected = undisturbed(processes)
    coordinator, command = processes.coordinate(*PLUGIN)
    for name, step in (("w1", 27), ("w2", 39)):
        (processes.folder / f"{name}.wish").write_text(f"wait {step}")
    workers = [joined(processes, command, name) for name in ("w1", "w2")]
    for worker, step in zip(workers, (27, 39), strict=True):
        wait_for_line(worker, f"waiting at step {step}")
    for process in (coordinator, *workers):
        process.kill()
        process.wait()
    coordinator, command = processes.coordinate(*PLUGIN, "--resume")
    workers = [joined(processes, command, name) for name in ("w1", "w2")]
    for worker, step in zip(workers, (4, 16), strict=True):
        assert f"going on in the middle of round 2, after step {step} of 20" in finished(worker)
    finished(coordinator)
    assert_equal(weights_of(processes, "run"), expected)
    assert [steps_of(processes, name) for name in ("w1", "w2")] == [27 + 60 - 24, 39 + 60 - 36]
    processes.audit("run")


@pytest.mark.long
def test_an_interrupted_run_goes_on_in_the_middle_of_the_round(processes: Processes) -> None:
    """One worker had sent what it learned in this round, the other one was at it."""
    expected = undisturbed(processes)
    coordinator, command = processes.coordinate(*PLUGIN)
    (processes.folder / "w2.wish").write_text("wait 39")
    first, second = joined(processes, command, "w1"), joined(processes, command, "w2")
    wait_for_line(second, "waiting at step 39")
    eventually(lambda: accepted_in(processes) == 3)  # both of round 1, and one of round 2
    coordinator.send_signal(signal.SIGINT)
    finished(first)
    second.kill()
    assert coordinator.wait(HANG_S) == 130
    coordinator, command = processes.coordinate(*PLUGIN, "--resume")
    workers = [joined(processes, command, name) for name in ("w1", "w2")]
    for worker, where in zip(workers, ("at the end of round 2, after step 20", "in the middle of round 2, after step 16"), strict=True):
        assert f"going on {where} of 20" in finished(worker)
    finished(coordinator)
    assert_equal(weights_of(processes, "run"), expected)
    assert [steps_of(processes, name) for name in ("w1", "w2")] == [60, 39 + 60 - 36]
    processes.audit("run")


@pytest.mark.long
@pytest.mark.parametrize("first", ["w1", "w2"])
def test_a_worker_killed_while_it_waits_for_others_does_not_repeat_the_round(processes: Processes, first: str) -> None:
    """What it sent was taken. It waits for the others again, or begins the next round, with its optimizer as it was at the end."""
    expected = undisturbed(processes)
    coordinator, command = processes.coordinate(*PLUGIN)
    (processes.folder / "w2.wish").write_text("wait 39")
    workers = {name: joined(processes, command, name) for name in ("w1", "w2")}
    wait_for_line(workers["w2"], "waiting at step 39")
    eventually(lambda: accepted_in(processes) == 3)  # both of round 1, and its own of round 2
    for worker in workers.values():
        worker.kill()
        worker.wait()
    words = {"w1": "going on at the end of round 2, after step 20 of 20", "w2": "going on in the middle of round 2, after step 16 of 20"}
    if first == "w2":
        words["w1"] = "going on after round 2, which this worker had finished"
    for name in (first, "w1" if first == "w2" else "w2"):
        workers[name] = joined(processes, command, name)
        wait_for_line(workers[name], words[name])
        if name == "w2":  # now the round ends
            eventually(lambda: status_of(processes)["version"] >= 2)
    for process in (*workers.values(), coordinator):
        finished(process)
    assert_equal(weights_of(processes, "run"), expected)
    assert [steps_of(processes, name) for name in ("w1", "w2")] == [60, 39 + 60 - 36]
    processes.audit("run")


@pytest.mark.long
@pytest.mark.parametrize("settings", [COLLECTIVES, SHARDED], ids=["collectives", "fsdp"])
def test_a_worker_of_several_processes_goes_on_in_the_middle_of_its_round(processes: Processes, settings: tuple[str, ...]) -> None:
    """One of its processes is killed; all of them are started again, and each has kept its part."""
    expected = undisturbed(processes, *settings, workers=1)
    (processes.folder / "w11.wish").write_text("die 33")
    processes.here("train", "config.yaml", "--run-dir", "run", "--workers", "1", *PLUGIN, *settings)
    assert "going on in the middle of round 2, after step 10 of 20" in (processes.folder / "run" / "workers" / "w1.log").read_text()
    assert_equal(weights_of(processes, "run"), expected)
    assert steps_of(processes, "w11") == 33 + 60 - 30
    processes.audit("run")


def test_a_half_round_that_is_damaged_is_named_and_the_round_is_begun_again(processes: Processes) -> None:
    coordinator, command = processes.coordinate(*PLUGIN, "--set", "cluster.num_workers=1")
    (processes.folder / "w1.wish").write_text("die 33")
    assert joined(processes, command, "w1").wait(HANG_S) == -9
    (weights,) = processes.folder.glob("state-w1/half-round/step-00000030/weights.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    said = finished(joined(processes, command, "w1"))
    assert "step-00000030 is damaged: weights.safetensors does not match its checksum; it is deleted, and the round starts again" in said
    assert "in the middle" not in said
    finished(coordinator)
    assert steps_of(processes, "w1") == 33 + 60 - 20


def test_a_half_round_of_other_settings_or_another_round_is_of_no_use(processes: Processes) -> None:
    coordinator, command = processes.coordinate(*PLUGIN, "--set", "cluster.num_workers=1")
    (processes.folder / "w1.wish").write_text("die 33")
    assert joined(processes, command, "w1").wait(HANG_S) == -9
    shutil.copytree(processes.folder / "state-w1" / "half-round", processes.folder / "kept")
    (processes.folder / "w1.wish").write_text("die 57")
    other = joined(processes, command, "w1", "--set", "training.device=auto")
    said, _ = other.communicate(timeout=HANG_S)
    useless = "the partial round that this worker saved (10 of 20 steps of round 2) cannot be resumed: "
    assert f"{useless}settings have changed; it is deleted" in said
    shutil.rmtree(processes.folder / "state-w1" / "half-round")
    shutil.copytree(processes.folder / "kept", processes.folder / "state-w1" / "half-round")
    assert f"{useless}the run is at round 3; it is deleted" in finished(joined(processes, command, "w1"))
    finished(coordinator)
