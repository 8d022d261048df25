"""`shoal up` and `shoal down`: whole fleets with one command."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from shoal.cli.main import main
from shoal.cli.up import _remove_unbegun, _report_unfit
from shoal.config import missing_parts
from shoal.config.load import ConfigFile, resolve
from shoal.launch import ssh_workers
from shoal.launch.up_file import note_started, running_process, unfit_workers, written_while_up
from shoal.runs.invitation import CoordinatorSecrets, Invitation
from shoal.transports.keys import new_keys
from shoal.version import __version__
from tests.support.eventually import eventually
from tests.support.small_slurm import tiny_slurm

SMALL = "dialect: shoal\nname: small\nmodel: {kind: mlp, hidden_sizes: [8]}\ndata: {source: {kind: builtin, name: digits}}\n"
FLEET = SMALL + "strategy: {kind: syncps, round_timeout_s: 5}\ntransport: {kind: zmq, port: 0}\ncluster: {workers: [ann, bo]}\n"
BY_SSH = ["--set", "launch.kind=ssh", "--set", f"launch.ssh.python={sys.executable}"]
FOR_EVER = ["--set", "training.epochs=100000", "--set", "coordinator.heartbeat_interval_s=0.5"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path


@pytest.fixture
def by_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called ssh that runs the command here, in a home of its own for each host: what sshd does, without a network."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\nhost, command = sys.argv[-2:]\n"
        "if host == 'nobody':\n    print('ssh: no route', file=sys.stderr)\n    sys.exit(255)\n"
        f"home = os.path.join({str(folder)!r}, 'homes', host)\nos.makedirs(home, exist_ok=True)\nos.chdir(home)\n"
        "os.environ['HOME'] = home\nos.execv('/bin/sh', ['sh', '-c', command])\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_a_fleet_by_ssh_restarts_who_is_killed_and_down_leaves_nothing(by_ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [*BY_SSH, "--set", "cluster.hosts={ann: {user: ada}, bo: {host: bo}}"]
    assert main(["up", "fleet.yaml", *more, *FOR_EVER, "--run-dir", "run", "--host", "127.0.0.1"]) == 0
    try:
        assert "shoal down run" in capsys.readouterr().out
        assert stat.S_IMODE(Path("run/up.log").stat().st_mode) == 0o600, "it holds the token"
        assert running_process(Path("run")) is not None
        ledger = by_ssh / "run" / "coordinator" / "ledger.jsonl"
        eventually(lambda: ledger.exists() and '"ann"' in ledger.read_text() and '"bo"' in ledger.read_text())
        eventually(lambda: _has_a_receipt(by_ssh / "homes" / "ada@ann") and _has_a_receipt(by_ssh / "homes" / "bo"))
        killed = _process_in(by_ssh / "homes" / "bo")
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: _process_in(by_ssh / "homes" / "bo") not in (0, killed))
        eventually(lambda: "bo was killed" in (by_ssh / "run" / "up.log").read_text())
        assert main(["up", "fleet.yaml", *more, "--run-dir", "run"]) == 2
        assert "is up already" in capsys.readouterr().err
    finally:
        main(["down", "run"])
    assert running_process(Path("run")) is None
    assert not _process_in(by_ssh / "homes" / "ada@ann")
    assert not (by_ssh / "homes" / "bo" / ".shoal").exists()
    assert main(["audit", "run"]) == 0
    assert "2 files" in capsys.readouterr().out, "the receipts came back"
    assert main(["down", "run"]) == 2
    assert "nothing is up" in capsys.readouterr().err


def _has_a_receipt(home: Path) -> bool:
    """A worker writes a receipt down after the entry in the ledger. Its home is that of the user and the address which the file names."""
    return any(b"\n" in file.read_bytes() for file in home.glob(".shoal/*/*.jsonl"))


def _process_in(home: Path) -> int:
    """The newest worker in a host's home folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(home) and "join" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return max(found, default=0)


def test_machines_that_are_not_fit_are_named_with_what_to_do(by_ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--set", "launch.kind=ssh", "--set", "cluster.workers=[ann]", "--foreground", "--host", "127.0.0.1"]
    assert main(["up", "fleet.yaml", *more, "--set", "launch.ssh.python=no-such-python", "--run-dir", "a"]) == 2
    assert "no-such-python has no Shoal" in (said := capsys.readouterr().err)
    assert "launch.ssh.wheel" in said
    wheel = ["--set", "launch.ssh.python=no-such-python", "--set", "launch.ssh.wheel=shoal-0.0.1-py3-none-any.whl"]
    assert main(["up", "fleet.yaml", *more, *wheel, "--run-dir", "b"]) == 2
    assert f"no wheel of version {__version__}" in capsys.readouterr().err


def test_workers_that_cannot_work_are_noted_where_the_run_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with written_while_up(tmp_path):
        assert unfit_workers(tmp_path) is None, "not all were tried yet"
        note_started(tmp_path, {"ann": "ann: no route"})
        assert unfit_workers(tmp_path) == {"ann": "ann: no route"}
    assert unfit_workers(tmp_path) is None
    assert _report_unfit({"ann": "ann: no route"}, 2, "run") == 2
    assert "error: 1 of 2 workers cannot work; the run is up without them:\n  ann: no route\n" in capsys.readouterr().err


def test_the_folder_of_a_run_that_did_not_begin_is_removed(tmp_path: Path) -> None:
    for name, kept in (("empty", False), ("begun", True)):
        (folder := tmp_path / name).mkdir()
        (log := folder / "up.log").write_text("error: no")
        if kept:
            (folder / "config.yaml").write_text("")
        _remove_unbegun(folder, log)
        assert log.exists() is folder.exists() is kept


@pytest.mark.long
def test_a_fleet_of_which_a_machine_cannot_work_is_up_and_the_exit_code_says_so(by_ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [*BY_SSH, "--set", "cluster.hosts={ann: {host: nobody}, bo: {host: bo}}"]
    assert main(["up", "fleet.yaml", *more, *FOR_EVER, "--run-dir", "run", "--host", "127.0.0.1"]) == 2
    try:
        told = capsys.readouterr()
        assert "1 worker is being started (ssh)" in told.out
        assert (
            "error: 1 of 2 workers cannot work; the run is up without them:\n  ann: `ssh nobody` does not work: ssh: no route" in told.err
        )
        assert told.err.endswith("shoal down run && shoal up --run-dir run --resume\n")
        assert running_process(Path("run")) is not None
    finally:
        main(["down", "run"])


def test_receipts_are_deleted_on_a_machine_only_when_they_are_here(by_ssh: Path) -> None:
    run = resolve([ConfigFile("fleet.yaml")], [], environ={}).run
    said: list[str] = []
    made = ssh_workers.SshWorkers(run, by_ssh / "w", Invitation("tcp://h:1", "t", None), {"ann": (), "nobody": ()}, said.append)
    made.pythons = {"ann": "python3", "nobody": "python3"}
    room = by_ssh / "homes" / "ann" / made.remote_folders["ann"]
    room.mkdir(parents=True)
    (room / "ann.jsonl").write_text('["ann", 2]\n')
    (by_ssh / "w" / "ann.jsonl").write_text('["ann", 1]\n')
    made.close()
    assert (by_ssh / "w" / "ann.jsonl").read_text() == '["ann", 1]\n["ann", 2]\n', "those of before a resume stay"
    assert not room.parent.exists()
    assert [line.startswith(f"warning: the receipts of nobody stay in nobody:{made.remote_folders['nobody']}") for line in said] == [True]
    assert said[0].endswith("ssh: no route")


def test_every_machine_is_told_the_address_under_which_it_reaches_the_server(folder: Path) -> None:
    run = resolve([ConfigFile("cluster_config_edp"), ConfigFile("nn_config")], [], environ={}).run
    made = ssh_workers.SshWorkers(run, folder / "w", Invitation("tcp://10.10.0.1:65432", "t", None), {"pi5": (), "win": ()}, print)
    assert [made.invitation_of(worker)["address"] for worker in made.workers] == ["tcp://192.168.50.1:65432", "tcp://10.10.0.1:65432"]


def test_slurm_gets_a_script_that_bash_reads_and_that_comes_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "launch.kind=slurm", "--set", "launch.slurm.options=[--partition=gpu]", "--run-dir", "job", "--num_nodes", "4"]
    assert main(["up", "fleet.yaml", *options, "--set", "cluster.workers=[]"]) == 0
    script = folder / "job" / "job.sbatch"
    text = script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "#SBATCH --nodes=4\n" in text
    assert "#SBATCH --partition=gpu\n" in text
    assert "#SBATCH --requeue\n" in text
    assert "--resume" in text
    assert f"sbatch {script}" in capsys.readouterr().out
    assert main(["config", "check", "job/config.yaml"]) == 0


def test_slurm_itself_takes_the_scripts(folder: Path) -> None:
    with tiny_slurm(folder / "slurm") as environ:
        slurm = ["--set", "launch.kind=slurm", "--num_nodes", "2"]
        assert main(["up", "fleet.yaml", *slurm, "--run-dir", "job", "--set", "cluster.workers=[]"]) == 0
        stack = ["gpu/tiny", "--num_gpus", "2", "--set", "engine.kind=ddp", "--set", "training.device=cpu"]
        assert main(["up", *stack, *slurm, "--run-dir", "stack"]) == 0
        for name in ("job", "stack"):
            command = ["sbatch", "--test-only", str(folder / name / "job.sbatch")]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert "on nodes n[1-2]" in done.stderr


def test_a_stack_of_ava_gets_torchrun_with_its_nodes_and_gpus(folder: Path) -> None:
    stack = ["gpu/tiny", "--num_gpus", "8", "--num_nodes", "2", "--set", "engine.kind=ddp", "--set", "launch.kind=slurm"]
    assert main(["up", *stack, "--run-dir", "job"]) == 0
    text = (folder / "job" / "job.sbatch").read_text()
    assert "torchrun --nnodes=2 --nproc-per-node=8" in text
    assert "#SBATCH --gpus-per-node=8\n" in text


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_the_machine_that_submits_needs_nothing_that_only_the_job_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Neither the engine's packages nor those of the model, the reward, the database and the accountant, nor GPUs or data."""
    lacking = {package.module for package in missing_parts._PACKAGES}
    monkeypatch.setattr(missing_parts, "find_spec", lambda name: None if name in lacking else find_spec(name))
    for name in lacking:
        monkeypatch.setitem(sys.modules, name, None)
    (folder / "job.yaml").write_text(
        "dialect: shoal\nmodel: {kind: huggingface, pretrained: me/model, lora: {rank: 4}}\ndata: {source: {kind: text, path: not/here}}\n"
        "strategy: {kind: diloco}\nengine: {kind: deepspeed}\nupdates: {privacy: {enabled: true}, clip_norm: 1.0}\n"
        f"transport: {{kind: zmq, port: 7000}}\nlaunch: {{kind: {kind}, devices_per_node: 8, kubernetes: {{image: a/b}}}}\n"
    )
    assert main(["train", "job.yaml", "--workers", "2"]) == 2, "a run here needs them"
    assert capsys.readouterr().err.count("error[missing-package]") == 4
    assert main(["up", "job.yaml", "--num_nodes", "4", "--run-dir", "job"]) == 0
    assert capsys.readouterr().err.count("warning[missing-package]") == 4
    written = yaml.safe_load((folder / "job" / "config.yaml").read_text())
    assert written["launch"]["devices_per_node"] == 8


def test_kubernetes_gets_manifests_whose_parts_fit_each_other(folder: Path) -> None:
    options = ["--set", "launch.kind=kubernetes", "--set", "transport.port=7000", "--set", "launch.kubernetes.image=me/shoal:1"]
    assert main(["up", "fleet.yaml", *options, "--run-dir", "job"]) == 0
    path = folder / "job" / "manifests.yaml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it holds the token"
    objects = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(path.read_text())}
    service, workers = objects["Service", "small"], objects["Job", "small-workers"]
    coordinator = objects["Job", "small-coordinator"]["spec"]["template"]
    assert service["spec"]["selector"].items() <= coordinator["metadata"]["labels"].items()
    assert workers["spec"]["completions"] == 2
    command = workers["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    assert "tcp://small:7000" in command
    assert objects["Secret", "small"]["stringData"]["token"] not in command
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for one in objects.values():
        validate.validate(one, validate.latest_version(), strict=True)


def test_a_coordinator_takes_the_secrets_that_its_manifests_were_written_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = new_keys()
    monkeypatch.setenv("SHOAL_TOKEN", "t" * 32)
    assert CoordinatorSecrets.of(folder).token != "t" * 32, "a token alone is for joining"
    monkeypatch.setenv("SHOAL_SECRET_KEY", keys.secret)
    assert (CoordinatorSecrets.of(folder).token, CoordinatorSecrets.of(folder).keys.public) == ("t" * 32, keys.public)


def test_launchers_settings_without_their_launcher_are_told_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "check", "fleet.yaml", "--set", "launch.ssh.python=python3.12"])
    assert "that is for launch.kind ssh" in capsys.readouterr().err
