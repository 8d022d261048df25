"""Simulations and plans of times need neither the data nor the numbers of a model: a laptop plans what it could never train."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import data
from shoal.cli.main import main
from shoal.config import Run
from shoal.config.load import ConfigFile, Override, resolve
from shoal.config.schema.data import Builtin, HubDataset, Images, Mixture, MixturePart, Text, Wikitext
from shoal.errors import ShoalError
from shoal.simulate import SimulatedMachine, simulate
from shoal.simulate.meta_model import build_meta_model, data_of

LARGE = """\
model: {kind: gpt, hidden_size: 4096, num_layers: 32, num_heads: 32, max_seq_len: 2048, vocab_size: 50257}
data: {source: {kind: text, path: nowhere/text}}
strategy: {kind: diloco, inner_steps: 50}
training: {batch_size: 4, epochs: 1}
"""
PARAMETERS = 6_658_404_352


@pytest.fixture
def large(tmp_path: Path) -> str:
    (tmp_path / "large.yaml").write_text(LARGE)
    return str(tmp_path / "large.yaml")


def run_of(file: str, **settings: Any) -> Run:
    return resolve([ConfigFile(file)], [Override(path, str(value), path) for path, value in settings.items()]).run


def test_billions_of_parameters_are_simulated_without_numbers_and_without_data(large: str) -> None:
    """Weights of 27 GB take minutes over a fast link, and a worker waits for them as long as a real one would."""
    run = run_of(large)
    assert build_meta_model(run, data_of(run, 1000)).parts.single.vector.device.type == "meta"
    report = simulate(run, [SimulatedMachine(f"w{number}", 2.0) for number in range(3)], hours=1.0, samples=100_000)
    assert report.versions > 2
    assert report.samples == report.versions * 3 * 50 * 4
    assert report.judged <= report.received_bytes / (4 * PARAMETERS) <= report.judged + 3.01, "of each worker one may be under way"
    assert report.outcomes.keys() == {"accepted"}
    assert "100,000 samples supposed" in dict(report.rows())["data"]


def test_data_that_is_not_here_is_asked_about_and_never_downloaded(large: str) -> None:
    there = [SimulatedMachine("w1", 2.0), SimulatedMachine("w2", 2.0)]
    with pytest.raises(ShoalError, match=r"nowhere/text is not on this machine.*--samples N, or set training.max_steps"):
        simulate(run_of(large), there)
    endless = run_of(large, **{"training.max_steps": 100})
    report = simulate(endless, there, hours=2.0)
    assert report.finished
    assert report.samples == 100 * 4 * 2
    assert "no end supposed" in report.data
    with pytest.raises(ShoalError, match="pieces of data that has an end"):
        simulate(run_of(large, **{"training.max_steps": 100, "strategy.kind": "workunits"}), there)
    with pytest.raises(ShoalError, match="--samples cannot say"):
        simulate(endless, there, learns=True, samples=10)


def test_which_sources_are_here(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Shoal.\n")
    here, gone = Text(path=str(tmp_path / "text.txt")), Text(path=str(tmp_path / "gone.txt"))
    assert [data.is_local(source) for source in (Builtin(), here, gone)] == [True, True, False]
    assert not data.is_local(Mixture(parts=(MixturePart(source=here), MixturePart(source=gone))))
    of_the_hub = HubDataset(name="squad"), HubDataset(name=str(tmp_path)), Wikitext()
    assert [data.is_local(source) for source in of_the_hub] == [False, True, False]
    assert not data.is_local(Images(path=str(tmp_path / "images")))


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"data.source.kind": "mnist", "data.source.path": "gone"}, 60_000),
        ({"data.source.kind": "mnist", "data.source.path": "gone", "data.max_train_samples": 500}, 500),
        ({"data.source.kind": "mnist", "data.source.path": "gone", "data.max_samples": 1000}, 950),
    ],
)
def test_the_number_of_samples_is_known_where_the_source_or_the_settings_say_it(settings: dict[str, Any], count: int) -> None:
    run = run_of("starter", **settings)
    supposed = data.make_fake_data(run, None)
    assert isinstance(supposed.train, data.Samples)
    assert len(supposed.train) == count
    batch = supposed.train.batch([0, 1, 2])
    assert batch["image"].shape == (3, 1, 28, 28)
    assert int(batch["label"].max()) < 10
    assert build_meta_model(run, supposed).parameters == 28 * 28 * 128 + 3 * 128 + 128 * 10 + 10


def test_a_shape_that_nobody_knows_is_asked_for(tmp_path: Path) -> None:
    images = {"data.source.kind": "images", "data.source.path": str(tmp_path / "gone")}
    with pytest.raises(ShoalError, match=r"set model.input_dim"):
        data.make_fake_data(run_of("starter", **images), 10)
    with pytest.raises(ShoalError, match=r"set model.output_dim"):
        data.make_fake_data(run_of("starter", **images, **{"model.input_dim": 12}), 10)
    known = data.make_fake_data(run_of("starter", **images, **{"model.input_dim": 12, "model.output_dim": 4}), 10)
    assert (known.info.image_shape, known.info.num_classes) == ((1, 1, 12), 4)
    faces = data.make_fake_data(run_of("classroom/quick-testing"), 10)
    assert faces.info.image_shape == (3, 64, 64)
    with pytest.raises(ShoalError, match=r"set model.vocab_size"):
        data.make_fake_data(run_of("demo-gpt", **{"data.tokenizer": "bpe"}), 10)


def test_a_model_of_the_hub_is_laid_out_from_its_configuration_alone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=300, n_positions=64).save_pretrained(tmp_path)
    settings = {"model.kind": "huggingface", "model.pretrained": tmp_path, "data.tokenizer": "bytes", "data.sequence_length": 16}
    found = build_meta_model(run_of("demo-gpt", **settings))
    assert found.parts.single.vector.device.type == "meta"
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    size = sum(value.numel() for value in whole.parameters())
    assert found.parameters == size
    pytest.importorskip("peft")
    run = run_of("demo-gpt", **settings, **{"model.lora.rank": 2})
    small = build_meta_model(run)
    assert (small.parts.frozen_bytes, small.parameters < size / 10) == (4 * size, True)
    assert small.memory(run).weights == 4 * (size + small.parameters)
    assert small.memory(run).gradients == 4 * small.parameters
    assert small.operations(run) == 16 * (run.training.batch_size or 1) * (4 * size + 6 * small.parameters)
    few_bits = run_of("demo-gpt", **settings, **{"model.lora.rank": 2, "model.load": "nf4"})
    matrices = sum(
        value.numel() for name, value in whole.named_parameters() if name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and value.dim() > 1
    )
    tables = sum(value.numel() for name, value in whole.named_parameters() if name.split(".")[-2] in ("wte", "wpe"))
    packed = build_meta_model(few_bits)
    assert packed.parts.frozen_bytes == matrices // 2 + 4 * matrices // 64 + 2 * tables + 4 * (size - matrices - tables)
    assert packed.operations(few_bits) == small.operations(run)


def test_a_token_takes_the_operations_of_the_experts_that_it_visits() -> None:
    one, two = (run_of("demo-gpt", **{"model.kind": "moe", "model.experts.per_token": visited}) for visited in (1, 2))
    inner = sum(value.numel() for value in build_meta_model(one).parts.single.task.players["model"].parameters() if value.dim() == 3)
    assert inner
    batch = (one.training.batch_size or 1) * (one.data.sequence_length or 0)
    assert build_meta_model(two).operations(two) - build_meta_model(one).operations(one) == 6 * batch * inner / one.model.experts.count


# --- the commands ------------------------------------------------------------------------------------


def test_the_command_simulates_a_large_file_with_a_rate_and_a_number_of_samples(large: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", large, "--workers", "3", "--hours", "1", "--samples", "100000"]
    assert main(words) == 2
    assert re.search(r"needs [\d.]+ GB, which is too much to time one here: say what it takes with --step-s S", capsys.readouterr().err)
    assert main([*words, "--flops", "1e14", "--step-s", "1"]) == 2
    assert "give one of them" in capsys.readouterr().err
    rates = []
    for speed in (["--flops", "1e14"], ["--step-s", str(6 * PARAMETERS * 2048 * 4 / 1e14)]):
        assert main([*words, *speed, "--json"]) == 0
        rates.append(json.loads(capsys.readouterr().out)["samples_per_s"])
    assert rates[0] == rates[1] > 0


def test_the_command_plans_a_large_file(large: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from shoal.simulate import planning

    monkeypatch.setattr(planning, "_CONTRIBUTIONS", {"coarse": 5, "fine": 10})
    monkeypatch.setattr(planning, "_LEAST_ROUNDS", 1)
    (tmp_path / "machines.yaml").write_text("node: {count: 2, memory_gb: 400, flops: 4.0e14, bandwidth_mbps: 10000}\n")
    assert main(["plan", large, "--machines", str(tmp_path / "machines.yaml"), "--samples", "1000000"]) == 0
    shown = capsys.readouterr().out
    assert "1,000,000 samples supposed" in shown
    assert f"{PARAMETERS:,} parameters" in shown
    assert "first choice: diloco" in shown
    assert main(["plan", large, "--machines", "m.yaml", "--samples", "0"]) == 2
    assert "--samples must be more than 0" in capsys.readouterr().err


def test_a_batch_is_timed_without_the_data_where_the_model_is_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "demo-gpt", "--set", "strategy.kind=syncps", "--workers", "2", "--hours", "0.01", "--samples", "5000"]
    small = ["--set", "model.hidden_size=16", "--set", "model.num_layers=1", "--set", "training.batch_size=2"]
    assert main([*words, *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] > 0
