"""Every documented key: it loads, it changes what is resolved, and a wrong type is refused at its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config.dialects import DIALECTS, candidates
from shoal.config.load import ConfigFile, LoadedConfig, resolve
from shoal.config.source_span import SourceText
from shoal.config.text import YamlNode, data_of, parse

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.yaml"))
DIALECT_OF = {path: next(name for name in DIALECTS if path.stem.startswith(name)) for path in CORPUS}

# Keys that count only beside another value: what to set along with them.
BESIDE = {
    "training.krum_f": "training.aggregation_rule=krum",
    "training.bulyan_f": "training.aggregation_rule=bulyan",
    "training.sync_window": "controller.use_async_training=false",
    "training.sync_max_wait_s": "controller.use_async_training=false",
}
# Another legal value, where counting up or turning round does not give one.
OTHER: dict[str, Any] = {
    "controller.scheduler": "priority",
    "model.name": "small-lstm",
    "model.type": "GPT",
    "dataset.name": "SNLI",
    "training.compression": "quantize",
    "training.aggregation_rule": "mean",
    "training.warmup_schedule": "linear",
    "training.lr_scheduler_type": "linear",
    "training.mixed_precision": "no",
    "training.eval_strategy": "no",
    "training.save_strategy": "epoch",
    "data.padding_side": "left",
    "data.mixing_temperature": 2.5,
    "model.router_type": "hash",
    "deepspeed.precision": "fp16",
    "deepspeed.optimizer.type": "Adam",
    "deepspeed.optimizer.params.betas": [0.8, 0.9],
    "deepspeed.zero_stage": 0,
    "causal_gpt2.active_decoding_strategy": "greedy",
    "outer_lr_schedule": "linear",
    "inner_opt": "SGD",
    "outer_opt": "Adam",
    "log_with": "wandb",
    "huggingface.repo_id": "teacher/gan",
    "huggingface.token": "hf_other",
    "database.password": "another",
    "data.max_train_examples": 10,
    "data.max_samples": 10,
    "training.trim_ratio": 0.1,
    "workers[0].port": 9001,
}


def leaves(path: Path) -> list[YamlNode]:
    """The values of a corpus file, mappings and lists of mappings opened."""
    problems: list[Any] = []
    root = parse(path.read_text(), SourceText(path.name, path.read_text()), problems.append)
    assert root is not None
    assert not problems
    found: list[YamlNode] = []

    def walk(node: YamlNode) -> None:
        if isinstance(node.value, dict) and not node.user_path.endswith("_kwargs"):
            for entry in node.value.values():
                walk(entry.value)
        elif isinstance(node.value, list) and any(isinstance(item.value, dict) for item in node.value):
            for item in node.value:
                walk(item)
        else:
            found.append(node)

    walk(root)
    return found


CASES = [pytest.param(path, node, id=f"{path.stem}:{node.user_path}") for path in CORPUS for node in leaves(path)]


def alone(path: Path, node: YamlNode) -> list[str]:
    """The lines of a file, without other spellings of the same setting (two that differ would be refused)."""
    dialect = DIALECTS[DIALECT_OF[path]]

    def targets(key: str) -> tuple[str, ...]:
        found = dialect.trie.find(tuple(key.split(".")))
        return found.row.to if found and found.row else ()

    lines = path.read_text().split("\n")
    for twin in leaves(path):
        if twin.user_path != node.user_path and set(targets(twin.user_path)) & set(targets(node.user_path)):
            lines[twin.span.line - 1] = "#"
    return lines


def rewritten(path: Path, node: YamlNode, value: str) -> str:
    """The text of a file with one value replaced, up to the end of its line."""
    lines = alone(path, node)
    line, column = node.span.line - 1, node.span.column - 1
    lines[line] = lines[line][:column] + value
    return "\n".join(lines)


def load_text(text: str, tmp_path: Path, dialect: str, overrides: str = "") -> LoadedConfig:
    from shoal.config.load import parse_override

    file = tmp_path / "case.yaml"
    file.write_text(text)
    settings = [parse_override(overrides)] if overrides else []
    return resolve([ConfigFile(str(file))], settings, dialect=dialect, environ={})


def resolved(loaded: LoadedConfig) -> Any:
    """All settings as plain data, whether or not rules between them hold."""

    def plain(tree: Any) -> Any:
        return {key: plain(item) for key, item in tree.items()} if isinstance(tree, dict) else data_of(tree)

    return plain(loaded.settings.tree)


def other(node: YamlNode) -> str:
    import json

    value = node.value
    key = node.user_path
    if key in OTHER:
        return json.dumps(OTHER[key])
    if isinstance(value, bool):
        return str(not value).lower()
    if value is None:
        return "7"
    if isinstance(value, (int, float)):
        return json.dumps(value + 1 if isinstance(value, int) else value / 2 or 0.25)
    if isinstance(value, list):
        return json.dumps([data_of(item) for item in value][::-1])
    if isinstance(value, dict):
        return "{foreach: true}"
    return json.dumps(f"{value}-other")


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_documented_file_loads_and_is_recognised(path: Path) -> None:
    loaded = resolve([ConfigFile(str(path))], environ={})
    assert loaded.ok, loaded.problems
    assert [parsed.layer.dialect for parsed in loaded.files] == [DIALECT_OF[path]]
    assert loaded.run is not None


@pytest.mark.parametrize(("path", "node"), CASES)
def test_a_documented_key_changes_what_is_resolved(path: Path, node: YamlNode, tmp_path: Path) -> None:
    dialect = DIALECT_OF[path]
    beside = BESIDE.get(node.user_path, "")
    before = load_text("\n".join(alone(path, node)), tmp_path, dialect, beside)
    after = load_text(rewritten(path, node, other(node)), tmp_path, dialect, beside)
    wrong = [problem for problem in after.problems if problem.code in ("unknown-key", "wrong-type", "out-of-range", "unknown-choice")]
    assert not wrong
    assert resolved(before) != resolved(after)


@pytest.mark.parametrize(("path", "node"), CASES)
def test_a_documented_key_of_a_wrong_type_is_refused_at_its_line(path: Path, node: YamlNode, tmp_path: Path) -> None:
    beside = BESIDE.get(node.user_path, "")
    loaded = load_text(rewritten(path, node, "[[]]"), tmp_path, DIALECT_OF[path], beside)
    assert not loaded.ok
    places = {(problem.labels[0].span.line, problem.path) for problem in loaded.problems if problem.code == "wrong-type"}
    assert any(line == node.span.line and (key == node.user_path or key.startswith(node.user_path)) for line, key in places), places


@pytest.mark.parametrize("name", DIALECTS)
def test_every_row_is_in_the_corpus(name: str) -> None:
    """A key nobody documented has no place in a table (flags and further spellings excepted)."""
    known = {
        "state_db",
        "ps_checkpoint",
        "num_gpus",
        "num_nodes",
        "rlhf.**",
        "port.*",
        "training.num_workunits_per_update",
        "training.text_file",
    }
    known |= {f"causal_gpt2.decoding_strategies.{way}.temperature" for way in ("greedy", "sampling")}
    written = {node.user_path for path in CORPUS if DIALECT_OF[path] == name for node in leaves(path)}

    def matches(row: str) -> bool:
        pattern = row.replace("[]", "[0]")
        return any(pattern == key or (pattern.endswith(".*") and key.startswith(pattern[:-1])) for key in written)

    rows = DIALECTS[name].rows
    missing = [row.path for row in rows if row.path not in known and not any(matches(path) for path in (row.path, *row.also, *row.old))]
    assert not missing


def test_a_default_of_a_dialect_differs_from_the_schema() -> None:
    """Defaults live in the schema; a table holds one only where its document says otherwise."""
    from shoal.config.dialects.table import parse_target
    from shoal.config.fields import as_data
    from shoal.config.layers import default_at

    for dialect in DIALECTS.values():
        for row in dialect.rows:
            if not row.has_default:
                continue
            value = row.convert(row.default) if row.convert else row.default
            for target in row.to:
                path, only_for = parse_target(target)
                kinds = {union: names[0] for union, names in only_for}
                assert as_data(default_at(path, kinds)) != value, (dialect.name, row.path)


def test_fragments_that_fit_several_dialects_ask(tmp_path: Path) -> None:
    file = tmp_path / "fragment.yaml"
    file.write_text("training:\n  batch_size: 8\n  learning_rate: 0.001\n")
    loaded = resolve([ConfigFile(str(file))], environ={})
    assert [problem.code for problem in loaded.problems] == ["ambiguous-dialect"]
    assert "--dialect" in loaded.problems[0].help
    for name in ("ava", "dist-llm-train", "smolcluster"):
        assert resolve([ConfigFile(str(file))], dialect=name, environ={}).ok
    file.write_text("dialect: ava\n" + file.read_text())
    assert resolve([ConfigFile(str(file))], environ={}).ok


def test_a_fragment_takes_the_dialect_of_the_files_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "fragment.yaml"
    file.write_text("training:\n  batch_size: 16\n")
    loaded = resolve([ConfigFile("gpu/base"), ConfigFile(str(file))], environ={})
    assert loaded.run.training.batch_size == 16


def test_detection_counts_known_keys() -> None:
    problems: list[Any] = []
    text = "training:\n  batch_size: 8\n  num_workunits_per_update: 2\n  lerning_rate_g: 1\n"
    root = parse(text, SourceText("x", text), problems.append)
    assert root is not None
    assert candidates(root) == ["classroom"]
