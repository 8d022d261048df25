"""The documents themselves: every YAML block and every TrainerConfig in them loads verbatim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal import TrainerConfig
from shoal.config.load import ConfigFile, resolve
from shoal.config.problems import errors, render

ENVIRON = {"DB_PASSWORD": "secret", "HF_TOKEN": "hf_secret"}
DOCUMENTS = {"classroom": "classroom", "smolcluster": "smolcluster", "dist-llm-train": "dist-llm-train", "ava": "ava"}


def blocks(spec: Path, document: str, language: str) -> list[str]:
    text = (spec / f"{document}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def files(block: str) -> list[str]:
    """A block is one file, or several alternatives that repeat a top-level key, each under a comment of its own."""
    tops = re.findall(r"^([a-z_]+):", block, re.MULTILINE)
    if len(tops) == len(set(tops)) and not re.search(r"^--", block, re.MULTILINE):
        return [block]
    parts = re.split(r"^(?=# )", block, flags=re.MULTILINE)
    return [part for part in parts if re.search(r"^[a-z_]+:", part, re.MULTILINE)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_yaml_block_loads(spec: Path, document: str, tmp_path: Path) -> None:
    count = 0
    for block in blocks(spec, document, "yaml"):
        for text in files(block):
            file = tmp_path / "block.yaml"
            file.write_text(text, encoding="utf-8")
            loaded = resolve([ConfigFile(str(file))], dialect=DOCUMENTS[document], environ=ENVIRON)
            assert not errors(loaded.problems), f"{text}\n{render(loaded.problems)}"
            count += 1
    assert count >= 7


@pytest.mark.parametrize("document", DOCUMENTS)
def test_whole_files_are_recognised_without_being_told(spec: Path, document: str, tmp_path: Path) -> None:
    recognised = 0
    for block in blocks(spec, document, "yaml"):
        for text in files(block):
            file = tmp_path / "block.yaml"
            file.write_text(text, encoding="utf-8")
            loaded = resolve([ConfigFile(str(file))], environ=ENVIRON)
            if any(problem.code == "ambiguous-dialect" for problem in loaded.problems):
                assert len(text.splitlines()) < 20, "only a fragment is ambiguous"
                continue
            assert [parsed.layer.dialect for parsed in loaded.files] == [DOCUMENTS[document]], text
            recognised += 1
    assert recognised >= 6


def test_every_trainer_config_loads(spec: Path) -> None:
    configs = [block for block in blocks(spec, "diloco-fsdp", "python") if "TrainerConfig(" in block]
    assert len(configs) == 4
    for block in configs:
        scope: dict[str, object] = {"TrainerConfig": TrainerConfig}
        exec(compile(block, "diloco-fsdp.md", "exec"), scope)
        config = scope["config"]
        assert isinstance(config, TrainerConfig)
        run = config.to_run()
        assert run.strategy.kind == "diloco"
        assert run.engine.kind == "fsdp"
        assert run.training.optimizer.learning_rate == config.lr


def test_documented_fields_of_trainer_config_are_all_there(spec: Path) -> None:
    text = (spec / "diloco-fsdp.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^- \*\*([a-z]\w+)\*\*:", text, re.MULTILINE))
    from dataclasses import fields

    assert {field.name for field in fields(TrainerConfig)} == documented


@pytest.mark.parametrize(
    "layers",
    [
        ("gpu/base", "hardware/a100_80gb"),
        ("gpu/large", "hardware/h100_80gb"),
        ("gpu/base", "hardware/a100_80gb", "distributed/deepspeed_zero1"),
        ("gpu/base", "hardware/a100_80gb", "distributed/deepspeed_zero2"),
        ("gpu/large", "hardware/h100_80gb", "distributed/deepspeed_zero3"),
        ("gpu/base", "rlhf/test_cpu"),
        ("smolcluster/cluster_config_edp", "smolcluster/nn_config"),
        ("smolcluster/cluster_config_syncps", "smolcluster/nn_config"),
        ("smolcluster/cluster_config_edp", "smolcluster/gpt_config"),
        ("smolcluster/cluster_config_mp", "smolcluster/gpt_config"),
        ("smolcluster/cluster_config_inference", "smolcluster/model_config_inference"),
    ],
)
def test_documented_combinations_load(layers: tuple[str, ...]) -> None:
    loaded = resolve([ConfigFile(name) for name in layers], environ={})
    assert loaded.ok, render(loaded.problems)
