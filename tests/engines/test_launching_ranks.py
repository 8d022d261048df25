"""`shoal train` with engines of several processes: started, stopped, killed, resumed on others, under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.main import main
from shoal.config.load import resolve_data
from shoal.config.ranks import RankPlace, rank_environment, rank_place
from shoal.errors import ShoalError
from shoal.runs.folder.checkpoint import read_checkpoint
from shoal.strategies.run_length import alone as total_steps
from tests.support.eventually import eventually
from tests.support.processes import HANG_S, Command, Done, run_python

pytestmark = pytest.mark.whole

CONFIG = """\
dialect: shoal
model: {kind: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, max_seq_len: 16, dropout: 0.0}
data: {source: {kind: text, path: text.txt}, tokenizer: characters}
training: {max_steps: 12, batch_size: 6, device: cpu, clipping: {max_norm: 1.0}}
evaluation: {strategy: never}
checkpoint: {strategy: steps, every_steps: 6, keep_last: 9}
logging: {every_steps: 1}
"""
FOR_EVER = ("--set", "training.max_steps=1000000", "--set", "training.epochs=100000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    (made / "config.yaml").write_text(CONFIG)
    (made / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return made


def command(run: str, engine: str, count: int, *more: str) -> list[str]:
    settings = ["--set", f"engine.kind={engine}", "--set", f"launch.devices_per_node={count}"]
    return ["-m", "shoal", "train", "config.yaml", "--run-dir", run, *settings, *more]


def train(folder: Path, run: str, engine: str, count: int, *more: str) -> Done:
    done = run_python(command(run, engine, count, *more), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Path:
    """A run of FSDP on two processes, all twelve steps of it."""
    train(folder, "two", "fsdp", 2)
    return folder / "two"


def resumed(sharded: Path, name: str) -> str:
    """A copy of it that ends after six steps."""
    copy = sharded.parent / name
    shutil.copytree(sharded, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000012")
    return name


def test_the_same_engine_resumes_bit_by_bit(sharded: Path) -> None:
    train(sharded.parent, resumed(sharded, "same"), "fsdp", 2, "--resume")
    assert losses(sharded.parent / "same") == losses(sharded)


def test_a_sharded_run_goes_on_in_one_process(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sharded.parent)
    arguments = ["--resume", "--set", "engine.kind=single", "--set", "training.batch_size=12"]
    assert main(["train", "config.yaml", "--run-dir", resumed(sharded, "one"), *arguments]) == 0
    assert losses(sharded.parent / "one") == pytest.approx(losses(sharded), rel=1e-5)
    assert main(["generate", "two", "--max-new-tokens", "5"]) == 0


@pytest.mark.long
def test_a_sharded_run_goes_on_in_three_processes(sharded: Path) -> None:
    train(sharded.parent, resumed(sharded, "three"), "fsdp", 3, "--resume", "--set", "training.batch_size=4")
    assert losses(sharded.parent / "three") == pytest.approx(losses(sharded), rel=1e-5)


@pytest.mark.long
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed (shoal[deepspeed])")
def test_a_sharded_run_goes_on_under_deepspeed(sharded: Path) -> None:
    name = resumed(sharded, "zero")
    train(sharded.parent, name, "deepspeed", 2, "--resume", "--set", "engine.zero_stage=3", "--set", "training.max_steps=12")
    assert losses(sharded.parent / name) == pytest.approx(losses(sharded), rel=1e-5)
    from_zero, from_fsdp = (read_checkpoint(run / "checkpoints" / "step-00000012") for run in (sharded.parent / name, sharded))
    for key, value in from_fsdp.weights.items():
        torch.testing.assert_close(from_zero.weights[key], value, rtol=1e-4, atol=1e-6)
    moments = [one.state["engine"]["optimizers"]["model"]["moments"] for one in (from_zero, from_fsdp)]
    for key, values in moments[1].items():
        torch.testing.assert_close(moments[0][key]["exp_avg"], values["exp_avg"], rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_a_sharded_checkpoint(sharded: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    path = sharded / "checkpoints" / "step-00000012"
    ours = read_checkpoint(path).weights
    theirs: dict[str, Any] = {name: torch.empty_like(value) for name, value in ours.items()}
    load(theirs, storage_reader=HuggingFaceStorageReader(str(path / "weights")), no_dist=True)
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


def test_a_damaged_shard_is_noticed(sharded: Path) -> None:
    path = sharded.parent / "damaged"
    shutil.copytree(sharded / "checkpoints" / "step-00000012", path)
    shard = sorted((path / "weights").iterdir())[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ShoalError, match="does not match its checksum"):
        read_checkpoint(path)


# --- ends ----------------------------------------------------------------------------------------------


@pytest.fixture
def running(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Command, Path]]:
    """A run of two processes that is under way."""
    name = request.node.name
    process = Command(command(name, "ddp", 2, *FOR_EVER), folder, errors=True)
    try:
        eventually(lambda: (folder / name / "checkpoints" / "latest").exists() or process.poll() is not None)
        yield process, folder / name
    finally:
        process.close()


def ranks_of(process: Command, run: Path) -> list[int]:
    """The processes that a run's launcher has started, in their order: they were given the launcher's own arguments."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().split()
            started = (path / "stat").read_text().rpartition(")")[2].split()[19]
            if run.name in words and int(path.name) != process.pid:
                found[int(path.name)] = int(started), int(path.name)
    return sorted(found, key=lambda pid: found[pid])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_is_killed_ends_all_with_a_clear_error(running: tuple[Command, Path]) -> None:
    process, run = running
    first, second = ranks_of(process, run)
    os.kill(second, signal.SIGKILL)
    _, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 2
    assert error.strip().splitlines()[-1].startswith("error: process 1 of 2 was killed (SIGKILL); the others were ended")
    assert "Traceback" not in error
    assert not alive(first)


def test_no_rank_is_left_behind_by_a_launcher_that_is_killed(running: tuple[Command, Path]) -> None:
    process, run = running
    ranks = ranks_of(process, run)
    assert len(ranks) == 2
    process.kill()
    eventually(lambda: not any(alive(pid) for pid in ranks))


def test_a_run_that_is_asked_to_stop_stops_after_a_step_and_can_go_on(running: tuple[Command, Path]) -> None:
    process, run = running
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, error
    steps = json.loads((run / "summary.json").read_text())["steps"]
    assert (run / "checkpoints" / "latest").read_text() == f"step-{steps:08d}"
    assert f"interrupted after {steps} steps" in output


@pytest.mark.long
def test_torchrun_starts_a_killed_island_again_from_its_last_checkpoint(folder: Path, tmp_path: Path) -> None:
    kill = tmp_path / "rank.py"
    kill.write_text(
        "import os, sys, threading, time\n"
        "from pathlib import Path\n"
        "from shoal.cli.main import main\n"
        "def die():\n"
        "    while not Path('elastic/checkpoints/latest').exists(): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), 9)\n"
        "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    threading.Thread(target=die, daemon=True).start()\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d"]
    torchrun += ["--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.2", str(kill)]
    arguments = command("elastic", "ddp", 2, "--set", "training.max_steps=150")[2:]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *arguments], cwd=folder, capture_output=True, text=True, timeout=HANG_S, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((folder / "elastic" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 150)
    assert "checkpoints/step-" in summary["resumed_from"]
    assert len(losses(folder / "elastic")) == 150, "no step is recorded twice, none is missing"


# --- what does not fit ---------------------------------------------------------------------------------


def test_what_does_not_fit_is_told_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    base = ["train", "config.yaml", "--run-dir", "none"]
    assert main([*base, "--set", "engine.kind=ddp", "--set", "launch.nodes=2", "--set", "launch.devices_per_node=2"]) == 2
    assert "torchrun --nnodes 2 --nproc-per-node 2" in capsys.readouterr().err
    for name, value in rank_environment(RankPlace(0, 2, 0, 2, file="meeting")).items():
        monkeypatch.setenv(name, value)
    assert main([*base, "--set", "strategy.kind=diloco", "--workers", "2"]) == 2
    assert "--workers is for workers that Shoal starts here" in capsys.readouterr().err
    assert main([*base, "--set", "strategy.kind=diloco", "--set", "engine.kind=ddp", "--set", "launch.devices_per_node=3"]) == 2
    assert "launch.devices_per_node is 3, and torchrun started 2" in capsys.readouterr().err
    assert main([*base, "--set", "strategy.kind=diloco", "--set", "cluster.num_workers=3"]) == 2
    assert "cluster.num_workers is 3, and torchrun started 2" in capsys.readouterr().err
    assert main([*base, "--set", "strategy.kind=diloco", "--set", "transport.kind=postgres"]) == 2
    assert "the processes of torchrun speak zmq" in capsys.readouterr().err
    assert main(base) == 2
    assert "torchrun started 2 processes, and the engine single is one" in capsys.readouterr().err
    assert main([*base, "--set", "engine.kind=ddp", "--set", "launch.devices_per_node=3"]) == 2
    assert "launch.devices_per_node is 3, and torchrun started 2" in capsys.readouterr().err
    assert not (folder / "none").exists()


def test_the_global_batch_is_checked_with_the_real_number_of_processes() -> None:
    settings = {"batch_size": 8, "gradient_accumulation_steps": 2, "global_batch_size": 32, "max_steps": 3}
    run = resolve_data({"engine": {"kind": "ddp"}, "training": settings}, name="test", dialect="shoal", environ={}).run
    assert total_steps(run, 10, ranks=2) == 3
    with pytest.raises(ShoalError, match=r"is 32, and 3 devices take 8 × 2 × 3 samples a step"):
        total_steps(run, 10, ranks=3)


def test_a_place_is_read_as_torchrun_writes_it() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    found = rank_place(environ | {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found == RankPlace(5, 8, 1, 4, "", "here", 29500, True, 2)
    assert found.nodes == 2
    assert rank_place({}) is None
    with pytest.raises(ShoalError, match="start with torchrun"):
        rank_place({name: value for name, value in environ.items() if name != "MASTER_PORT"})
    with pytest.raises(ShoalError, match="not as torchrun leaves it"):
        rank_place(environ | {"LOCAL_RANK": "one"})
