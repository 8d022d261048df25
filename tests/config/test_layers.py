"""Layers: the later wins, the history tells, and unions change as wholes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.load import ConfigFile, LoadedConfig, Override, parse_override, resolve
from shoal.config.problems import ConfigError, render
from shoal.config.show import explain, flat, show


def stack(
    tmp_path: Path, *layers: str, overrides: list[str] | None = None, environ: dict[str, str] | None = None, **options: Any
) -> LoadedConfig:
    files = []
    for number, text in enumerate(layers):
        file = tmp_path / f"layer{number}.yaml"
        file.write_text(text)
        files.append(ConfigFile(str(file)))
    return resolve(files, [parse_override(text) for text in overrides or []], environ=environ or {}, **options)


def test_mappings_merge_and_lists_replace(tmp_path: Path) -> None:
    loaded = stack(
        tmp_path,
        "dialect: shoal\ntraining:\n  batch_size: 8\n  epochs: 3\nmodel:\n  kind: mlp\n  hidden_sizes: [1, 2, 3]\n",
        "dialect: shoal\ntraining:\n  batch_size: 16\nmodel:\n  hidden_sizes: [4]\n",
    )
    assert (loaded.run.training.batch_size, loaded.run.training.epochs) == (16, 3)
    assert loaded.run.model.hidden_sizes == (4,)


def test_null_is_null(tmp_path: Path) -> None:
    loaded = stack(
        tmp_path,
        "training:\n  epochs: 3\n  max_steps: 10\n  clipping: {max_norm: 1.0}\n",
        "training: {clipping: {max_norm: null}}\n",
        dialect="shoal",
    )
    assert loaded.run.training.clipping.max_norm is None
    assert loaded.run.training.epochs == 3


def test_an_empty_section_sets_nothing(tmp_path: Path) -> None:
    loaded = stack(tmp_path, "training:\n  epochs: 3\n", "training:\nmodel:\n", dialect="shoal")
    assert loaded.run.training.epochs == 3


def test_an_optional_section_can_be_taken_back(tmp_path: Path) -> None:
    loaded = stack(tmp_path, "rlhf: {kl: {target: 2.0}}\nmodel: {kind: gpt}\n", "rlhf: null\n", dialect="shoal")
    assert loaded.run.rlhf is None
    assert loaded.run.task is not None
    assert loaded.run.task.kind == "language-modelling"


def test_a_changed_kind_drops_the_old_kinds_settings(tmp_path: Path) -> None:
    loaded = stack(tmp_path, "strategy: {kind: async, max_staleness: 3}\n", "strategy: {kind: syncps, window: 2}\n", dialect="shoal")
    assert loaded.run.strategy.window == 2
    loaded = stack(tmp_path, "strategy: {kind: edp, pull_every_steps: 3}\n", "strategy: {kind: syncps}\n", dialect="shoal")
    assert loaded.run.strategy.pull_every_steps == 1, "a setting of the old kind does not leak into the new one"


def test_settings_that_a_later_kind_replaced_are_named(tmp_path: Path) -> None:
    layers = ("strategy: {kind: diloco, inner_steps: 7}\n", "strategy: {kind: syncps}\n")
    (problem,) = stack(tmp_path, *layers, dialect="shoal").problems
    assert problem.code == "no-effect"
    assert problem.message == "`strategy.inner_steps` has no effect: a later layer changed strategy.kind"
    assert [Path(label.span.source.name).name for label in problem.labels] == ["layer0.yaml", "layer1.yaml"]


def test_the_same_kind_again_keeps_settings(tmp_path: Path) -> None:
    loaded = stack(tmp_path, "strategy: {kind: async, max_staleness: 3}\n", "strategy: {kind: async, adaptive: false}\n", dialect="shoal")
    assert (loaded.run.strategy.max_staleness, loaded.run.strategy.adaptive) == (3, False)


def test_a_setting_of_another_kind_in_the_same_layer_is_an_error(tmp_path: Path) -> None:
    loaded = stack(tmp_path, "strategy:\n  kind: async\n  window: 2\n", dialect="shoal")
    assert [problem.code for problem in loaded.problems] == ["unknown-key"]
    assert "`syncps`" in loaded.problems[0].help
    assert loaded.problems[0].labels[0].span[1:3] == (3, 3)


def test_a_dialects_key_waits_for_its_kind_in_any_layer() -> None:
    """`sync_window` is written in the file, the mode that needs it is chosen on the command line."""
    corpus = str(Path(__file__).parent / "corpus" / "dist-llm-train.yaml")
    asynchronous = resolve([ConfigFile(corpus)], environ={})
    assert asynchronous.run.strategy.kind == "async"
    assert any(problem.code == "no-effect" and problem.path == "training.sync_window" for problem in asynchronous.problems)
    synchronous = resolve([ConfigFile(corpus)], [parse_override("controller.use_async_training=false")], environ={})
    assert (synchronous.run.strategy.kind, synchronous.run.strategy.window) == ("syncps", 2)


def test_precedence_files_environment_command_line(tmp_path: Path) -> None:
    text = "log_level: WARNING\ncoordinator: {telemetry_alpha: 0.1}\n"
    assert stack(tmp_path, text, dialect="shoal").run.log_level == "WARNING"
    environ = {"LOG_LEVEL": "debug", "TELEMETRY_ALPHA": "0.3"}
    run = stack(tmp_path, text, environ=environ, dialect="shoal").run
    assert (run.log_level, run.coordinator.telemetry_alpha) == ("DEBUG", 0.3)
    run = stack(tmp_path, text, environ=environ, overrides=["log_level=ERROR"], dialect="shoal").run
    assert run.log_level == "ERROR"


def test_secrets_from_the_environment_reach_their_place() -> None:
    run = resolve([ConfigFile("classroom/small-class")], environ={"DB_PASSWORD": "12345", "HF_TOKEN": "hf_x"}).run
    assert run.transport.password.reveal() == "12345"
    assert run.hub.token.reveal() == "hf_x"
    assert resolve([ConfigFile("starter")], environ={"DB_PASSWORD": "x"}).run.transport.kind == "zmq"


def test_a_bad_variable_of_the_environment_is_named() -> None:
    loaded = resolve([ConfigFile("starter")], environ={"TELEMETRY_ALPHA": "fast"})
    assert "TELEMETRY_ALPHA" in render(loaded.problems)
    assert not loaded.ok


def test_config_path_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [problem.code for problem in resolve([], environ={}).problems] == ["missing-file"]
    (tmp_path / "mine.yaml").write_text("dialect: shoal\nseed: 5\n")
    assert resolve([], environ={"CONFIG_PATH": "mine.yaml"}).run.seed == 5
    (tmp_path / "config.yaml").write_text("dialect: shoal\nseed: 6\n")
    assert resolve([], environ={}).run.seed == 6
    assert resolve([ConfigFile("starter")], environ={"CONFIG_PATH": "mine.yaml"}).run.seed == 42


# --- flags -------------------------------------------------------------------------------------


def flag(name: str, value: str) -> Override:
    return Override(name, value, f"--{name} {value}", exact=False)


def test_a_leaf_key_is_a_flag_in_both_spellings() -> None:
    for name in ("batch_size", "batch-size", "training.batch_size"):
        assert resolve([ConfigFile("gpu/base")], [flag(name, "32")], environ={}).run.training.batch_size == 32


def test_the_nearest_leaf_is_meant() -> None:
    """The document's own command: training.warmup_steps, not gradient_health's."""
    run = resolve([ConfigFile("gpu/base")], [flag("warmup_steps", "5000")], environ={}).run
    assert run.training.schedule.warmup_steps == 5000
    assert run.training.gradient_health.warmup_steps == 2000


def test_a_bare_name_means_training_first() -> None:
    run = resolve([ConfigFile("starter")], [flag("batch_size", "5"), flag("learning-rate", "0.5")], environ={}).run
    assert (run.training.batch_size, run.training.optimizer.learning_rate) == (5, 0.5)


def test_an_ambiguous_leaf_asks_for_its_path() -> None:
    loaded = resolve([ConfigFile("starter")], [flag("every_steps", "5")], environ={})
    assert [problem.code for problem in loaded.problems] == ["ambiguous-flag"]
    assert "evaluation.every_steps" in loaded.problems[0].message
    assert resolve([ConfigFile("starter")], [flag("evaluation.every_steps", "5")], environ={}).run.evaluation.every_steps == 5


def test_two_spellings_of_one_setting_are_no_ambiguity() -> None:
    run = resolve([ConfigFile("gpu/base")], [flag("gradient_accumulation_steps", "2")], environ={}).run
    assert run.training.gradient_accumulation_steps == 2


def test_an_unknown_flag_is_refused_with_a_suggestion() -> None:
    loaded = resolve([ConfigFile("gpu/base")], [flag("batch_siz", "2")], environ={})
    assert [problem.code for problem in loaded.problems] == ["unknown-key"]
    assert "batch_size" in loaded.problems[0].help


@pytest.mark.parametrize("file", ["starter", "gpu/base", "smolcluster/gpt_config"])
@pytest.mark.parametrize("option", ["num_gpus", "num-gpus"])
def test_the_number_of_gpus_is_an_option_with_files_of_any_dialect(file: str, option: str) -> None:
    assert resolve([ConfigFile(file)], [flag(option, "3")], environ={}).run.launch.devices_per_node == 3


def test_overrides_speak_the_dialect_or_shoal() -> None:
    for path in ("training.learning_rate", "training.optimizer.learning_rate"):
        run = resolve([ConfigFile("smolcluster/gpt_config")], [parse_override(f"{path}=3e-4")], environ={}).run
        assert run.training.optimizer.learning_rate == 3e-4
    assert resolve([ConfigFile("smolcluster/gpt_config")], [parse_override("epochs=5")], environ={}).run.training.epochs == 5


@pytest.mark.parametrize("text", ["nonsense", "=5", ""])
def test_a_bad_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="path=value"):
        parse_override(text)


def test_override_values_are_yaml() -> None:
    run = resolve([ConfigFile("starter")], [parse_override("model.hidden_sizes=[3, 4]"), parse_override("name=null")], environ={}).run
    assert run.model.hidden_sizes == (3, 4)
    assert run.name is None


# --- history -----------------------------------------------------------------------------------


def test_explain_tells_the_whole_story(tmp_path: Path) -> None:
    base = "strategy:\n  kind: workunits\n"
    loaded = stack(tmp_path, base, "strategy:\n  kind: diloco\n", overrides=["seed=3"], dialect="shoal")
    text = explain(loaded, "strategy.kind")
    first, second = text.splitlines()[1:3]
    assert text.startswith('strategy.kind = "diloco"\n')
    assert first.split() == ["set", "by", "layer1", f"{tmp_path}/layer1.yaml:2:9"]
    assert second.split() == ["overrides", "layer0", f"{tmp_path}/layer0.yaml:2:9", "(was", '"workunits")']
    assert "--set seed=3" in explain(loaded, "seed")
    assert "derived" in explain(loaded, "training.batch_size")
    assert "default" in explain(loaded, "logging.every_steps")


def test_every_setting_has_an_origin() -> None:
    text = show(resolve([ConfigFile("gpu/base"), ConfigFile("hardware/h100_80gb")], environ={}), origin=True)
    values = [line for line in text.splitlines() if not line.rstrip().endswith(":")]
    assert all("  # " in line for line in values)
    assert "hardware/h100_80gb:3:16" in text


LEAVES = {
    "seed": st.integers(0, 9),
    "training.batch_size": st.integers(1, 9) | st.none(),
    "training.clipping.max_norm": st.floats(0.5, 9) | st.none(),
    "model.hidden_sizes": st.lists(st.integers(1, 9), max_size=3),
    "training.optimizer.kwargs.foreach": st.integers(),
    "cluster.hosts.h.memory_gb": st.integers(1, 9),
    "logging.project": st.text(alphabet="ab ", min_size=1),
}
LAYER = st.fixed_dictionaries({}, optional=LEAVES)


@settings(max_examples=150)
@given(st.lists(LAYER, min_size=1, max_size=4))
def test_the_last_layer_that_sets_a_value_wins(tmp_path_factory: pytest.TempPathFactory, layers: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("layers")
    files, expected, setter = [], {}, {}
    for number, layer in enumerate(layers):
        tree: dict[str, Any] = {"dialect": "shoal", "log_level": "INFO"}
        for path, value in layer.items():
            branch = tree
            *parents, last = path.split(".")
            for name in parents:
                branch = branch.setdefault(name, {})
            branch[last] = value
            expected[path], setter[path] = value, number
        file = folder / f"layer{number}.yaml"
        file.write_text(yaml.safe_dump(tree))
        files.append(ConfigFile(str(file)))
    loaded = resolve(files, environ={})
    values = {".".join(path): value for path, value in flat(loaded.run)}
    for path, value in expected.items():
        if value is not None:
            found = values[path]
            assert (list(found) if isinstance(found, tuple) else found) == value
        assignment = next(a for a in reversed(loaded.settings.history[tuple(path.split("."))]) if a.layer.name != "derived")
        assert assignment.layer.name == f"layer{setter[path]}"
    assert len(loaded.settings.history["log_level",]) == len(layers)


@settings(max_examples=50)
@given(LAYER)
def test_a_layer_twice_is_a_layer_once(tmp_path_factory: pytest.TempPathFactory, layer: dict[str, Any]) -> None:
    file = tmp_path_factory.mktemp("twice") / "layer.yaml"
    file.write_text("dialect: shoal\nname: x\n")
    overrides = [
        Override(path, yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip(), "--set")
        for path, value in layer.items()
    ]
    once = resolve([ConfigFile(str(file))], overrides, environ={}).run
    assert resolve([ConfigFile(str(file)), ConfigFile(str(file))], [*overrides, *overrides], environ={}).run == once


def test_the_order_of_options_does_not_matter(tmp_path: Path) -> None:
    settings = ["data.source.path=elsewhere", "data.source.kind=mnist"]
    for overrides in (settings, settings[::-1]):
        run = stack(tmp_path, "model: {kind: mlp}", dialect="shoal", overrides=overrides).run
        assert run.data.source is not None
        assert (run.data.source.kind, run.data.source.path) == ("mnist", "elsewhere")


def test_settings_of_a_cluster_do_nothing_for_one_worker_alone(tmp_path: Path) -> None:
    text = "updates: {clip_norm: 1.0}\ntransport: {port: 5}\n"
    warned = [problem for problem in stack(tmp_path, text, dialect="shoal").problems if problem.code == "no-effect"]
    assert len(warned) == 2
    assert not stack(tmp_path, text + "strategy: {kind: edp}\n", dialect="shoal").problems
