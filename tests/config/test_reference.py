"""Generated documents are fresh, the JSON Schema is good, and migration keeps meaning and comments."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shoal import ConfigError, TrainerConfig
from shoal.config.dialects import DIALECTS
from shoal.config.field_docs import field_docs
from shoal.config.fields import Section
from shoal.config.load import ConfigFile, resolve
from shoal.config.migrate import migrate
from shoal.config.presets import names
from shoal.config.reference import OLD_COMMANDS, dialects_page, json_schema, settings_page
from shoal.config.schema import Run

ROOT = Path(__file__).resolve().parents[2]
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.yaml"))


@pytest.mark.parametrize(("name", "page"), [("dialects.md", dialects_page), ("settings.md", settings_page)])
def test_generated_pages_are_fresh(name: str, page: Any) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page(), "run `make docs`"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_page_of_dialects_leads_to_the_old_commands_of_each(dialect: str) -> None:
    page = (ROOT / "docs" / "dialects.md").read_text(encoding="utf-8")
    head = page.partition("\n## ")[0]
    for name in OLD_COMMANDS[dialect]:
        assert f"[{name}]({name})" in head
        tables = re.findall(r"^\|.*\|\n\|---", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert "| you used to type | now |\n|---" in tables, name
    assert f"[below](#{dialect})" in head
    assert f"\n## {dialect}\n" in page


def test_every_setting_of_the_schema_is_documented() -> None:
    undocumented: set[str] = set()
    seen: set[type[Section]] = set()

    def visit(section: type[Section]) -> None:
        if section in seen:
            return
        seen.add(section)
        assert section.__doc__, section
        docs = field_docs(section)
        for name, field in section.fields().items():
            inner = list(field.checker.sections())
            for below in inner:
                visit(below)
            if not inner and name not in docs and name not in ("kind", "enabled"):
                undocumented.add(f"{section.__name__}.{name}")

    visit(Run)
    assert not undocumented


def test_the_schema_accepts_native_files_and_refuses_others() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name in names():
        document = _yaml_1_2(migrate(name))
        assert not list(validator.iter_errors(document)), name
    assert list(validator.iter_errors({"sed": 1}))
    assert list(validator.iter_errors({"seed": "x"}))
    assert list(validator.iter_errors({"model": {"kind": "gtp"}}))
    assert not list(validator.iter_errors({"seed": "${SEED:-1}", "training": {"compile": "${C}"}}))


def test_the_schema_helps_an_editor() -> None:
    schema = json_schema()
    assert schema["properties"]["seed"]["description"]
    assert schema["properties"]["seed"]["default"] == 42
    kinds = schema["properties"]["model"]["properties"]["kind"]["enum"]
    assert kinds == ["mlp", "lstm", "gpt", "moe", "dcgan", "huggingface", "live", "factory"]


def _yaml_1_2(text: str) -> Any:
    from shoal.config.source_span import SourceText
    from shoal.config.text import data_of, parse

    root = parse(text, SourceText("m", text), lambda problem: pytest.fail(problem.message))
    assert root is not None
    return data_of(root)


@pytest.mark.parametrize("name", [*names(), *map(str, CORPUS)])
def test_a_migrated_file_means_the_same(name: str, tmp_path: Path) -> None:
    file = tmp_path / "native.yaml"
    file.write_text(migrate(name))
    environ = {"DB_PASSWORD": "password", "HF_TOKEN": ""}
    before, after = resolve([ConfigFile(name)], environ=environ), resolve([ConfigFile(str(file))], environ=environ)
    assert [parsed.layer.dialect for parsed in after.files] == ["shoal"]
    assert after.run == before.run


def test_comments_and_variables_survive_and_secrets_do_not(tmp_path: Path) -> None:
    file = tmp_path / "class.yaml"
    file.write_text(
        "# Our class\n\n# where it lives\ndatabase:\n  host: ${DB_HOST}   # the school's server\n"
        "  port: ${DB_PORT:-5432}\n  password: 'hunter2'\n"
        "training:\n  # twelve laptops\n  num_workunits_per_update: 5\n  batch_size: 16 # small\n"
    )
    text = migrate(str(file))
    assert "# Our class" in text
    assert "host: ${DB_HOST}  # the school's server" in text
    assert "  # twelve laptops\n  units_per_update: 5" in text
    assert "batch_size: 16  # small" in text
    assert "hunter2" not in text
    assert "password: ${DB_PASSWORD}" in text
    native = tmp_path / "native.yaml"
    native.write_text(text)
    run = resolve([ConfigFile(str(native))], environ={"DB_HOST": "h", "DB_PASSWORD": "p"}).run
    assert (run.transport.host, run.transport.port) == ("h", 5432)


def test_a_file_with_errors_is_not_migrated(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("database:\n  hots: x\n  port: 1\n")
    with pytest.raises(ConfigError, match="did you mean `host`"):
        migrate(str(file))


# --- TrainerConfig -----------------------------------------------------------------------------


def test_trainer_config_and_yaml_are_one() -> None:
    fields = yaml.safe_load(Path(ROOT / "src/shoal/config/presets/diloco/production.yaml").read_text())
    run = TrainerConfig(**fields | {"lr": 5e-6}).to_run()
    assert run == resolve([ConfigFile("diloco/production")], environ={}).run


def test_trainer_config_defaults_are_those_of_the_files(tmp_path: Path) -> None:
    file = tmp_path / "least.yaml"
    file.write_text("model_name: m\ndataset_name: d\n")
    assert TrainerConfig("m", "d").to_run() == resolve([ConfigFile(str(file))], environ={}).run


def test_trainer_config_reports_problems_by_field() -> None:
    with pytest.raises(ConfigError) as error:
        TrainerConfig("m", "d", batch_size=0, outer_opt="SDG", outer_lr_schedule="cosin").to_run()
    assert {problem.path for problem in error.value.problems} == {"batch_size", "outer_opt", "outer_lr_schedule"}
    assert "did you mean `SGD`" in str(error.value)


def test_outer_schedule_none_is_constant() -> None:
    assert TrainerConfig("m", "d", outer_lr_schedule=None).to_run().strategy.outer_schedule == "constant"
    assert TrainerConfig("m", "d", outer_lr_schedule="polynomial").to_run().strategy.outer_schedule == "polynomial"


def test_null_in_a_file_is_none_in_trainer_config(tmp_path: Path) -> None:
    absent = [item.name for item in dataclasses.fields(TrainerConfig) if item.default is None]
    assert {"outer_lr_schedule", "log_with"} <= set(absent)
    file = tmp_path / "nulls.yaml"
    file.write_text("model_name: m\ndataset_name: d\n" + "".join(f"{name}: null\n" for name in absent))
    assert resolve([ConfigFile(str(file))], environ={}).run == TrainerConfig("m", "d").to_run()
