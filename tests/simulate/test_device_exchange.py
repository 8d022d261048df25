"""What devices exchange and gather, and how many of them `shoal plan` lets share the experts of a mixture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.config import Run
from shoal.config.load import LoadedConfig, resolve_data
from shoal.config.machines import MachineKind
from shoal.config.schema.engine import Fsdp
from shoal.simulate import planning
from shoal.simulate.device_exchange import copied_mbit, gathered_bytes, sharded_mbit, sharings
from shoal.simulate.meta_model import MetaModel, best_sharing, build_meta_model, changes_that_fit, data_of
from shoal.simulate.planning import Planned, plan

RACK_PAGE = Path(__file__).parents[2] / "docs" / "rack.md"
MODEL = {
    "kind": "moe",
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "max_seq_len": 16,
    "intermediate_size": 64,
    "experts": {"count": 8, "per_token": 2, "dense_layers": 1},
}
RACK = MachineKind(devices=8, flops=1e12, device_mbps=100_000.0)


def loaded(changed: Mapping[str, Any] | None = None, **training: Any) -> LoadedConfig:
    tree: dict[str, Any] = {
        "model": MODEL,
        "data": {"source": {"kind": "builtin", "name": "python-source"}, "tokenizer": "bytes", "sequence_length": 16},
        "training": {"batch_size": 4, "max_steps": 100} | training,
    }
    for path, value in (changed or {}).items():
        section, name = path.split(".", 1)
        part = tree.setdefault(section, {})
        for step in name.split(".")[:-1]:
            part = part.setdefault(step, {})
        part[name.split(".")[-1]] = value
    return resolve_data(tree, name="test", dialect="shoal", environ={})


def found_for(**training: Any) -> MetaModel:
    run = loaded(**training).run
    return build_meta_model(run, data_of(run, 10_000))


def shared(run: Run, devices: int) -> Run:
    return run.replace(engine=Fsdp(expert_parallel=devices))


def planned(kind: MachineKind) -> Planned:
    return plan(found_for(), {"rack": kind}, loaded, lambda *_: None)


def test_rows_are_exchanged_in_place_of_experts() -> None:
    """Two layers of eight experts of 3 · 64 · 32 weights; a token sends 2 · 32 numbers in each of them, four times."""
    found = found_for()
    sizes, run = found.sharded, found.run
    experts = 2 * 8 * 3 * 64 * 32
    assert (sizes.experts, sizes.others, sizes.counts) == (experts, found.parameters - experts, (8, 8))
    assert sharded_mbit(run, sizes, 8) == pytest.approx(96e-6 * found.parameters)
    assert copied_mbit(run, found.parameters) == pytest.approx(64e-6 * found.parameters)
    assert copied_mbit(found_for(gradient_accumulation_steps=4).run, found.parameters) == pytest.approx(16e-6 * found.parameters)
    rows = 4 * 32e-6 * (4 * 16) * (2 * 2 * 32)
    assert sharded_mbit(shared(run, 2), sizes, 8) == pytest.approx(96e-6 * (sizes.others + experts / 2) + rows / 2)
    assert sharded_mbit(shared(run, 8), sizes, 8) == pytest.approx(96e-6 * sizes.others + rows * 7 / 8), "no expert is gathered"
    again = found_for(gradient_checkpointing=True).run
    assert sharded_mbit(shared(again, 8), sizes, 8) - sharded_mbit(shared(run, 8), sizes, 8) == pytest.approx(rows / 2 * 7 / 8)
    half = found_for(precision={"kind": "bf16"}).run
    assert sharded_mbit(shared(half, 8), sizes, 8) == pytest.approx(64e-6 * sizes.others + rows / 2 * 7 / 8)


def test_a_device_gathers_its_part_of_the_experts() -> None:
    found = found_for()
    sizes = found.sharded
    whole, part = (gathered_bytes(shared(found.run, devices), sizes) for devices in (1, 8))
    assert sizes.block_experts == 8 * 3 * 64 * 32
    assert [one - other for one, other in zip(whole, part, strict=True)] == [2 * 4 * 7 * 3 * 64 * 32, 4 * 7 * 3 * 64 * 32]
    assert sharings(sizes, 8) == [1, 2, 4, 8]
    assert sharings(sizes, 6) == [1, 2]


def test_slow_links_let_devices_share_experts_and_few_tokens_too() -> None:
    found = found_for()
    assert best_sharing(found, 8, {"rack": RACK}) == 8
    many = found._replace(run=found.run.replace(training=found.run.training.replace(batch_size=4096)))
    assert best_sharing(many, 8, {"rack": RACK}) == 2, "the more tokens, the more rows travel"


def test_a_plan_for_a_rack_says_how_many_devices_share_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_coarse", lambda *_: [])
    monkeypatch.setattr(planning, "_fine", lambda *_: [])
    found = planned(RACK.replace(device_mbps=1000.0))
    assert str(found.first.candidate) == "local, fsdp over 8, experts over 8"
    run = found.first.loaded.run
    assert isinstance(run.engine, Fsdp)
    assert (run.engine.expert_parallel, run.launch.devices_per_node, run.strategy.kind) == (8, 8, "local")
    assert {str(one.candidate) for one in found.predictions} == {
        "local, ddp over 8",
        "local, fsdp over 8",
        "local, fsdp over 8, experts over 8",
    }
    small = found_for().memory(shared(run, 8)).gb
    assert str(planned(RACK.replace(memory_gb=1.01 * small)).first.candidate) == "local, fsdp over 8, experts over 8"


def test_advice_for_a_small_device_names_shared_experts() -> None:
    found = found_for()
    least = found.memory(found.run.replace(training=found.run.training.replace(batch_size=1))).gb
    advice = changes_that_fit(found, found.run, 0.5 * least)
    assert advice[0].startswith("engine.kind=fsdp and engine.expert_parallel=")


def test_the_plan_of_the_page_proposes_shared_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "_coarse", lambda *_: [])
    monkeypatch.setattr(planning, "_fine", lambda *_: [])
    page = RACK_PAGE.read_text(encoding="utf-8")
    (machines,), (command,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL), re.findall(r"^    shoal (plan .*)$", page, re.MULTILINE)
    Path("node.yaml").write_text(machines, encoding="utf-8")
    assert main(command.split()) == 0
    assert "first choice: local, fsdp over 8, experts over 4" in capsys.readouterr().out
    assert "expert_parallel: 4" in Path("plan.yaml").read_text(encoding="utf-8")
    assert main(["config", "check", "plan.yaml"]) == 0
