"""Islands: workers of several processes, under a strategy between workers. Real processes, as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.launch import forkserver
from shoal.runs.folder.checkpoint import Checkpoints
from shoal.transports.addresses import free_port
from tests.support.eventually import eventually
from tests.support.processes import HANG_S, Processes, processes_in, wait_for_line

CONFIG = """\
dialect: shoal
model: {kind: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, max_seq_len: 16, dropout: 0.0}
data: {source: {kind: text, path: text.txt}, tokenizer: characters}
training: {max_steps: 12, batch_size: 6, device: cpu, clipping: {max_norm: 1.0}}
evaluation: {strategy: never}
checkpoint: {strategy: steps, every_steps: 4, keep_last: 9}
logging: {every_steps: 1}
transport: {port: 0}
launch: {devices_per_node: 2}
coordinator: {heartbeat_interval_s: 100.0}
"""
"""Nobody who is silent for some seconds is taken for dead: rounds would close without them, and lead to other numbers."""
DILOCO = ["--set", "strategy.kind=diloco", "--set", "strategy.inner_steps=4"]
PLAIN = [*DILOCO, "--set", "strategy.outer.learning_rate=1.0", "--set", "strategy.outer.momentum=0.0"]
"""With one worker this is plain training: the outer step is the inner ones."""
FOR_EVER = ["--set", "training.max_steps=1000000", "--set", "training.epochs=100000"]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with prepared(tmp_path) as made:
        yield made


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[Processes]:
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    with processes_in(folder) as made:
        yield made


def trained(processes: Processes, run: str, *settings: str) -> dict[str, Tensor]:
    """The weights at the end of a run."""
    processes.here("train", "config.yaml", "--run-dir", run, *settings)
    return weights_of(processes.folder / run)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)


def titles_in(folder: Path) -> dict[int, str]:
    """What `ps` shows of each process that was started in a folder."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cwd").resolve() == folder.resolve():
                found[int(path.name)] = (path / "cmdline").read_text(errors="replace")
    return found


def ranks_in(folder: Path) -> list[int]:
    """Processes of islands, those that do not speak for theirs, in the order they were started."""
    return sorted(pid for pid, title in titles_in(folder).items() if "[rank 1]" in title)


@contextlib.contextmanager
def held_up(folder: Path, rank: int) -> Iterator[None]:
    """Whoever starts the processes of an island again, of which this is one, does not do so meanwhile."""
    titles = titles_in(folder)
    name = titles[rank].partition("--name ")[2].split()[0]
    (leader,) = (pid for pid, title in titles.items() if f"--name {name} " in title and "[rank " not in title)
    os.kill(leader, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(leader, signal.SIGCONT)


def steps_in(run: Path) -> int:
    """Outer steps that are on record."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_one_island_that_is_its_own_mean_is_plain_training(processes: Processes, engine: str) -> None:
    settings = ["--set", f"engine.kind={engine}"]
    alone = trained(processes, "alone", *settings)
    island = trained(processes, "island", *settings, *PLAIN, "--workers", "1")
    assert_same(alone, island, 0.0)
    summary = json.loads((processes.folder / "island" / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (3, 12 * 6 * 2)
    if engine == "fsdp":  # the gradient is gathered from where it is sharded, and the weights go back there
        assert_same(alone, trained(processes, "syncps", *settings, "--set", "strategy.kind=syncps", "--workers", "1"), 1e-6)


@pytest.mark.parametrize("engine", ["ddp", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_a_worker_may_bring_more_devices_than_others(processes: Processes, engine: str) -> None:
    """A run of single processes, and a volunteer with two devices and an engine of its own."""
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    coordinator, command = processes.coordinate("--set", "launch.devices_per_node=null", "--set", "strategy.kind=async")
    volunteer = processes.start(*command, "--name", "mia", "--set", f"engine.kind={engine}", "--set", "launch.devices_per_node=2")
    output, _ = coordinator.communicate(timeout=HANG_S)
    assert coordinator.returncode == 0, output
    said, _ = volunteer.communicate(timeout=HANG_S)
    assert volunteer.returncode == 0, said
    assert "mia: 12 contributions accepted" in said
    summary = json.loads((processes.folder / "run" / "summary.json").read_text())
    assert summary["samples"] == 12 * 6 * 2


def test_an_island_that_loses_a_process_comes_back_and_the_others_never_stop(processes: Processes) -> None:
    settings = ["--set", "engine.kind=ddp", *PLAIN, *FOR_EVER, "--set", "strategy.round_timeout_s=2"]
    run = processes.start("train", "config.yaml", "--run-dir", "run", "--workers", "2", *settings)
    receipts = processes.folder / "run" / "workers" / "w2.jsonl"
    eventually(lambda: receipts.exists() and receipts.stat().st_size)
    first, _ = ranks_in(processes.folder)
    with held_up(processes.folder, first):
        os.kill(first, signal.SIGKILL)
        died = steps_in(processes.folder / "run")
        eventually(lambda: steps_in(processes.folder / "run") > died + 1)  # the other one goes on, beyond what the island may have sent
    wait_for_line(run, r"w\d (joined|came back)")  # the island, again
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=HANG_S)
    assert run.returncode == 130, output
    logs = [path.read_text() for path in (processes.folder / "run" / "workers").glob("*.log")]
    assert sum("starting all again" in log for log in logs) == 1
    eventually(lambda: not ranks_in(processes.folder))  # none is left behind, also of an island that was ended because it took its time
    processes.audit("run")


# --- collectives -----------------------------------------------------------------------------------------

COLLECTIVES = ["--set", "engine.kind=collectives"]


def test_collectives_with_one_step_a_round_are_one_process_with_the_combined_batch(processes: Processes) -> None:
    """The mean of weights after a step of plain SGD is a step along the mean of the gradients."""
    sgd = ["--set", "training.optimizer.name=SGD", "--set", "training.optimizer.learning_rate=0.1"]
    sgd += ["--set", "training.clipping.enabled=false"]
    alone = trained(processes, "alone", *sgd, "--set", "training.batch_size=12")
    each_step = [*PLAIN, "--set", "strategy.inner_steps=1", *COLLECTIVES]
    together = trained(processes, "together", *sgd, *each_step)
    assert_same(together, alone, 1e-6)
    processes.audit("together")


@pytest.fixture(scope="module")
def over_collectives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What two processes learn over collectives, in one go."""
    with prepared(tmp_path_factory.mktemp("collectives")) as processes:
        weights = trained(processes, "whole", *DILOCO, *COLLECTIVES)
        assert summary_of(processes.folder / "whole")["samples"] == 12 * 6 * 2
        return weights


@pytest.mark.long
def test_collectives_go_on_with_the_very_optimizers_they_had(processes: Processes, over_collectives: dict[str, Tensor]) -> None:
    """Each process has an optimizer of its own, and keeps it: a run in two parts is a run in one."""
    settings = [*DILOCO, *COLLECTIVES]
    trained(processes, "part", *settings, "--set", "training.max_steps=8")
    start = ["--set", f"checkpoint.resume_from={processes.folder / 'part'}"]
    rest = trained(processes, "rest", *settings, *start)
    assert_same(rest, over_collectives, 0.0)


# --- started by torchrun -------------------------------------------------------------------------------


@contextlib.contextmanager
def torchrun(folder: Path, *arguments: str, log: str = "torchrun.log") -> Iterator[forkserver.ChildProcess]:
    command = ["-m", "torch.distributed.run", "--monitor-interval", "0.2", *arguments]
    with (folder / log).open("w") as file:
        started = forkserver.start(command, cwd=folder, stdout=file.fileno(), stderr=file.fileno())
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait()


def weights_of(run: Path) -> dict[str, Tensor]:
    found = Checkpoints(run / "checkpoints", 1).newest(lambda text: None)
    assert found is not None
    return dict(found.weights)


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


HERE = ("--nproc-per-node", "2", "--standalone", "--max-restarts", "1")


@pytest.mark.long
def test_torchrun_starts_the_processes_of_an_island(processes: Processes) -> None:
    coordinator, command = processes.coordinate("--set", "engine.kind=fsdp", *PLAIN)
    with torchrun(processes.folder, *HERE[:3], "-m", "shoal", *command) as worker:
        output, _ = coordinator.communicate(timeout=HANG_S)
        assert coordinator.returncode == 0, output
        assert worker.wait(HANG_S) == 0, (processes.folder / "torchrun.log").read_text()


def test_torchrun_trains_over_collectives_and_then_with_each_process_as_a_worker(
    processes: Processes, over_collectives: dict[str, Tensor]
) -> None:
    (processes.folder / "program.py").write_text(
        "from shoal import train\n"
        "common = ['strategy.kind=diloco', 'strategy.inner_steps=4']\n"
        "train('config.yaml', overrides=[*common, 'engine.kind=collectives'], run_dir='collectives')\n"
        "train('config.yaml', overrides=[*common, 'launch.devices_per_node=null'], run_dir='workers-of-torchrun')\n"
    )
    with torchrun(processes.folder, *HERE, "program.py") as fleet:
        code = fleet.wait(HANG_S)
    assert code == 0, (processes.folder / "torchrun.log").read_text()
    assert_same(weights_of(processes.folder / "collectives"), over_collectives, 0.0)
    run = processes.folder / "workers-of-torchrun"
    assert (summary_of(run)["status"], summary_of(run)["steps"]) == ("completed", 3)
    assert {path.stem for path in (run / "workers").glob("*.jsonl")} == {"w1", "w2"}
    alike = trained(processes, "alike", *DILOCO, "--set", "launch.devices_per_node=null", "--workers", "2")
    assert_same(weights_of(run), alike, 1e-6)
    processes.audit(run.name)


@contextlib.contextmanager
def two_machines(folder: Path, *arguments: str) -> Iterator[list[forkserver.ChildProcess]]:
    """What two machines would start."""
    meeting = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = ["--nnodes", "2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--local-addr", "127.0.0.1"]
    with torchrun(folder, *command, *arguments) as one, torchrun(folder, *command, *arguments, log="other.log") as other:
        yield [one, other]


def logs_in(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in ("torchrun.log", "other.log")]


@pytest.mark.long
def test_torchrun_on_two_machines_makes_each_an_island(processes: Processes) -> None:
    """Nobody says how many processes an island has, and the run still knows how long an epoch is."""
    settings = ["--set", "engine.kind=ddp", *DILOCO]
    settings += ["--set", "training.max_steps=null", "--set", "training.epochs=1", "--set", "training.batch_size=40"]
    command = ["--nproc-per-node", "2", "-m", "shoal", "train", "config.yaml", *settings, "--set", "launch.devices_per_node=null"]
    with two_machines(processes.folder, *command, "--run-dir", "fleet") as machines:
        codes = [machine.wait(HANG_S) for machine in machines]
    assert codes == [0, 0], logs_in(processes.folder)
    alike = trained(processes, "alike", *settings, "--workers", "2")
    assert summary_of(processes.folder / "fleet")["samples"] == summary_of(processes.folder / "alike")["samples"]
    assert_same(weights_of(processes.folder / "fleet"), alike, 1e-5)
    processes.audit("fleet")


@pytest.mark.long
def test_torchrun_starts_a_killed_fleet_again_from_what_it_confirmed(processes: Processes) -> None:
    """From Python, on two machines, of which each counts its own restarts. The program trains twice, and its variables are its own."""
    (processes.folder / "program.py").write_text(
        "import os, threading, time\n"
        "from pathlib import Path\n"
        "from shoal import train\n"
        "def die():\n"
        "    while not Path('fleet/checkpoints/latest').exists(): time.sleep(0.01)\n"
        "    Path('death').write_text('')\n"
        "    os.kill(os.getpid(), 9)\n"
        "if os.environ['RANK'] == '1' and not Path('death').exists():\n"
        "    threading.Thread(target=die, daemon=True).start()\n"
        "common = ['strategy.kind=diloco', 'strategy.inner_steps=4', 'launch.devices_per_node=null', 'training.epochs=1000']\n"
        "one = train('config.yaml', overrides=[*common, 'training.max_steps=80'], run_dir='fleet')\n"
        "again = train('config.yaml', overrides=[*common, 'training.max_steps=8'], run_dir='again')\n"
        'Path(f"{os.environ[\'RANK\']}.told").write_text(f"{one.status} {one.steps} {again.status} {again.steps}")\n'
    )
    with two_machines(processes.folder, "--nproc-per-node", "1", "program.py") as machines:
        codes = [machine.wait(HANG_S) for machine in machines]
    assert codes == [0, 0], logs_in(processes.folder)
    assert (processes.folder / "death").exists()
    assert summary_of(processes.folder / "fleet")["resumed_from"], "it went on, and did not begin anew"
    assert [(processes.folder / f"{rank}.told").read_text() for rank in (0, 1)] == ["completed 20 completed 2"] * 2
    processes.audit("fleet")
