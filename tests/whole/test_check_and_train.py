"""`shoal config check` passes exactly what `shoal train` starts, and says beforehand what it would be refused for."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.config import missing_parts as refusals
from shoal.config.load import ConfigFile, LoadedConfig, Override, resolve
from shoal.config.presets import names
from shoal.config.schema import Run
from shoal.config.schema.engine import Engine
from shoal.launch.start import start_run
from shoal.launch.start_mode import StartOptions, plan_start

HERE = {
    "output_dir": "runs",
    "data.tokenizer": "bytes",
    "training.device": "cpu",
    "training.epochs": "1",
    "training.batch_size": "4",
    "training.gradient_accumulation_steps": "1",
    "training.global_batch_size": "null",
}
"""What any machine has, in the place of what presets expect on theirs: data sets, models of the hub, GPUs, a database."""
SMALL_GPT = {"model.kind": "gpt", "model.num_layers": "3", "model.hidden_size": "16", "model.num_heads": "2"}


def stand_ins(run: Run) -> dict[str, str]:
    text = run.chosen_task.needs != "images" and run.model.kind not in ("mlp", "dcgan")
    found = HERE | ({} if text else {"data.source.kind": "builtin", "data.source.name": "digits"})
    if text:
        Path("text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 1000)
        found |= {"data.source.kind": "text", "data.source.path": "text.txt"}
        found |= SMALL_GPT | {"data.sequence_length": "16", "model.max_seq_len": "32", "data.streaming": "false"}
    if run.model.kind == "mlp":
        found |= {"model.input_dim": "64"}
    if run.model.kind == "dcgan":
        found |= {"model.image_size": "8", "model.generator_features": "4", "model.discriminator_features": "4"}
    if run.training.precision.kind == "fp8":
        found |= {"training.allow_emulation": "true"}
    if not run.alone:
        found |= {"transport.kind": "in-process"}
    return found | {"engine.kind": "single"}


def said(text: str) -> list[str]:
    """Errors. Packages that are missing here are none for the check, which may be for another machine."""
    return sorted(line for line in text.splitlines() if re.match(r"error\[(?!missing-package)", line))


@pytest.mark.whole
@pytest.mark.parametrize("preset", names())
def test_presets_that_pass_the_check_start_and_others_are_refused_in_the_same_words(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, checked = main(["config", "check", preset]), capsys.readouterr()
    if code:
        assert main(["train", preset]) == 2
        assert said(capsys.readouterr().err) == said(checked.err) != []
        assert list(tmp_path.iterdir()) == [], "a run that is refused leaves nothing behind"
        return
    with start(preset) as loop:
        assert loop.directory.path.is_dir()


@contextlib.contextmanager
def start(preset: str) -> Iterator[Any]:
    own = stand_ins(resolve([ConfigFile(preset)]).run)

    def load(more: Sequence[Override]) -> LoadedConfig:
        return resolve([ConfigFile(preset)], [*(Override(path, value, f"--set {path}={value}") for path, value in own.items()), *more])

    planned = plan_start(load, StartOptions(default_workers=2))
    with start_run(planned, []) as made:
        yield made.loop
        if hasattr(made.loop, "server"):
            made.loop.server.close()


def test_every_preset_is_listed_and_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list"]) == 0
    told = capsys.readouterr().out
    for preset in names():
        assert preset in told
        assert main(["config", "check", preset]) == 0


def test_everything_is_said_at_once_and_at_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "starter", "--set", "training.precision.kind=nvfp5", "--set", "training.epochs=-1"]) == 2
    told = capsys.readouterr().err
    assert "nvfp5" in told
    assert "training.epochs" in told
    assert "command line" in told


def test_a_missing_package_is_a_warning_of_the_check_and_a_refusal_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = util.find_spec
    monkeypatch.setattr(refusals, "find_spec", lambda name: None if name == "dp_accounting" else real(name))
    monkeypatch.chdir(tmp_path)
    asked = ["starter", "--set", "strategy.kind=syncps", "--set", "updates.privacy.enabled=true", "--set", "updates.clip_norm=1"]
    assert main(["config", "check", *asked]) == 0
    assert "warning[missing-package]: accounting for privacy needs dp-accounting" in capsys.readouterr().err
    assert main(["train", *asked, "--workers", "2"]) == 2
    assert "error[missing-package]: accounting for privacy needs dp-accounting" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_every_engine_that_can_be_chosen_is_built() -> None:
    assert set(Engine.kinds) >= {"single", "ddp", "fsdp", "deepspeed", "pipeline", "collectives"}
    assert all(callable(kind.builder()) for kind in Engine.kinds.values())


def test_the_check_says_what_a_file_alone_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`shoal train` refuses the same file in the same words, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    Path("lan.yaml").write_text("controller: {port: 8000}\ntasks: [{id: a}]\n")
    for file in ("smolcluster/cluster_config_mp", "lan.yaml"):
        assert main(["config", "check", file]) == 0
        assert "warning[missing-model]: no model is given" in capsys.readouterr().err
        assert main(["train", file]) == 2
        assert "error[missing-model]: no model is given" in capsys.readouterr().err
    assert main(["config", "check", "smolcluster/cluster_config_mp", "smolcluster/gpt_config"]) == 0
    assert "missing-model" not in capsys.readouterr().err


def test_the_check_refuses_conversations_for_a_model_without_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chats").mkdir()
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with gzip.open(tmp_path / "chats" / "train.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    config = tmp_path / "config.yaml"
    text = f"dialect: shoal\nmodel: {{kind: gpt}}\ndata: {{source: {{kind: text, path: {tmp_path}/chats}}, tokenizer: TOKENIZER}}\n"
    for tokenizer in ("bytes", str(tmp_path)):
        config.write_text(text.replace("TOKENIZER", tokenizer))
        assert main(["config", "check", str(config)]) == 2
        told = capsys.readouterr().err
        assert "error[missing-template]: the rows of" in told
        assert "set data.chat_template to chatml, llama3, qwen, plain, or to a file" in " ".join(told.split())
        assert main(["config", "check", str(config), "--set", "data.chat_template=chatml"]) == 0
        capsys.readouterr()
    for file, content in (("tokenizer_config.json", '{"chat_template": "x"}'), ("chat_template.jinja", "x")):
        (tmp_path / file).write_text(content)
        assert main(["config", "check", str(config)]) == 0
        (tmp_path / file).unlink()
    assert main(["config", "check", str(config), "--set", "data.chat_template=chatlm"]) == 0
    assert "there is nothing at chatlm" in capsys.readouterr().err


def test_the_check_refuses_packed_conversations_for_a_model_that_retrieves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, config = tmp_path / "chats.jsonl", tmp_path / "config.yaml"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n")
    model = "{kind: moe, retrieval: {enabled: true, chunk_size: 4}}"
    data = f"{{batching: packed, sequence_length: 16, chat_template: plain, source: {{kind: text, path: {file}}}}}"
    config.write_text(f"dialect: shoal\nmodel: {model}\ndata: {data}\n")
    assert main(["config", "check", str(config)]) == 2
    assert "model.retrieval reads for a row as a whole" in " ".join(capsys.readouterr().err.split())
    assert main(["config", "check", str(config), "--set", "data.batching=dynamic"]) == 0
    assert main(["config", "check", str(config), "--set", "model.retrieval.enabled=false"]) == 0


def test_the_check_refuses_pairs_of_conversations_for_a_model_without_a_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, answer = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": asked, "chosen": answer, "rejected": answer}) + "\n")
    config = tmp_path / "config.yaml"
    config.write_text(f"dialect: shoal\ntask: dpo\nmodel: {{kind: gpt}}\ndata: {{source: {{kind: preferences, path: {pairs}}}}}\n")
    phases = ["gpu/tiny", "--rlhf_config", "rlhf/test_cpu"]
    pairs_of_phases = ["--set", f"rlhf.fine_tune={{preferences: {pairs}}}", "--set", f"rlhf.reward={{kind: trained, preferences: {pairs}}}"]
    for words, problems in (([str(config)], 1), ([*phases, *pairs_of_phases], 2)):
        assert main(["config", "check", *words]) == 2
        assert capsys.readouterr().err.count("error[missing-template]: the rows of") == problems
        assert main(["config", "check", *words, "--set", "data.chat_template=plain"]) == 0
        capsys.readouterr()
    pairs.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    assert main(["config", "check", *phases, *pairs_of_phases]) == 0


def test_the_check_gives_the_command_for_workers_and_names_missing_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "check", "classroom/small-class", "--set", "data.source.path=faces", "--set", "data.source.download=null"]) == 0
    said = capsys.readouterr().err
    assert "`shoal train FILE --workers N` starts N workers here" in said
    assert "warning[missing-data]: there is nothing at faces on this machine" in said
    Path("faces").mkdir()
    assert main(["config", "check", "classroom/small-class", "--set", "data.source.path=faces", "--workers", "2"]) == 2, "no such option"


def test_a_pipeline_reads_its_data_before_other_machines_are_asked_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--set", "data.source.kind=wikitext", "--set", "data.source.path=nowhere", "--set", "transport.port=0"]
    assert main(["coordinate", "smolcluster/cluster_config_mp", "smolcluster/gpt_config", *asked]) == 2
    assert "there are no WikiText files in nowhere" in (said := capsys.readouterr().err) or "nowhere" in said
    assert "shoal join" not in said
