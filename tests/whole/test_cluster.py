"""Coordinator and workers as a user runs them: real processes, real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from shoal.cli.main import main
from tests.support.eventually import eventually
from tests.support.processes import HANG_S, Command, Processes, processes_in, wait_for_line

CONFIG = """\
dialect: shoal
model: {kind: mlp, hidden_sizes: [16]}
training: {batch_size: 16, epochs: 2, optimizer: {name: SGD, learning_rate: 0.1}}
strategy: {kind: async}
transport: {port: 0}
coordinator: {heartbeat_interval_s: 1.0}
"""
PARAMETERS = 64 * 16 + 16 + 16 * 10 + 10
LONG = ["--set", "training.epochs=1000"]
PLUGIN = ("--plugin", str(Path(__file__).parents[1] / "support" / "watched_task.py"))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with processes_in(tmp_path) as made:
        yield made


def workers_in(folder: Path, *words: str) -> list[int]:
    """Worker processes that were started in a folder, those with these words in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_text(errors="replace").replace("\0", " ").split()
            if {"join", *words} <= set(command) and (path / "cwd").resolve() == folder.resolve():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def joined(processes: Processes, command: list[str], name: str) -> Command:
    return processes.start(*command, "--name", name, "--receipts", f"run/workers/{name}.jsonl")


def contributes(folder: Path, name: str) -> None:
    """Wait until the coordinator confirms another contribution of a worker. Its table of workers comes only every few seconds."""
    receipts = folder / "run" / "workers" / f"{name}.jsonl"
    before = receipts.stat().st_size if receipts.exists() else 0
    eventually(lambda: receipts.exists() and receipts.stat().st_size > before)


def test_train_starts_workers_and_leaves_none_behind(processes: Processes, tmp_path: Path) -> None:
    code, output = processes.run("train", "config.yaml", "--workers", "2", "--run-dir", "run", "--epochs", "5")
    assert code == 0, output
    assert re.search(r"completed after \d+ steps, \d+ samples", output)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["eval"]["accuracy"] > 0.8, "after five epochs also where many contributions come late"
    assert summary["received_bytes"] > 0
    assert not workers_in(tmp_path)
    processes.audit("run")
    processes.here("eval", "run")


def test_xmlrpc_gives_the_same_kind_of_run(processes: Processes, tmp_path: Path) -> None:
    """A worker that asks the printed address by XML-RPC trains the model, and what it was told agrees with the ledger."""
    coordinator, command = processes.coordinate("--set", "transport.kind=xmlrpc", "--set", "transport.port=0")
    assert re.fullmatch(r"http://[\d.]+:\d+", command[1])
    code, output = processes.run(*command, "--name", "anna", "--receipts", "run/workers/anna.jsonl")
    assert code == 0, output
    output, _ = coordinator.communicate(timeout=HANG_S)
    assert coordinator.returncode == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["eval"]["accuracy"] > 0.8
    assert summary["samples"] == 16 * summary["steps"] == 16 * summary["contributions"]["accepted"]
    assert summary["received_bytes"] > summary["steps"] * 4 * PARAMETERS
    processes.audit("run")


def test_units_are_leased_without_a_database_and_each_batch_is_learned_from_once(processes: Processes, tmp_path: Path) -> None:
    """One of the workers is killed in the middle of a unit: somebody else does that one. Until then nobody gets beyond a first unit."""
    with (tmp_path / "config.yaml").open("w") as file:
        file.write(CONFIG.replace("{kind: mlp, hidden_sizes: [16]}", "{kind: forgetful}") + "task: {kind: watched}\n")
    for name in ("w1", "w2", "w3"):
        (tmp_path / f"{name}.wish").write_text("hold 2")
    units = ("strategy.kind=workunits", "strategy.batches_per_unit=2", "strategy.units_per_update=2", "training.epochs=6")
    settings = [word for setting in units for word in ("--set", setting)]
    run = processes.start("train", "config.yaml", "--workers", "3", "--run-dir", "run", *PLUGIN, *settings)
    ledger = tmp_path / "run" / "coordinator" / "ledger.jsonl"
    while not (held := [path.stem for path in tmp_path.glob("*.steps") if path.stat().st_size == 2]):
        assert run.poll() is None, run.communicate()
        time.sleep(0.01)
    (worker,) = workers_in(tmp_path, held[0])
    os.kill(worker, signal.SIGKILL)
    (tmp_path / "go").touch()
    output, _ = run.communicate(timeout=HANG_S)
    assert run.returncode == 0, output
    assert "signal 9" in output
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    learned = [(one[6], one[7] - one[8], one[8]) for line in lines for one in line.get("from", ())]
    batches = [(epoch, start + number) for epoch, start, count in learned for number in range(count)]
    assert len(batches) == len(set(batches))
    assert {epoch for epoch, _ in batches} == set(range(6))
    assert len(batches) == 6 * len([1 for epoch, _ in batches if epoch == 0])
    processes.audit("run")


def test_workers_join_from_elsewhere_with_the_printed_line(processes: Processes) -> None:
    krum = ("updates.aggregation.kind=krum", "strategy.contributions_per_update=3")  # nobody is done before all are there
    coordinator, command = processes.coordinate(*(word for setting in krum for word in ("--set", setting)))
    workers = [processes.start(*command, "--name", name) for name in ("anna", "ben", "cleo")]
    output, _ = coordinator.communicate(timeout=HANG_S)
    assert coordinator.returncode == 0, output
    assert "completed" in output
    for worker in workers:
        said, _ = worker.communicate(timeout=HANG_S)
        assert worker.returncode == 0, said
        assert "accepted (" in said


def test_strangers_are_refused_and_the_run_goes_on(processes: Processes) -> None:
    coordinator, command = processes.coordinate()
    token, key = command.index("--token") + 1, command.index("--key") + 1
    wrong = {token: "guessed", key: "A" * 43}
    for position, value in wrong.items():
        bad = [value if number == position else word for number, word in enumerate(command)]
        code, output = processes.run(*bad, "--patience", "1")
        assert code == 2, output
        assert "error:" in output
        assert "Traceback" not in output
    worker = processes.start(*command)
    output, _ = coordinator.communicate(timeout=HANG_S)
    assert coordinator.returncode == 0, output
    assert worker.wait(HANG_S) == 0


def test_ctrl_c_ends_a_worker_cleanly_and_the_run_goes_on(processes: Processes, tmp_path: Path) -> None:
    coordinator, command = processes.coordinate(*LONG)
    first = joined(processes, command, "first")
    contributes(tmp_path, "first")
    second = processes.start(*command, "--name", "second")
    wait_for_line(coordinator, "second joined")
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=HANG_S)
    assert first.returncode == 0, output
    assert wait_for_line(coordinator, "first left")
    coordinator.send_signal(signal.SIGINT)
    output, _ = coordinator.communicate(timeout=HANG_S)
    assert coordinator.returncode == 130, output
    assert second.wait(HANG_S) == 0


def test_a_coordinator_that_was_killed_takes_its_workers_up_again(processes: Processes, tmp_path: Path) -> None:
    coordinator, command = processes.coordinate(*LONG)
    worker = joined(processes, command, "anna")
    contributes(tmp_path, "anna")
    coordinator.kill()
    coordinator.communicate()
    again = processes.start("coordinate", "--run-dir", "run", "--resume")
    assert wait_for_line(again, "resumed from .* at step ([0-9]+)")
    wait_for_line(again, "anna joined")
    contributes(tmp_path, "anna")
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=HANG_S)
    assert worker.wait(HANG_S) == 0
    processes.audit("run")


@pytest.mark.long
def test_a_coordinator_that_trains_and_was_killed_trains_again(processes: Processes, tmp_path: Path) -> None:
    coordinator, _ = processes.coordinate("--set", "coordinator.trains=true", *LONG)
    wait_for_line(coordinator, r"step \d+")
    (own,) = workers_in(tmp_path)
    coordinator.kill()
    coordinator.communicate()
    _gone(own)
    again = processes.start("coordinate", "--run-dir", "run", "--resume")
    wait_for_line(again, "resumed from .* at step [0-9]+")
    wait_for_line(again, r"step \d+")
    assert len(workers_in(tmp_path)) == 1
    again.send_signal(signal.SIGINT)
    output, _ = again.communicate(timeout=HANG_S)
    assert again.returncode == 130, output
    processes.audit("run")


def test_workers_end_with_their_parent_and_the_run_goes_on_with_the_same_shards(processes: Processes, tmp_path: Path) -> None:
    run = processes.start("train", "config.yaml", "--workers", "2", "--run-dir", "run", *LONG)
    wait_for_line(run, r"step \d+")
    eventually(lambda: len(workers_in(tmp_path)) == 2)  # one is enough for a step
    started = workers_in(tmp_path)
    run.kill()
    run.communicate()
    for pid in started:
        _gone(pid)
    for count, more in ((2, []), (1, ["--workers", "1"])):
        again = processes.start("train", "--run-dir", "run", "--resume", *more)
        wait_for_line(again, "resumed from")
        wait_for_line(again, r"step \d+")
        eventually(lambda expected=count: len(workers_in(tmp_path)) == expected)
        again.send_signal(signal.SIGINT)
        again.communicate(timeout=HANG_S)
        assert json.loads((tmp_path / "run" / "coordinator" / "secrets.json").read_text())["expected"] == 2
    processes.audit("run")


def test_machines_with_their_own_way_to_the_server_are_told_it(processes: Processes, tmp_path: Path) -> None:
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("cluster: {num_workers: 1, workers: [pi5], hosts: {pi5: {server_address: 127.0.0.1}}}\n")
    coordinator = processes.start(
        "coordinate", "config.yaml", "--run-dir", "run", "--host", "127.0.0.1", "--set", "transport.host=192.0.2.1"
    )
    command = wait_for_line(coordinator, r"shoal (join .* --name pi5 .*)").split()
    assert command[1].startswith("tcp://127.0.0.1:")
    assert processes.run(*command)[0] == 0
    assert coordinator.wait(HANG_S) == 0


def _gone(pid: int) -> None:
    """Wait for a process that is not our child."""
    import select

    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([descriptor], [], [], HANG_S)
        assert ready, f"process {pid} was left behind"
    finally:
        os.close(descriptor)


def test_what_cannot_be_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "local.yaml").write_text("dialect: shoal\nmodel: {kind: mlp}\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "secrets.json").write_text("{}")
    for arguments, words in (
        (("coordinate", "local.yaml"), "no workers to coordinate"),
        (("train", "local.yaml", "--netem", "satellite"), "--workers"),
        (("train", "config.yaml"), "how many workers"),
        (("train", "config.yaml", "--workers", "2", "--slowdown", "nobody=2", "--run-dir", "slow"), "no worker `nobody`"),
        (("coordinate", "config.yaml", "--set", "transport.kind=in-process"), "other machines do not reach"),
        (("train", "config.yaml", "--workers", "2", "--set", "coordinator.state_path=taken", "--run-dir", "other"), "state of another run"),
        (("join",), "no address was given"),
        (("join", "tcp://127.0.0.1:1", "--token", "x", "--key", "short"), "--key"),
        (("join", "tcp://127.0.0.1:1", "--token", "x", "--patience", "1"), "has not answered"),
    ):
        code, said = main(list(arguments)), capsys.readouterr()
        assert code == 2, (arguments, said)
        assert words in said.err, (arguments, said)


DILOCO = [
    "--set",
    "strategy.kind=diloco",
    "--set",
    "strategy.inner_steps=10",
    "--set",
    "strategy.rounds=6",
    "--set",
    "training.epochs=null",
]


@pytest.mark.long
def test_diloco_with_workers_started_here(processes: Processes, tmp_path: Path) -> None:
    """Beside the threads of ZeroMQ, and with processes that load ahead. Nobody is taken for dead in a pause of some seconds."""
    more = ("--set", "data.loader.num_workers=1", "--set", "coordinator.heartbeat_interval_s=100")
    processes.here("train", "config.yaml", "--workers", "2", "--run-dir", "run", *DILOCO, *more)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["samples"] == 6 * 10 * 2 * 16
    assert summary["contributions"] == {"accepted": 12}
    processes.audit("run")


def test_a_diloco_coordinator_that_is_killed_repeats_no_round(processes: Processes, tmp_path: Path) -> None:
    several = [*DILOCO, "--set", "strategy.rounds=100000", "--set", "strategy.fragments=2", "--set", "updates.codec.kind=int8"]
    coordinator, command = processes.coordinate(*several)
    worker = joined(processes, command, "anna")
    contributes(tmp_path, "anna")
    coordinator.kill()
    coordinator.communicate()
    again = processes.start("coordinate", "--run-dir", "run", "--resume")
    before = int(wait_for_line(again, "resumed from .* at round ([0-9]+)"))
    contributes(tmp_path, "anna")
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=HANG_S)
    assert worker.wait(HANG_S) == 0
    ledger = (tmp_path / "run" / "coordinator" / "ledger.jsonl").read_text().splitlines()
    versions = [json.loads(line)["version"] for line in ledger if "version" in line]
    assert versions == list(range(1, len(versions) + 1))
    assert before < len(versions)
    processes.audit("run")


def test_the_owner_pauses_evicts_and_stops_a_run_from_another_terminal(processes: Processes, tmp_path: Path) -> None:
    """A run that its owner ended is saved, and its command ends well; what a worker gave before it was shown out stays."""
    run = processes.start("train", "config.yaml", "--workers", "2", "--run-dir", "run", *LONG, "--set", "coordinator.metrics_port=0")
    figures = wait_for_line(run, r"figures for Prometheus: (\S+)")
    ledger = tmp_path / "run" / "coordinator" / "ledger.jsonl"
    eventually(lambda: ledger.exists() and ledger.stat().st_size > 2000)
    processes.here("pause", "run")
    made = versions_in(ledger)
    eventually(lambda: 'shoal_workers{run="run"} 2' in urlopen(figures, timeout=HANG_S).read().decode())  # a second old at most
    processes.here("evict", "run", "w1")
    assert versions_in(ledger) == made
    processes.here("resume", "run")
    eventually(lambda: versions_in(ledger) > made + 3)
    processes.here("stop", "run")
    output, _ = run.communicate(timeout=HANG_S)
    assert run.returncode == 0, output
    assert "w1 is shown out by the owner" in output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    processes.audit("run")


def versions_in(ledger: Path) -> int:
    return ledger.read_text().count('"version"')
