"""Every line that a user of the five documents types: what they type now is run, made small, and no line of the documents is missing.

The table is command_lines.yaml. A row has the document's line, what is typed now, and the test that runs it, or the reason why none does.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal import TrainerConfig, train
from shoal.cli.main import main
from shoal.config.load import ConfigFile, Override, resolve
from shoal.config.presets import FOLDER
from tests.support.ava_stacks import sets, smaller, write_texts

ROOT = Path(__file__).resolve().parents[2]
ROWS: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "whole" / "command_lines.yaml").read_text(encoding="utf-8"))
DOCUMENTS = ("classroom", "smolcluster", "dist-llm-train", "diloco-fsdp", "ava")


def rows_of(test: str, *, quick: int = 1000) -> list[Any]:
    """The rows that name a test. Those after the first `quick` take longer and show nearly the same."""
    rows = [row for row in ROWS if row.get("test", "").endswith(f"::{test}")]
    assert rows, test
    marks = {True: [pytest.mark.long], False: []}
    return [pytest.param(row, id=row["line"].splitlines()[0][:60], marks=marks[number >= quick]) for number, row in enumerate(rows)]


# --- the table -------------------------------------------------------------------------------------------


def test_every_row_names_a_test_that_there_is_or_a_reason() -> None:
    for row in ROWS:
        assert ("test" in row) != ("reason" in row), row["line"]
        if "test" in row:
            file, _, name = row["test"].partition("::")
            functions = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
            assert name in functions, row["test"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_line_of_a_document_is_missing(spec: Path, document: str) -> None:
    listed = {meaning(row["line"]) for row in ROWS if row["document"] == document}
    assert listed == {meaning(line) for line in lines_of((spec / f"{document}.md").read_text(encoding="utf-8"))}


def lines_of(text: str) -> list[str]:
    """The shell lines of a document, its Python examples, and the options that it shows elsewhere."""
    found = re.findall(r"`(--[a-z_]+ [^`]+)`", text)
    for language, body in re.findall(r"^```(bash|python|yaml)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "python" and not body.startswith("python -c"):
            found.append(body)
            continue
        lines = (" ".join(re.sub(r"(^|\s)#.*", "", line).split()) for line in re.sub(r"\\\n\s*", " ", body).splitlines())
        found += [line for line in lines if line and (language != "yaml" or line.startswith("--"))]
    return found


def meaning(line: str) -> str:
    """Examples in Python are equal if they mean the same; their comments and line breaks may differ."""
    try:
        return ast.dump(ast.parse(line))
    except SyntaxError:
        return line


# --- what is typed now -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: the files that ship where the documents have them, and texts to learn from."""
    monkeypatch.chdir(tmp_path)
    for group in ("gpu", "hardware", "distributed", "rlhf"):
        place = tmp_path / "configs" / group
        place.mkdir(parents=True)
        for file in (Path(FOLDER) / group).glob("*.yaml"):
            (place / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    write_texts(tmp_path)
    return tmp_path


def run(command: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    """Type a line; variables may stand before the program. `more`: options that make a run small."""
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] != "shoal":
        return subprocess.run(command, shell=True, check=False, timeout=60).returncode
    return int(main([*words[1:], *more]))


def presets_in(command: str) -> list[str]:
    return re.findall(r"configs/(\S+?)\.yaml", command)


@pytest.mark.parametrize("row", rows_of("test_a_line_of_the_rack_trains", quick=0))
def test_a_line_of_the_rack_trains(row: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = row["now"]
    assert run(command.replace("shoal train", "shoal config check"), monkeypatch) == 0, "as it stands, it loads"
    small = smaller(presets_in(command), {"engine.kind": "single", "launch.devices_per_node": "null"})
    assert run(command, monkeypatch, "--run-dir", "run", *small) == 0
    steps = re.search(r"--max_steps (\d+)", command)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", int(steps[1]) if steps else 5)
    assert math.isfinite(summary["metrics"]["train"]["loss"])


@pytest.mark.parametrize("row", rows_of("test_a_line_for_several_machines_writes_a_job"))
def test_a_line_for_several_machines_writes_a_job(row: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = row["now"]
    assert run(command, monkeypatch, "--run-dir", "job") == 0
    assert "torchrun --nnodes=2 --nproc-per-node=16" in (folder / "job" / "job.sbatch").read_text()
    engine = resolve([ConfigFile("job/config.yaml")], environ={}, resolved=True).run.engine
    assert (engine.kind, engine.zero_stage) == ("deepspeed", 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", rows_of("test_the_line_for_feedback_trains_a_policy", quick=0))
def test_the_line_for_feedback_trains_a_policy(row: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vaderSentiment")
    base, policy = row["now"]
    small = smaller(presets_in(base)) + sets({"model.max_seq_len": "64", "data.sequence_length": "64"})
    assert run(base, monkeypatch, *small) == 0
    assert run(policy, monkeypatch, "--run-dir", "feedback", *small, *sets({"rlhf.ppo.steps": "1"})) == 0
    assert json.loads((folder / "feedback" / "policy" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.parametrize("row", rows_of("test_the_document_validates_a_file_that_ships"))
def test_the_document_validates_a_file_that_ships(row: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in row["now"]:
        assert run(command.replace("python ", f"{sys.executable} ", 1), monkeypatch) == 0


@pytest.mark.parametrize("row", rows_of("test_the_documents_own_loader_gives_what_shoal_loads"))
def test_the_documents_own_loader_gives_what_shoal_loads(row: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    exec(compile(row["line"], "ava.md", "exec"), scope)
    assert capsys.readouterr().out == "Final batch size: 32\nPrecision: fp8\n"
    files = ["configs/gpu/base.yaml", "configs/hardware/h100_80gb.yaml", "configs/distributed/deepspeed_zero2.yaml"]
    assert main(["config", "show", *files, "--batch_size", "32", "--learning_rate", "5e-5", "--format", "json"]) == 0
    ours, theirs = json.loads(capsys.readouterr().out), scope["config"]
    assert ours["training"]["batch_size"] == theirs["training"]["batch_size"] == 32
    assert ours["training"]["precision"]["kind"] == theirs["training"]["mixed_precision"] == "fp8"
    assert ours["training"]["optimizer"]["learning_rate"] == theirs["training"]["learning_rate"] == 5e-5
    assert ours["model"]["num_layers"] == theirs["model"]["num_layers"] == 32
    assert ours["engine"]["zero_stage"] == theirs["deepspeed"]["zero_stage"] == 2


def test_layers_give_the_values_that_the_document_shows(folder: Path) -> None:
    (folder / "base.yaml").write_text("dialect: ava\ntraining:\n  batch_size: 8\n  learning_rate: 0.001\n")
    (folder / "h100_80gb.yaml").write_text("dialect: ava\ntraining:\n  batch_size: 16\n")
    loaded = resolve(
        [ConfigFile("base.yaml"), ConfigFile("h100_80gb.yaml")], [Override("batch_size", "32", "--batch_size 32", exact=False)]
    )
    assert (loaded.run.training.batch_size, loaded.run.training.optimizer.learning_rate) == (32, 0.001)


SMALL_GPT = {"model.hidden_size": "16", "model.num_layers": "1", "model.num_heads": "2", "model.intermediate_size": "16"}
TEXTS = {"data.source": "{kind: text, path: texts}", "data.tokenizer": "bytes"}
SHELF = SMALL_GPT | TEXTS | {"logging.sinks": "[]", "training.max_steps": "3"}


@pytest.mark.parametrize("row", rows_of("test_a_line_of_the_shelf_trains"))
def test_a_line_of_the_shelf_trains(row: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "custom_config.yaml").write_text((Path(FOLDER) / "smolcluster" / "gpt_config.yaml").read_text())
    (command,) = row["now"]
    small = {**SHELF, "training.schedule.warmup_steps": "1", "training.batch_size": "4", "model.max_seq_len": "16"}
    assert run(command, monkeypatch, "--run-dir", "run", *sets(small)) == 0
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 3


VOLUNTEERS = {
    "transport.kind": "in-process",
    "coordinator.heartbeat_interval_s": "0.5",
    "model.hidden_size": "16",
    "training.max_steps": "4",
    "logging.sinks": "[]",
}


@pytest.mark.parametrize("row", rows_of("test_a_line_of_the_volunteers_trains", quick=1))
def test_a_line_of_the_volunteers_trains(row: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.yaml", "custom_config.yaml"):
        (folder / name).write_text((Path(FOLDER) / "dist-llm-train" / "wan-conservative.yaml").read_text())
    (command,) = row["now"]
    assert run(command, monkeypatch, "--run-dir", "run", *sets(VOLUNTEERS)) == 0
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 4
    used = resolve([ConfigFile("run/config.yaml")], environ={}, resolved=True).run
    if "TELEMETRY_ALPHA" in command:
        assert used.coordinator.telemetry_alpha == 0.3
    if "DEBUG" in command:
        assert used.log_level == "DEBUG"
    if "--state-db" in command:
        assert Path("state.db").exists()
        assert Path("checkpoint.pt").exists()


LESSON = (
    "database: {host: localhost, port: 5432, database: distributed_gan, user: username, password: hush}\n"
    "training: {batch_size: 16, batches_per_work_unit: 2, num_workers_per_update: 1, num_epochs: 5}\n"
)


@pytest.mark.parametrize("row", rows_of("test_a_line_of_the_classroom_runs"))
def test_a_line_of_the_classroom_runs(
    row: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "custom").mkdir()
    (folder / "custom" / "config.yaml").write_text(LESSON)
    if "CONFIG_PATH" not in row["line"]:
        (folder / "config.yaml").write_text(LESSON.replace("{host", "\n  {host").replace("hush}", "hush\n  }"))
    for command in row["now"]:
        assert run(command, monkeypatch) == 0, command
    assert "classroom configuration, gan with a model of kind dcgan" in capsys.readouterr().out
    if row["line"].startswith("sed"):
        assert "hush" not in (folder / "config.yaml.template").read_text()
    if row["line"].startswith("export DB_PASSWORD"):
        loaded = resolve([ConfigFile("config.yaml")]).run
        assert loaded.transport.password.reveal() == "secret"  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", rows_of("test_a_trainer_config_of_the_islands_trains", quick=0))
def test_a_trainer_config_of_the_islands_trains(row: dict[str, Any], folder: Path) -> None:
    """The document's own objects, with a model and data of this machine in the place of the hub's, and shorter."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    shape = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "model")
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("".join(json.dumps({"text": f"row {number} of many"}) + "\n" for number in range(200)))
    scope: dict[str, Any] = {"TrainerConfig": TrainerConfig}
    exec(compile(row["line"], "diloco-fsdp.md", "exec"), scope)
    here = {"model_name": "model", "dataset_name": "rows", "seq_len": 32, "max_steps": 2, "diloco_loops": 2, "log_with": "tensorboard"}
    subset = None if "sample" in str(scope["config"].subset) else scope["config"].subset  # a configuration's name on the hub
    config = dataclasses.replace(scope["config"], **here, subset=subset, grad_accum=2, num_workers=0, eval_batches=0)
    overrides = ["data.tokenizer=bytes", "training.device=cpu", "engine.kind=single", "transport.kind=in-process"]
    result = train(config, workers=1, overrides=overrides, run_dir=folder / "run", progress=False)
    assert (result.status, result.steps) == ("completed", 2)
