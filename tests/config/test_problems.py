"""Problems are told like a good compiler's, in three formats, and never tell a secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from shoal.config.dialects import DIALECTS
from shoal.config.load import ConfigFile, LoadedConfig, parse_override, resolve
from shoal.config.problems import render
from shoal.config.show import diff, explain, show


def load(tmp_path: Path, text: str, dialect: str | None = "shoal", *overrides: str) -> LoadedConfig:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return resolve([ConfigFile(str(file))], [parse_override(o) for o in overrides], dialect=dialect, environ={})


def test_the_text_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("distributed.yaml").write_text("strategy:\n  kind: syncps\n  pull_evry_steps: 100\n")
    loaded = resolve([ConfigFile("distributed.yaml")], dialect="shoal", environ={})
    assert (
        render(loaded.problems)
        == """\
error[unknown-key]: unknown key `pull_evry_steps` in strategy (kind syncps)
 --> distributed.yaml:3:3  (distributed layer)
  |
3 |   pull_evry_steps: 100
  |   ^^^^^^^^^^^^^^^ not a setting here
  = help: did you mean `pull_every_steps`?

1 problem in 1 file; nothing was started."""
    )


def test_all_problems_come_at_once_in_order(tmp_path: Path) -> None:
    loaded = load(tmp_path, "seed: -1\nmodel:\n  kind: gtp\ntraining:\n  batch_size: many\n  optimizer: {name: adamw}\nnonsense: 1\n")
    assert [(p.code, p.labels[0].span.line) for p in sorted(loaded.problems, key=lambda p: p.labels[0].span.line)] == [
        ("out-of-range", 1),
        ("unknown-choice", 3),
        ("wrong-type", 5),
        ("unknown-choice", 6),
        ("unknown-key", 7),
    ]
    text = render(loaded.problems)
    assert "5 problems in 1 file; nothing was started." in text
    assert "did you mean `AdamW`?" in text
    assert "did you mean `gpt`?" in text
    positions = [text.index(f":{line}:") for line in (1, 3, 5, 6, 7)]
    assert positions == sorted(positions)


def test_the_users_own_spelling(tmp_path: Path) -> None:
    loaded = load(tmp_path, "training:\n  learning_rate_g: fast\n  num_workunits_per_update: 0\n", "classroom")
    text = render(loaded.problems)
    assert "`training.learning_rate_g`: expected a number at least 0, found the text `fast`" in text
    assert "`training.num_workunits_per_update`: expected a whole number at least 1, found `0`" in text


def test_a_misplaced_key_is_told_its_place(tmp_path: Path) -> None:
    loaded = load(tmp_path, "training:\n  batch_size: 8\n  batches_per_work_unit: 2\n  poll_interval: 3\n", "classroom")
    assert "it belongs under `worker`" in render(loaded.problems)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("training: {batch_size: 1_000}\n", "write 1000"),
        ("training: {batch_size: 08}\n", "a leading zero is ambiguous"),
        ("training: {batch_size: '8'}\n", "without quotes"),
        ("training: {compile: yes}\n", "write `true`"),
        ("name: 5\n", 'quote it: "5"'),
        ("model: gpt\n", "write `{kind: gpt}`"),
        ("model: {kind: huggingface}\n", "`pretrained` is required"),
    ],
)
def test_slips_are_helped(tmp_path: Path, text: str, hint: str) -> None:
    loaded = load(tmp_path, text)
    assert not loaded.ok
    assert hint in render(loaded.problems)


def test_two_values_name_both_places(tmp_path: Path) -> None:
    text = "worker:\n  num_workers_dataloader: 2\ndata:\n  num_workers_dataloader: 3\n"
    loaded = load(tmp_path, text, "classroom")
    assert [problem.code for problem in loaded.problems] == ["two-values"]
    assert [label.span.line for label in loaded.problems[0].labels] == [4, 2]
    assert load(tmp_path, text.replace("3", "2"), "classroom").ok


def test_the_old_spelling_warns_and_both_are_refused(tmp_path: Path) -> None:
    old = load(tmp_path, "training:\n  num_workers_per_update: 4\n", "classroom")
    assert old.run.strategy.units_per_update == 4
    assert [(p.code, p.severity) for p in old.problems] == [("old-spelling", "warning")]
    both = load(tmp_path, "training:\n  num_workers_per_update: 4\n  num_workunits_per_update: 4\n", "classroom")
    assert not both.ok


def test_the_controller_wins_with_a_warning(tmp_path: Path) -> None:
    text = "training:\n  max_staleness: 5\n  use_async_training: false\ncontroller:\n  max_staleness: 50\n  use_async_training: true\n"
    loaded = load(tmp_path, text, "dist-llm-train")
    assert (loaded.run.strategy.kind, loaded.run.strategy.max_staleness) == ("async", 50)
    warned = {problem.path: [label.span.line for label in problem.labels] for problem in loaded.problems}
    assert warned == {"training.max_staleness": [2, 5], "training.use_async_training": [3, 6]}


def test_precision_in_two_sections_of_one_file_must_agree(tmp_path: Path) -> None:
    text = "training:\n  mixed_precision: fp16\ndeepspeed:\n  enabled: true\n  precision: bf16\n"
    assert [p.code for p in load(tmp_path, text, "ava").problems] == ["two-values"]
    layered = resolve([ConfigFile("gpu/base"), ConfigFile("distributed/deepspeed_zero1")], environ={})
    assert layered.run.training.precision.kind == "bf16", "a later layer wins"
    fp8 = "deepspeed:\n  precision: fp8\n  fp8_enabled: false\n"
    assert [p.code for p in load(tmp_path, fp8, "ava").problems] == ["two-values", "needs-gpu"]


def test_json_form(tmp_path: Path) -> None:
    loaded = load(tmp_path, "seed: x\n")
    (problem,) = json.loads(render(loaded.problems, "json"))
    assert set(problem) >= {"code", "message", "file", "line", "column", "path", "help"}
    assert (problem["code"], problem["line"], problem["column"], problem["path"]) == ("wrong-type", 1, 7, "seed")
    assert problem["file"].endswith("run.yaml")


def test_github_form(tmp_path: Path) -> None:
    text = render(load(tmp_path, "seed: x\n").problems, "github")
    assert text.startswith("::error file=")
    assert ",line=1,col=7,title=wrong-type::" in text
    assert "\n" not in text


def test_problems_of_the_command_line_show_the_argument(tmp_path: Path) -> None:
    text = render(load(tmp_path, "seed: 1\n", "shoal", "training.batch_size=none").problems)
    assert "--> command line: --set training.batch_size=none" in text
    assert "^^^^" in text


SECRETS = [
    "transport: {kind: postgres, password: hunter2}\nseed: x\n",
    "transport:\n  kind: postgres\n  password: hunter2\n  password: hunter2\n",
    "transport:\n  kind: postgres\n  pasword: hunter2\n",
    "transport:\n  kind: postgres\n  password: [hunter2]\n",
    "transport:\n  kind: zmq\n  password: hunter2\n",
    "hub: {enabled: true, token: hunter2}\n",
    "hub:\n  token: hunter2\n  enabled: perhaps\n",
    "hub: {token: hunter2\n",
]


@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.parametrize("style", ["text", "json", "github"])
def test_no_problem_tells_a_secret(tmp_path: Path, text: str, style: str) -> None:
    loaded = load(tmp_path, text)
    assert loaded.problems
    assert "hunter2" not in render(loaded.problems, style)  # type: ignore[arg-type]


def test_no_view_tells_a_secret(tmp_path: Path) -> None:
    text = "database:\n  host: db.example.com\n  password: hunter2\nhuggingface: {token: hunter3, repo_id: a/b}\n"
    loaded = load(tmp_path, text, "classroom", "database.password=hunter4")
    other = load(tmp_path, text.replace("hunter2", "hunter5"), "classroom")
    views = [
        show(loaded),
        show(loaded, origin=True),
        show(loaded, style="json"),
        show(loaded, origin=True, style="json"),
        explain(loaded, "transport.password"),
        explain(loaded, "hub.token"),
        explain(loaded, "hub"),
        diff(loaded, other),
        repr(loaded.run),
        str(loaded.run.transport.password),
        render(load(tmp_path, text, "classroom", "database.password=[hunter4]").problems),
    ]
    for view in views:
        assert "hunter" not in view
    assert "********" in views[0]
    assert loaded.run.transport.password.reveal() == "hunter4"


@pytest.mark.parametrize(
    ("dialect", "text", "help"),
    [
        ("classroom", "data: {latent_dim: 3}", "it belongs under `model`"),
        ("classroom", "latent_dim: 3", "it belongs under `model`"),
        ("classroom", "training: {database: {port: 3}}", "it belongs at the top level"),
        ("smolcluster", "training: {model: {num_layers: 3}}", "it belongs at the top level"),
        ("dist-llm-train", "controller: {workers: [{name: a}]}", "it belongs at the top level"),
        ("ava", "gradient_health: {enabled: true}", "it belongs under `training`"),
        ("shoal", "training: {codec: {kind: int8}}", "it belongs under `updates`"),
        ("ava", "data: {learning_rate: 3}", "it belongs under `training`"),
        ("dist-llm-train", "controller: {seq_length: 3}", "it belongs under `training`"),
        ("smolcluster", "training: {polyak_alpha: 0.5}", "it belongs at the top level"),
        ("shoal", "data: {latent_dim: 3}", "it belongs under `model`"),
        ("shoal", "training: {padding_side: left}", "it belongs under `data`"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_the_right_one(tmp_path: Path, dialect: str, text: str, help: str) -> None:
    (tmp_path / "file.yaml").write_text(f"{text}\n")
    (problem,) = [
        one for one in resolve([ConfigFile(str(tmp_path / "file.yaml"))], dialect=dialect, environ={}).problems if one.code == "unknown-key"
    ]
    assert help in problem.help


@pytest.mark.parametrize("name", ["classroom", "dist-llm-train", "smolcluster-gpt", "ava-base"])
def test_every_key_of_a_document_says_where_it_belongs(tmp_path: Path, name: str) -> None:
    """Each key and section of a whole file, moved into another section."""
    document = yaml.safe_load((Path(__file__).parent / "corpus" / f"{name}.yaml").read_text())
    sections = {key: value for key, value in document.items() if isinstance(value, dict)}
    moved = [(home, key, value) for home, keys in sections.items() for key, value in keys.items()]
    moved += [("", home, keys) for home, keys in sections.items()]
    for number, (home, key, value) in enumerate(moved):
        strange = next(one for one in list(sections)[number % len(sections) :] + list(sections) if one not in (home, key))
        file = tmp_path / "moved.yaml"
        file.write_text(yaml.safe_dump({strange: {key: value}}))
        problems = resolve([ConfigFile(str(file))], dialect=DIALECT_OF.get(name, name), environ={}).problems
        if misplaced := [problem for problem in problems if problem.code == "unknown-key" and f"`{key}`" in problem.message]:
            assert (f"under `{home}`" if home else "at the top level") in misplaced[0].help, (strange, key, misplaced[0])
        else:
            dialect = DIALECTS[DIALECT_OF.get(name, name)]
            assert dialect.knows((strange, key)), (strange, key)


DIALECT_OF = {"smolcluster-gpt": "smolcluster", "ava-base": "ava"}


def test_a_kind_that_is_a_choice_of_another_kind_says_how_it_is_written(tmp_path: Path) -> None:
    assert "write `{kind: dpo, loss: kto}`" in render(load(tmp_path, "task: kto\n").problems)
