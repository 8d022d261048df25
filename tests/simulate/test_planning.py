"""Plans: candidates are simulated, the first choice has a reason, and what does not fit is said plainly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import plan as plan_command
from shoal.cli.main import main
from shoal.config.load import ConfigFile, LoadedConfig, Override, resolve, resolve_data
from shoal.config.machines import MachineKind, read_machines
from shoal.config.problems import ConfigError
from shoal.config.schema.strategy import DiLoCo, Strategy
from shoal.config.show import brief, scalar
from shoal.errors import ShoalError
from shoal.simulate import planning
from shoal.simulate.meta_model import build_meta_model, changes_that_fit, data_of, machines_that_fit
from shoal.simulate.planning import Candidate, Planned, Prediction, chosen, plan, reason_for

SCALE = Path(__file__).parents[2] / "docs" / "scale.md"
FAST = MachineKind(steps_per_s=20.0)


@pytest.fixture(autouse=True)
def _short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_CONTRIBUTIONS", {"coarse": 10, "fine": 20})
    monkeypatch.setattr(DiLoCo, "worth_trying", lambda workers: tuple({"inner_steps": steps} for steps in (1, 50)))


JOINED = {"state": "computing", "lag": 0, "accepted": 1, "rejected": 0, "bytes": 1}
"""What a status says of every worker."""


def starter(settings: dict[str, Any] | None = None) -> LoadedConfig:
    return resolve([ConfigFile("starter")], [Override(path, scalar(value), path) for path, value in (settings or {}).items()])


def planned(kinds: dict[str, MachineKind], **settings: Any) -> Planned:
    return plan(build_meta_model(starter(settings).run), kinds, lambda changed: starter(settings | dict(changed)), lambda *_: None)


def prediction(rate: float, apart: float, codec: str = "none", order: int = 0) -> Prediction:
    return Prediction(Candidate((("kind", "any"),), codec, 32), starter(), 4, rate, 10.0, apart, 3600, 1.0, 2.0, order)


# --- the file of machines ----------------------------------------------------------------------------


def test_a_file_of_machines_is_read(tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text("laptop: {count: 3, memory_gb: 16, steps_per_s: 2.5}\nserver: {flops: 2.0e13, latency_ms: 1}\n")
    machines = read_machines(str(file))
    assert (machines["laptop"].count, machines["laptop"].memory_gb, machines["laptop"].steps_per_s) == (3, 16.0, 2.5)
    assert machines["server"].bandwidth_mbps == 1000.0


def test_every_slip_in_a_file_of_machines_is_told_at_its_place(tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text("laptop: {flops: 1}\nserver:\n  flops: 1\n  bandwith_mbps: 3\n  count: 0\n")
    with pytest.raises(ConfigError) as caught:
        read_machines(str(file))
    places = {problem.code: (problem.labels[0].span.line, problem.help) for problem in caught.value.problems}
    assert places == {"unknown-key": (4, "did you mean `bandwidth_mbps`?"), "out-of-range": (5, "")}


def test_names_below_a_key_of_their_own_are_told_where_they_belong(tmp_path: Path) -> None:
    (tmp_path / "machines.yaml").write_text("machines:\n  fast: {steps_per_s: 40}\n")
    with pytest.raises(ConfigError) as refused:
        read_machines(str(tmp_path / "machines.yaml"))
    assert [problem.help for problem in refused.value.problems] == ["the names of machines are the file's own keys: leave `machines:` out"]


def test_a_machine_must_say_how_fast_it_is(tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text("laptop: {memory_gb: 4}\n")
    with pytest.raises(ConfigError, match=r"`laptop` does not say how fast it is(?s:.*)steps_per_s"):
        read_machines(str(file))


# --- the plan ----------------------------------------------------------------------------------------


def test_a_barrier_is_not_chosen_where_one_machine_is_ten_times_slower() -> None:
    found = planned({"fast": FAST.replace(count=3), "slow": FAST.replace(steps_per_s=2.0)})
    rates = {(str(one.candidate), one.candidate.codec, one.candidate.batch): one.samples_per_s for one in found.predictions}
    assert rates["syncps", "none", 32] == pytest.approx(4 * 2.0 * 32, rel=0.1), "all wait for the slow one"
    assert rates["async", "none", 32] == pytest.approx(62.0 * 32, rel=0.1), "nobody waits"
    assert found.first.samples_per_s > 0.94 * max(rates.values())
    assert found.first.apart < 10
    assert found.alone == ("fast", 640.0)


@pytest.mark.long
def test_slow_links_make_workers_learn_alone_for_longer_and_fast_ones_do_not() -> None:
    wide = {"model.hidden_sizes": [400, 400]}
    slow = planned({"far": FAST.replace(count=3, bandwidth_mbps=2.0, latency_ms=100.0)}, **wide)
    near = planned({"near": FAST.replace(count=3)}, **wide)
    assert slow.first.apart > 5 * near.first.apart
    assert slow.first.bytes < 0.3 * near.first.bytes
    assert near.first.candidate.codec == "none"


def test_a_plan_is_the_same_again_and_its_file_gives_the_same_run(tmp_path: Path) -> None:
    kinds = {"one": FAST.replace(count=2)}
    first, again = planned(kinds).first, planned(kinds).first
    assert first[2:] == again[2:]
    file = tmp_path / "plan.yaml"
    file.write_text(brief(first.loaded))
    loaded = resolve([ConfigFile(str(file))])
    assert loaded.problems == []
    assert loaded.run == first.loaded.run


@pytest.mark.parametrize("preset", ["starter", "demo-gpt", "dist-llm-train/lan", "diloco/quick-start", "gpu/tiny"])
def test_the_brief_form_of_a_run_gives_the_same_run(preset: str, tmp_path: Path) -> None:
    loaded = resolve([ConfigFile(preset)])
    file = tmp_path / "brief.yaml"
    file.write_text(brief(loaded))
    assert resolve([ConfigFile(str(file))]).run == loaded.run


def test_of_plans_that_are_about_as_fast_the_one_with_the_least_drift_is_chosen() -> None:
    ranked = [prediction(100, 50), prediction(98, 2, "int8"), prediction(97, 2, "none", 1), prediction(80, 1)]
    assert chosen(ranked) is ranked[2]
    assert "97% of the throughput" in reason_for(ranked[2], ranked)
    assert reason_for(ranked[0], [ranked[0], ranked[3]]) == "it is the fastest"
    assert ranked[2].cost == pytest.approx(2.0 * 3600 / 97 / 3600)


def test_every_setting_that_is_worth_trying_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name, section in Strategy.kinds.items():
        for settings in section.worth_trying(4):
            loaded = starter(
                {"strategy.kind": name, "cluster.num_workers": 4} | {f"strategy.{key}": value for key, value in settings.items()}
            )
            assert loaded.problems == []


def test_what_cannot_be_run_is_named_with_the_reason() -> None:
    found = planned({"one": FAST.replace(count=3)}, **{"training.global_batch_size": 96})
    assert "training.global_batch_size is 96" in found.refused["workunits units_per_update=3"]
    with pytest.raises(ShoalError, match=r"no strategy can train this(?s:.*)training.global_batch_size is 320"):
        planned({"one": FAST.replace(count=3)}, **{"training.global_batch_size": 320})


# --- what fits ---------------------------------------------------------------------------------------


def test_a_model_too_large_for_some_machines_leaves_them_out_or_shrinks_the_batch() -> None:
    found = planned({"large": FAST, "small": FAST.replace(count=2, memory_gb=0.0005), "none": FAST.replace(memory_gb=0.0001)})
    workers = {one.candidate.batch: one.workers for one in found.predictions}
    assert workers[32] == 1
    assert workers[16] == 3
    assert all(one.memory_gb < 0.0005 for one in found.predictions if one.workers == 3)


def test_what_would_fit_is_said() -> None:
    settings = {"model.kind": "gpt", "model.num_layers": 6, "model.hidden_size": 128, "model.num_heads": 4, "training.batch_size": 32}
    loaded = resolve([ConfigFile("demo-gpt")], [Override(path, str(value), path) for path, value in settings.items()])
    run, found = loaded.run, build_meta_model(loaded.run)
    whole = found.memory(run).gb
    assert not machines_that_fit(found, run, {"m": FAST.replace(memory_gb=0.9 * whole)})
    assert changes_that_fit(found, run, 0.9 * whole)[0].startswith("training.batch_size=16: ")
    assert changes_that_fit(found, run, 0.9 * whole)[1].startswith("training.gradient_checkpointing=true and training.batch_size=")
    shared = changes_that_fit(found, run, 0.5 * found.memory(run.replace(training=run.training.replace(batch_size=1))).gb)
    assert re.match(r"engine.kind=fsdp over \d+ devices", shared[-2]) or "gradient_checkpointing" in shared[0]
    assert found.parts.single.vector.device.type == "meta", "no numbers are kept of a model that may be larger than this machine"


# --- the command -------------------------------------------------------------------------------------


def test_the_commands_of_the_page_run_and_write_a_file_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = SCALE.read_text(encoding="utf-8")
    Path("machines.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0], encoding="utf-8")
    assert main(["init"]) == 0
    commands = re.findall(r"^    shoal (plan .*|config check .*)$", page, re.MULTILINE)
    Path("runs/my-run").mkdir(parents=True)
    Path("runs/my-run/config.yaml").write_text("dialect: shoal\n")
    Path("runs/my-run/owner.json").write_text("{}")
    Path("runs/my-run/status.json").write_text(
        json.dumps({"schema": 2, "members": [JOINED | {"worker": "desk", "computing_s": 10.0, "samples": 6400}]})
    )
    assert len(commands) == 4
    for command in commands:
        assert main(command.split()) == 0, command
    printed = capsys.readouterr().out
    assert printed.count("first choice: ") == 3
    assert "this machine, for a file of machines:" in printed
    assert ": OK" in printed


def test_measuring_replaces_the_machines_that_a_file_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "config.yaml"), "--preset", "dist-llm-train/wan-conservative"]) == 0
    file, four = str(tmp_path / "config.yaml"), ["--set", "cluster.num_workers=4"]
    for words in (["plan", file, "--measure", *four], ["plan", "--measure", file, *four]):
        assert main(words) == 0
        assert "this: {count: 4, " in capsys.readouterr().out


def test_a_run_without_workers_has_measured_no_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("dialect: shoal\n")
    (tmp_path / "status.json").write_text(json.dumps({"schema": 2, "strategy": "local", "members": []}))
    assert main(["plan", "starter", "--measure", str(tmp_path)]) == 2
    assert "is a run without workers, so no machine was measured there" in capsys.readouterr().err


def test_the_command_says_plainly_when_a_model_fits_no_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text("watch: {memory_gb: 0.00013, steps_per_s: 1}\n")
    assert main(["plan", "starter", "--machines", str(file)]) == 2
    told = capsys.readouterr().err
    assert "the model fits none of the machines" in told
    assert "engine.kind=fsdp over" in told
    assert main(["plan", "starter"]) == 2
    assert "--machines FILE, or --measure" in capsys.readouterr().err


def test_a_machine_is_timed_without_the_data_where_its_size_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"kind": "gpt", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 16}
    tree = {"model": settings, "data": {"source": {"kind": "text", "path": "nowhere.txt"}, "tokenizer": "bytes"}}
    run = resolve_data(tree, name="test", dialect="shoal", environ={}).run
    (kind,) = plan_command._this_machine(build_meta_model(run, data_of(run, 10_000)), 10_000).values()
    assert kind.steps_per_s is not None
    assert f"steps_per_s: {kind.steps_per_s:g}" in capsys.readouterr().out


def test_machines_of_several_devices_are_planned_with_an_engine_that_fits_them() -> None:
    """Where each device holds all of the weights, less is exchanged; where it cannot, the devices share them."""
    settings = {"model.hidden_sizes": [512, 512], "strategy.kind": "async"}
    found = build_meta_model(starter(settings).run)
    whole = found.memory(found.run).gb
    for memory_gb, engine in ((2 * whole, "ddp"), (0.8 * whole, "fsdp")):
        first = planned({"box": MachineKind(count=2, steps_per_s=20.0, devices=8, memory_gb=memory_gb)}, **settings).first
        assert first.candidate.engine == engine
        assert first.loaded.run.engine.kind == engine
        assert first.loaded.run.launch.devices_per_node == 8
        assert engine == "fsdp" or first.samples_per_s > 0.8 * 2 * 8 * 20.0 * 32
    with pytest.raises(ShoalError, match="have no engine in common"):
        planned({"box": MachineKind(steps_per_s=1.0, devices=2), "pi": FAST}, **settings)


def test_a_plan_is_made_for_those_who_joined_a_run_as_fast_as_they_were_seen_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members: list[dict[str, Any]] = [
        JOINED | {"worker": "desk", "computing_s": 10.0, "samples": 6400, "latency_ms": 1.5, "bandwidth_mbps": 940.0},
        JOINED | {"worker": "phone", "computing_s": 20.0, "samples": 640, "latency_ms": 80.0, "bandwidth_mbps": 9.0},
        JOINED | {"worker": "new", "computing_s": 0.0, "samples": 0, "latency_ms": -3.0},
    ]
    (tmp_path / "config.yaml").write_text("dialect: shoal\n")
    (tmp_path / "owner.json").write_text("{}")
    (tmp_path / "status.json").write_text(json.dumps({"schema": 2, "members": []}))
    words = ["plan", "starter", "--set", "training.batch_size=32", "--measure", str(tmp_path)]
    assert main(words) == 2
    assert "no worker of this run has learned from a batch yet" in capsys.readouterr().err
    (tmp_path / "status.json").write_text(json.dumps({"schema": 2, "members": members}))
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "desk: {steps_per_s: 20, bandwidth_mbps: 940, latency_ms: 1.5}" in shown
    assert "phone: {steps_per_s: 1, bandwidth_mbps: 9, latency_ms: 80}" in shown
    assert "new" not in shown
    assert "first choice: " in shown
