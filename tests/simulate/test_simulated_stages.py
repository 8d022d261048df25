"""One model over several machines in virtual time: steps that can be computed by hand, and plans for machines that hold it together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.config import Run
from shoal.config.load import LoadedConfig, resolve_data
from shoal.config.machines import MachineKind
from shoal.engines.pipeline.split import LayerSizes
from shoal.errors import ShoalError
from shoal.runs import stage_placement
from shoal.runs.stage_placement import stages_between
from shoal.simulate.machines import CALM, SimulatedMachine
from shoal.simulate.meta_model import build_meta_model
from shoal.simulate.pipeline_plans import PipelineCandidate, machines_needed, pipeline_plans
from shoal.simulate.pipeline_timing import PipelineStep, stages_on, time_step
from shoal.simulate.planning import plan

LAYERS = LayerSizes([100] * 4, 0, 0, 0, [1.0] * 4, 0.0)
AT_ONCE = CALM._replace(round_trip_ms=0.0, mbit_per_s=0)
SETTINGS: dict[str, Any] = {
    "model": {"kind": "gpt", "hidden_size": 32, "num_layers": 6, "num_heads": 2, "max_seq_len": 16},
    "data": {"source": {"kind": "builtin", "name": "zen"}, "tokenizer": "characters"},
    "training": {"max_steps": 6, "batch_size": 8, "device": "cpu"},
    "evaluation": {"strategy": "never"},
}


def loaded(**more: Any) -> LoadedConfig:
    return resolve_data(SETTINGS | more, name="test", dialect="shoal", environ={})


def run_with(**engine: Any) -> Run:
    return loaded(engine={"kind": "pipeline", **engine}).run


def step(run: Run, machines: list[SimulatedMachine], layers: LayerSizes = LAYERS) -> PipelineStep:
    count = len(machines)
    bounds = [len(layers.sizes) * number // count for number in range(count + 1)]
    return time_step(run, layers, stages_on(run, layers, stages_between(run, layers, 10, bounds), machines))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equal_stages_wait_for_the_share_of_the_time_that_the_page_says(schedule: str, stages: int) -> None:
    found = step(run_with(micro_batches=8, schedule=schedule), [SimulatedMachine(f"m{number}", 1.0, AT_ONCE) for number in range(stages)])
    assert found.seconds == pytest.approx((8 + stages - 1) / 8 / stages)
    assert 1 - found.utilisation == pytest.approx((stages - 1) / (8 + stages - 1))


def test_a_link_that_takes_longer_than_computing_decides() -> None:
    """Eight micro-batches, each a stream of 2,048 bytes that takes a second on the way, and as long on the way back."""
    slow = AT_ONCE._replace(mbit_per_s=8 * 2048 / 1e6)
    found = step(run_with(micro_batches=8, schedule="gpipe"), [SimulatedMachine("a", 1e-6, slow), SimulatedMachine("b", 1e-6, slow)])
    assert found.seconds == pytest.approx(16, rel=1e-4)
    assert found.bytes == 2 * 8 * 2048


def test_1f1b_waits_for_a_far_machine_where_all_forward_passes_first_do_not() -> None:
    far = [SimulatedMachine("a", 1.0, AT_ONCE), SimulatedMachine("b", 1.0, AT_ONCE._replace(round_trip_ms=1000.0))]
    kept, ahead = (step(run_with(micro_batches=8, schedule=schedule), far) for schedule in ("1f1b", "gpipe"))
    assert kept.seconds > ahead.seconds + 1.0


def test_a_matrix_that_both_ends_use_travels_there_and_back() -> None:
    machines = [SimulatedMachine("a", 1.0, AT_ONCE), SimulatedMachine("b", 1.0, AT_ONCE)]
    alike = step(run_with(), machines)
    assert step(run_with(), machines, LAYERS._replace(copied=50)).bytes == alike.bytes + 2 * 4 * 50


def test_the_first_stages_keep_more_micro_batches_than_the_last() -> None:
    run = run_with(micro_batches=8)
    first, *_, last = stages_between(run, LAYERS, 10, [0, 1, 2, 3, 4])
    ahead = stages_between(run_with(micro_batches=8, schedule="gpipe"), LAYERS, 10, [0, 1, 2, 3, 4])[0]
    assert first.memory.activations > last.memory.activations
    assert ahead.memory.activations == 2 * first.memory.activations, "eight under way, and not four"
    assert first.memory.weights == 4 * 100


# --- the commands --------------------------------------------------------------------------------------------


def write(folder: Path, name: str, data: dict[str, Any]) -> str:
    (folder / name).write_text(json.dumps(data))
    return str(folder / name)


def test_the_command_simulates_who_has_which_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {
        "engine": {"kind": "pipeline"},
        "scheduler": {"tasks": [{"id": "small", "model_share": 0.3}, {"id": "large", "model_share": 0.7}]},
        "cluster": {"workers": ["slow", "fast"], "hosts": {"slow": {"flops": 1.0}, "fast": {"flops": 3.0}}},
    }
    file = write(tmp_path, "config.json", {"dialect": "shoal"} | SETTINGS | more)
    assert main(["simulate", file, "--step-s", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stages"] == {"small": "slow", "large": "fast"}
    assert 8 / found["samples_per_s"] == pytest.approx(found["step_s"])
    assert main(["simulate", file, "--step-s", "1", "--set", "cluster.hosts.slow.memory_gb=1e-6"]) == 2
    assert "no machine is left for the stage" in capsys.readouterr().err
    assert main(["simulate", file, "--step-s", "1", "--set", "scheduler.tasks=[]", "--learn"]) == 2
    assert "of a pipeline times and bytes are simulated" in capsys.readouterr().err
    for option, value in (("--plots", str(tmp_path / "plots")), ("--loss", "1")):
        assert main(["simulate", file, "--step-s", "1", option, value]) == 2
        assert "leave --plots and --loss out" in capsys.readouterr().err
    assert main(["simulate", file, "--step-s", "1", "--set", "scheduler.tasks=[]", "--set", "scheduler.kind=none"]) == 0
    assert "`stage-1` (layer 1, " in capsys.readouterr().out, "without tasks the faster machine has more layers"


NOBODY_HOLDS_IT = {"desk": {"memory_gb": 0.0012, "steps_per_s": 20}, "laptop": {"count": 2, "memory_gb": 0.001, "steps_per_s": 10}}


def test_a_model_that_fits_no_machine_is_planned_over_several_and_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, machines = write(tmp_path, "config.json", {"dialect": "shoal"} | SETTINGS), write(tmp_path, "machines.json", NOBODY_HOLDS_IT)
    out = str(tmp_path / "plan.yaml")
    assert main(["plan", file, "--machines", machines, "--out", out]) == 0
    told = capsys.readouterr().out
    assert "it does not fit desk" in told
    assert "or engine.kind=pipeline over 2 such machines, with engine.micro_batches=8" in told
    assert "* local, pipeline (desk " in told
    assert main(["config", "check", out]) == 0
    assert main(["train", out, "--run-dir", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 6


def test_what_fits_nobody_and_not_all_of_them_together_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "config.json", {"dialect": "shoal"} | SETTINGS)
    assert main(["plan", file, "--machines", write(tmp_path, "m.json", {"tiny": {"count": 3, "memory_gb": 1e-5, "steps_per_s": 1}})]) == 2
    assert "the model fits none of the machines, nor several of them together:\nit does not fit tiny" in capsys.readouterr().err


# --- plans ---------------------------------------------------------------------------------------------------


def varied(changed: Any) -> LoadedConfig:
    data: dict[str, Any] = json.loads(json.dumps(SETTINGS))
    for path, value in changed.items():
        section, _, name = path.partition(".")
        data.setdefault(section, {})[name] = value
    return resolve_data(data, name="test", dialect="shoal", environ={})


def test_the_stages_of_a_plan_stay_where_it_puts_them() -> None:
    kinds = {"fast": MachineKind(memory_gb=4.0, steps_per_s=40.0), "slow": MachineKind(count=3, memory_gb=1.0, steps_per_s=10.0)}
    found = build_meta_model(loaded().run)
    plans = pipeline_plans(found, kinds, varied)
    assert [len(one.stages) for one in plans] == [2, 3, 4]
    for one in plans:
        assert isinstance(one.candidate, PipelineCandidate)
        run = one.loaded.run
        layers, vocabulary = stage_placement.layers_and_vocabulary(run)
        stages = stage_placement.stages_of(run, layers, vocabulary)
        assert [(stage.first, stage.last) for stage in stages] == [(stage.first, stage.last) for stage in one.stages]
        assert list(stage_placement.place_stages(run, stages, stage_placement.listed_machines(run), must_have="fast").values()) == list(
            one.candidate.machines
        )
        assert one.candidate.machines[0] == "fast"
        assert all(stage.memory.gb <= run.cluster.hosts[name].memory_gb for stage, name in zip(stages, one.candidate.machines, strict=True))
    assert plans[0].stages[0].work > 3 * plans[0].stages[1].work, "the machine that is four times as fast has most of it"


def test_a_model_that_is_not_cut_has_no_such_plan() -> None:
    run = loaded(model={"kind": "lstm", "hidden_size": 8}).run
    assert pipeline_plans(build_meta_model(run), {"a": MachineKind(count=2, steps_per_s=1.0)}, varied) == []
    assert machines_needed(build_meta_model(run), run, 1.0) is None


def test_so_many_machines_are_needed_that_each_holds_its_stage() -> None:
    found = build_meta_model(loaded().run)
    whole = found.memory(found.run).gb
    assert machines_needed(found, found.run, whole) == (2, 8)
    few, more = (machines_needed(found, found.run, share * whole) for share in (0.4, 0.2))
    assert few is not None
    assert more is not None
    assert few < more
    assert machines_needed(found, found.run, 1e-9) is None


def test_where_no_machine_holds_the_model_only_pipelines_are_planned() -> None:
    kinds = {name: MachineKind(**given) for name, given in NOBODY_HOLDS_IT.items()}
    found = plan(build_meta_model(loaded().run), kinds, varied, lambda *_: None)
    assert found.alone is None
    assert all(isinstance(one.candidate, PipelineCandidate) for one in found.predictions)
    assert found.first.memory_gb <= 0.0012
    with pytest.raises(ShoalError, match="the model does not fit the memory of these machines"):
        plan(build_meta_model(loaded().run), {"tiny": MachineKind(count=2, memory_gb=1e-5, steps_per_s=1.0)}, varied, lambda *_: None)
