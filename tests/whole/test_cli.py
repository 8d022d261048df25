"""The command line, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.cli.main import main
from tests.support.processes import HANG_S


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as exit:  # argparse
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_help_names_the_commands(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "config" in out
    assert run("config", "--help")[0] == 0
    assert run("config", "check", "--help")[0] == 0
    assert run("--version")[1].startswith("shoal ")


def test_unknown_commands_are_refused(run) -> None:
    code, _, err = run("confg")
    assert (code, "did you mean `config`?" in err) == (2, True)
    assert run("config", "chek")[0] == 2


def test_check_is_quiet_about_good_files(run) -> None:
    code, out, err = run("config", "check", "smolcluster/gpt_config", "--min_lr", "1e-5")
    assert (code, err) == (0, "")
    assert out.endswith(": OK\n")


def test_check_tells_problems_and_exits_2(run, tmp_path: Path) -> None:
    Path("bad.yaml").write_text("dialect: shoal\nseed: x\n")
    code, out, err = run("config", "check", "bad.yaml")
    assert (code, out) == (2, "")
    assert "bad.yaml:2:7" in err
    code, out, _ = run("config", "check", "bad.yaml", "--format", "json")
    assert (code, json.loads(out)[0]["line"]) == (2, 2)
    assert json.loads(run("config", "check", "starter", "--format", "json")[1]) == []
    assert run("config", "check", "bad.yaml", "--format", "github")[1].startswith("::error file=bad.yaml,line=2")


@pytest.mark.parametrize("name", ["missing.yaml", ".", "binary.yaml", "tabs.yaml", "empty.yaml"])
def test_bad_files_exit_2_without_a_traceback(run, name: str) -> None:
    Path("binary.yaml").write_bytes(os.urandom(200) + b"\0")
    Path("tabs.yaml").write_text("a:\n\tb: 1\n")
    Path("empty.yaml").write_text("")
    for command in (["config", "check"], ["config", "show"], ["config", "explain", "seed"], ["config", "migrate"]):
        code, _, err = run(*command, name)
        assert code == 2
        assert "error[" in err
        assert "Traceback" not in err


def test_show_and_json(run) -> None:
    code, out, _ = run("config", "show", "starter", "--format", "json")
    assert (code, json.loads(out)["training"]["epochs"]) == (0, 20)
    assert "# starter:" in run("config", "show", "starter", "--origin")[1]


def test_what_show_prints_loads_again(run) -> None:
    for name in ("starter", "gpu/base", "dist-llm-train/wan-aggressive", "smolcluster/cluster_config_syncps", "diloco/small-scale"):
        Path("again.yaml").write_text("dialect: shoal\n" + run("config", "show", name)[1])
        assert json.loads(run("config", "show", "again.yaml", "--format", "json")[1]) == json.loads(
            run("config", "show", name, "--format", "json")[1]
        )


def test_explain_takes_native_dialect_and_short_paths(run) -> None:
    for path in ("strategy.units_per_update", "training.num_workunits_per_update", "units_per_update"):
        code, out, _ = run("config", "explain", path, "classroom/small-class")
        assert (code, out.splitlines()[0]) == (0, "strategy.units_per_update = 2")
    code, _, err = run("config", "explain", "training.batchsize", "classroom/small-class")
    assert (code, "did you mean `training.batch_size`?" in err) == (2, True)


def test_diff(run) -> None:
    code, out, _ = run("config", "diff", "gpu/base", "--", "gpu/base", "--batch_size", "9")
    assert code == 1
    assert "training.batch_size\n  - 8" in out
    assert "--batch_size 9" in out
    assert run("config", "diff", "gpu/base", "--", "gpu/base")[:2] == (0, "no difference\n")
    assert run("config", "diff", "gpu/base", "gpu/small")[0] == 1
    assert run("config", "diff", "gpu/base")[0] == 2


def test_schema_prints_json(run) -> None:
    assert json.loads(run("config", "schema")[1])["title"] == "Shoal run"


def test_migrate_to_a_file(run) -> None:
    assert run("config", "migrate", "classroom/small-class", "-o", "native.yaml")[0] == 0
    assert run("config", "diff", "classroom/small-class", "--", "native.yaml")[0] == 0
    assert run("config", "migrate", "classroom/small-class", "-o", "native.yaml")[0] == 2
    assert run("config", "migrate", "classroom/small-class", "-o", "native.yaml", "--force")[0] == 0


def test_init_writes_a_file_that_loads(run) -> None:
    code, out, _ = run("init")
    assert code == 0
    assert "shoal config check config.yaml" in out
    assert run("config", "check")[0] == 0
    assert run("init")[0] == 2
    assert run("init", "mine.yaml", "--preset", "gpu/base")[0] == 0
    assert run("config", "show", "mine.yaml")[0] == 0
    code, _, err = run("init", "x.yaml", "--preset", "gpu/bas")
    assert (code, "did you mean `gpu/base`?" in err) == (2, True)
    assert "gpu/base" in run("init", "--list")[1]
    assert run("init", "no/such/folder.yaml")[0] == 2


def test_documented_layer_flags_in_both_spellings(run) -> None:
    for hardware, distributed in (("--hardware_config", "--distributed_config"), ("--hardware-config", "--distributed-config")):
        layers = (
            "--config",
            "configs/gpu/base.yaml",
            distributed,
            "distributed/deepspeed_zero2",
            hardware,
            "configs/hardware/h100_80gb.yaml",
        )
        code, out, _ = run("config", "explain", "training.batch_size", *layers, "--batch_size", "32")
        assert code == 0
        lines = out.splitlines()
        assert lines[0] == "training.batch_size = 32"
        assert [line.split()[1] for line in lines[2:5]] == ["distributed", "hardware", "base"], (
            "layers have their order, whatever the flags'"
        )


def test_settings_may_stand_before_the_command(run) -> None:
    code, out, _ = run("--log-level", "DEBUG", "config", "explain", "log_level", "starter")
    assert (code, out.splitlines()[0]) == (0, 'log_level = "DEBUG"')
    assert run("config", "explain", "log_level", "--log-level=ERROR", "starter")[1].startswith('log_level = "ERROR"')


def test_flags_need_values_and_negative_numbers_are_values(run) -> None:
    assert run("config", "check", "gpu/base", "--batch_size")[0] == 2
    assert run("config", "show", "gpu/base", "--max_train_examples", "-1")[0] == 0


def test_documented_persistence_options(run) -> None:
    code, out, _ = run(
        "config", "explain", "coordinator.state_path", "dist-llm-train/lan", "--state-db", "state.db", "--ps-checkpoint", "c.pt"
    )
    assert (code, out.splitlines()[0]) == (0, 'coordinator.state_path = "state.db"')


HEAVY = ("torch", "transformers", "psycopg", "pydantic", "numpy", "rich", "datasets")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["config", "check", "demo-gpt"],
        ["config", "check", "gpu/tiny", "--rlhf_config", "rlhf/test_cpu"],
        ["config", "show", "gpu/base"],
        ["init", "--list"],
    ],
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom shoal.cli.main import main\n"
        f"code = main({arguments!r})\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert code == 0 and not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=HANG_S)


def test_python_m_shoal_works() -> None:
    result = subprocess.run([sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert result.stdout.startswith("shoal ")


def test_a_database_listens_at_one_address_or_where_it_does(run) -> None:
    database = ("--set", "strategy.kind=workunits", "--set", "transport.kind=postgres")
    for more in (("--host", "127.0.0.1", "--host", "127.0.0.2"), ("--set", "transport.host=db.example", "--host", "127.0.0.1")):
        code, _, err = run("coordinate", "starter", *database, *more)
        assert (code, "--host: a database" in err) == (2, True)


def test_a_process_that_ends_waits_for_its_threads_and_writes_all_that_was_printed(tmp_path: Path) -> None:
    text = (
        "import atexit, threading, time\n"
        "from shoal.process_exit import end_process\n"
        "atexit.register(print, 'called')\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('waited for'))).start()\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "print('printed')\n"
        "end_process(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout.split("\n")) == (3, ["printed", "waited for", "called", ""])


def test_a_profiler_tells_what_it_saw_of_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cProfile", "-o", str(tmp_path / "seen"), "-m", "shoal", "--version"]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, timeout=HANG_S, check=False).returncode == 0
    assert (tmp_path / "seen").stat().st_size > 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_output_that_a_full_disk_does_not_take_is_told() -> None:
    with open("/dev/full", "w") as full:
        command, environ = [sys.executable, "-m", "shoal", "--version"], {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S, check=False, env=environ)
    assert (done.returncode, done.stderr) == (1, "error: not all that was printed could be written: No space left on device\n")


# --- output without a reader ------------------------------------------------------------------


def test_output_that_is_read_no_further_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shoal … | head`"""
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr("shoal.cli.main._run", lambda arguments: print("text", flush=True))
    with suppress(BrokenPipeError), open(os.devnull, "w") as errors, open(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", errors)
        assert main([]) == 0


def test_another_connection_that_breaks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[str]) -> int:
        raise BrokenPipeError("the other end of a connection")

    monkeypatch.setattr("shoal.cli.main._run", run)
    with pytest.raises(BrokenPipeError):
        main([])
