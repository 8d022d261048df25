"""`from shoal import train`: configurations of all forms, parts of one's own, and real worker threads and processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shoal
from shoal import ConfigError, Reporter, Result, TrainerConfig, train
from shoal.errors import ShoalError

Sample = tuple[Tensor, int]


def samples(count: int = 96) -> list[Sample]:
    """Points, and which of three directions each is nearest to."""
    generator = torch.Generator().manual_seed(7)
    points, directions = torch.randn(count, 8, generator=generator), torch.randn(8, 3, generator=generator)
    return [(point, int((point @ directions).argmax())) for point in points]


def net(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


SMALL = {"training": {"epochs": 2, "batch_size": 8, "device": "cpu"}, "logging": {"every_steps": 1}}
PLAIN_SGD = {"optimizer": {"name": "SGD", "learning_rate": 0.1}, "clipping": {"enabled": False}}


def small(tmp_path: Path, **training: Any) -> dict[str, Any]:
    return {**SMALL, "training": {**SMALL["training"], **training}, "output_dir": str(tmp_path / "runs")}


def weights(model: nn.Module | None) -> list[Tensor]:
    assert model is not None
    return [value.clone() for value in model.state_dict().values()]


def assert_close(one: list[Tensor], other: list[Tensor], tolerance: float) -> None:
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


# --- parts of one's own ----------------------------------------------------------------------------------


def test_a_model_and_a_list_of_samples_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    before = weights(model)
    result = train(small(tmp_path), model=model, data=samples(), eval_data=samples(32))
    assert isinstance(result, Result)
    assert (result.status, result.steps, result.contributions) == ("completed", 24, {})
    assert result.model is model, "it is trained in place"
    assert any(not torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))
    assert [record["step"] for record in result.history if record["split"] == "train"] == list(range(1, 25))
    assert [record["step"] for record in result.history if record["split"] == "eval"] == [12, 24]
    assert result.metrics["eval"]["loss"] < result.history[0]["loss"]
    assert 0 <= result.metrics["eval"]["accuracy"] <= 1
    assert "Sequential on cpu, 195 trained parameters" in capsys.readouterr().err
    assert "completed after 24 updates of the weights" in repr(result)


def test_progress_can_be_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small(tmp_path), model=net(), data=samples(), progress=False)
    assert capsys.readouterr().err == ""


def test_a_result_cannot_be_changed_and_exports_what_others_can_read(tmp_path: Path) -> None:
    result = train(small(tmp_path), model=net(), data=samples(), progress=False)
    with pytest.raises(AttributeError):
        result.status = "better"  # type: ignore[misc]
    tensors = load_file(result.export(tmp_path / "out") / "model.safetensors")
    assert_close([tensors[name] for name in result.model.state_dict()], weights(result.model), 0.0)  # type: ignore[union-attr]
    with pytest.raises(ShoalError, match="not empty"):
        result.export(tmp_path / "out")


def test_three_threads_with_a_live_model_are_one_process_with_the_combined_batch(tmp_path: Path) -> None:
    alone = train(small(tmp_path, batch_size=24, **PLAIN_SGD), model=net(), data=samples(), progress=False)
    model = net()
    together = train(small(tmp_path, batch_size=8, **PLAIN_SGD), model=model, data=samples(), workers=3, progress=False)
    assert together.contributions["accepted"] == 3 * 8
    assert together.model is model
    assert_close(weights(together.model), weights(alone.model), 1e-5)
    assert json.loads((together.run_dir / "summary.json").read_text())["status"] == "completed"


class StopAt(Reporter):
    """Asks a run to end after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, recorder: Any) -> None:
        if recorder.step == self.at:
            recorder.stopping = "interrupted"


@pytest.mark.parametrize("workers", [None, 2])
def test_a_run_with_live_objects_goes_on_to_the_same_numbers(tmp_path: Path, workers: int | None) -> None:
    config = small(tmp_path)
    whole = train(config, model=net(), data=samples(), workers=workers, run_dir=tmp_path / "whole", progress=False)
    common: dict[str, Any] = {"data": samples(), "workers": workers, "run_dir": tmp_path / "parts", "progress": False}
    part = train(config, model=net(), reporters=[StopAt(5)], **common)
    assert (part.status, part.steps) == ("interrupted", 5)
    rest = train(config, model=net(seed=2), resume=True, **common)
    assert rest.status == "completed"
    assert_close(weights(rest.model), weights(whole.model), 1e-6 if workers else 0.0)
    figures = [(record["step"], pytest.approx(record["loss"], rel=1e-5)) for record in whole.history]
    assert [(record["step"], record["loss"]) for record in rest.history] == figures


def test_a_loss_and_metrics_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"point": point, "side": label} for point, label in samples()]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(model(batch["point"]), batch["side"]), "spread": batch["point"].std()}

    def hits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["point"]).argmax(1) == batch["side"]).float().mean()

    result = train(small(tmp_path), model=net(), data=rows, eval_data=rows[:30], loss=loss, metrics={"hits": hits})
    assert result.history[0]["spread"] == pytest.approx(1.0, abs=0.3)
    wanted = sum(int(result.model(row["point"]).argmax()) == row["side"] for row in rows[:30]) / 30  # type: ignore[misc]
    assert result.metrics["eval"]["hits"] == pytest.approx(wanted)
    shown = capsys.readouterr().err
    assert re.search(r"eval: loss \S+  spread \S+  hits \S+\n", shown), shown
    assert "hits" in repr(result)


def test_a_metric_that_gives_no_number_is_told_by_its_name(tmp_path: Path) -> None:
    metrics = {"words": lambda model, batch: "many"}
    with pytest.raises(ShoalError, match="`words` must give one number for a batch: it gave str"):
        train(small(tmp_path), model=net(), data=samples(), eval_data=samples()[:30], metrics=metrics, progress=False)


def test_a_metric_beside_the_task_of_a_configuration(tmp_path: Path) -> None:
    settings = ["training.max_steps=2", f"output_dir={tmp_path}"]
    result = train("starter", overrides=settings, metrics={"mean": lambda model, batch: batch["image"].mean()}, progress=False)
    assert 0 < result.metrics["eval"]["mean"] < 1
    assert {"loss", "accuracy"} <= result.metrics["eval"].keys()


def test_a_collate_makes_the_batches(tmp_path: Path) -> None:
    texts = ["a b c", "b", "c a"] * 20

    def collate(rows: list[str]) -> tuple[Tensor, Tensor]:
        counts = torch.tensor([[float(row.count(letter)) for letter in "abc"] for row in rows])
        return counts, counts.sum(1)

    config = small(tmp_path, optimizer={"learning_rate": 0.1})
    result = train(config, model=nn.Linear(3, 1), data=texts, collate=collate, progress=False)
    assert result.history[-1]["loss"] < result.history[0]["loss"], "squared error, since the targets are numbers"


class Endless(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        while True:
            yield from samples()


@pytest.mark.parametrize("workers", [None, 2])
def test_something_to_iterate_over_is_enough_where_the_run_has_an_end(tmp_path: Path, workers: int | None) -> None:
    config = small(tmp_path, epochs=None, max_steps=4)
    result = train(config, model=net(), data=Endless(), workers=workers, progress=False)
    assert result.summary["samples"] == 4 * 8 * (workers or 1)
    with pytest.raises(ShoalError, match=r"a stream has no end that is known beforehand: set training\.max_steps"):
        train(small(tmp_path), model=net(), data=Endless(), progress=False)


def test_data_sets_of_torch_and_of_the_hub_serve(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    points, labels = torch.stack([point for point, _ in samples()]), torch.tensor([label for _, label in samples()])
    of_torch = train(small(tmp_path), model=net(), data=TensorDataset(points, labels), progress=False)
    of_hub = train(
        small(tmp_path),
        model=net(),
        data=datasets.Dataset.from_dict({"x": points.tolist(), "label": labels.tolist()}),
        progress=False,
    )
    assert_close(weights(of_hub.model), weights(of_torch.model), 0.0)


def test_a_model_of_transformers_learns_with_its_own_loss(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = [{"input_ids": [(start + place) % 16 for place in range(8)]} for start in range(16)] * 4
    model = transformers.AutoModelForCausalLM.from_config(shape)
    result = train(small(tmp_path, epochs=6), model=model, data=rows, workers=2, progress=False)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    again = transformers.AutoModelForCausalLM.from_pretrained(result.export(tmp_path / "out"))
    assert_close(weights(again), weights(result.model), 0.0)


def test_an_own_network_learns_from_data_that_the_configuration_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = train("starter", model=model, overrides=["training.max_steps=3", f"output_dir={tmp_path}"], progress=False)
    assert (result.model, result.steps) == (model, 3)
    assert "accuracy" in result.metrics["eval"]


def test_a_configuration_may_ask_for_threads_too(tmp_path: Path) -> None:
    settings = ["transport.kind=in-process", "training.max_steps=3", f"output_dir={tmp_path}"]
    result = train("starter", workers=2, overrides=settings, progress=False)
    assert (result.steps, result.contributions["accepted"]) == (3, 6)
    assert not list((result.run_dir / "workers").glob("*.log")), "no process was started"


# --- worker processes ------------------------------------------------------------------------------------

PARTS = """\
import torch
from torch import nn

def net():
    return nn.Linear(4, 2)

def rows():
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(64, 4, generator=generator)
    return [(point, int(point[0] > 0)) for point in points]

def loss(model, batch):
    points, sides = batch
    return nn.functional.cross_entropy(model(points), sides)
"""


def test_functions_that_are_named_serve_worker_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    parts = {"model": "own_parts:net", "data": "own_parts:rows", "loss": "own_parts:loss"}
    threads_or_not = train(small(tmp_path), **parts, workers=2, progress=False)
    assert threads_or_not.contributions["accepted"] == 2 * 8
    assert list((threads_or_not.run_dir / "workers").glob("w*.log")), "processes have logs"
    alone = train(small(tmp_path, batch_size=16), **parts, progress=False)
    assert_close(weights(threads_or_not.model), weights(alone.model), 1e-5)


def test_several_workers_share_what_a_configuration_for_one_describes(tmp_path: Path) -> None:
    result = train("starter", workers=2, overrides=["training.max_steps=3", "evaluation.strategy=never"], run_dir=tmp_path / "run")
    assert (result.status, result.contributions["accepted"]) == ("completed", 6)


@pytest.mark.long
def test_a_run_through_a_database_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    settings = ["strategy.kind=workunits", "transport.kind=postgres", "training.max_steps=2", "strategy.units_per_update=2"]
    result = train("starter", workers=1, overrides=settings, run_dir=tmp_path / "run", progress=False)
    assert (result.status, result.steps, result.contributions["accepted"]) == ("completed", 2, 4)


# --- configurations --------------------------------------------------------------------------------------


def test_files_presets_lists_dicts_and_runs_describe_the_same(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("dialect: shoal\ntraining: {max_steps: 2}\n")
    settings = [f"output_dir={tmp_path / 'runs'}"]
    ways = [
        train(["starter", tmp_path / "more.yaml"], overrides=settings, progress=False),
        train("starter", overrides=[*settings, "training.max_steps=2"], progress=False),
        train(shoal.load("starter", overrides=["training.max_steps=2"]), overrides=settings, progress=False),
    ]
    assert len({way.metrics["eval"]["loss"] for way in ways}) == 1
    assert {way.steps for way in ways} == {2}


def test_a_mistake_in_a_dict_is_told_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean `epochs`") as raised:
        train({"training": {"epohcs": 1}}, model=net(), data=samples())
    assert 'config["training"]["epohcs"]' in str(raised.value)


class Notes(Reporter):
    """Overrides one method, and hears of nothing else."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def record(self, record: dict[str, Any]) -> None:
        self.steps.append(record["step"])


def test_a_reporter_overrides_what_it_wants(tmp_path: Path) -> None:
    notes = Notes()
    result = train(small(tmp_path), model=net(), data=samples(), reporters=[notes], progress=False)
    assert notes.steps == [record["step"] for record in result.history]


def test_an_interrupted_call_says_how_to_resume_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Interrupting(Reporter):
        def step(self, recorder: Any) -> None:
            raise KeyboardInterrupt

    folder = str(tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        train(small(tmp_path), model=net(), data=samples(), reporters=[Interrupting()], run_dir=folder)
    assert f"interrupted: the same call with run_dir={folder!r} and resume=True continues" in capfd.readouterr().err
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["status"] == "interrupted"


# --- wrong arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config": nn.Linear(1, 1)}, "config= takes a file, a preset.*this is Linear"),
        ({"config": []}, "config= takes a file"),
        ({"model": nn.Linear}, "model= takes a torch.nn.Module.*make an object of it"),
        ({"model": "net"}, "model= takes a torch.nn.Module.*'module:function'"),
        ({"data": 5}, "data= takes a data set.*this is int 5"),
        ({"data": []}, "data= takes at least one sample"),
        ({"data": DataLoader([1])}, r"data= takes samples.*give loader\.dataset"),
        ({"data": (torch.zeros(9, 8), torch.zeros(9))}, r"data= takes samples.*give list\(zip\(inputs, targets\)\)"),
        ({"data": iter([1])}, "data= takes something that can be read again"),
        ({"eval_data": "rows"}, "eval_data= takes a data set"),
        ({"collate": 3}, "collate= takes a function"),
        ({"loss": 3}, "loss= takes a function"),
        ({"metrics": [max]}, "metrics= takes a dict of functions"),
        ({"metrics": {"top": 3}}, "metrics= takes a dict of functions"),
        ({"workers": 0}, "workers= takes a number of workers"),
        ({"workers": "3"}, "workers= takes a number of workers"),
        ({"overrides": "training.epochs=3"}, "overrides= takes a list of settings"),
        ({"reporters": [print]}, r"reporters= takes objects.*shoal\.Reporter"),
    ],
)
def test_a_wrong_argument_is_told_by_its_name(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    right: dict[str, Any] = {"config": small(tmp_path), "model": net(), "data": samples()}
    with pytest.raises(TypeError, match=words) as raised:
        train(**right | arguments)
    assert isinstance(raised.value, ShoalError)
    assert not (tmp_path / "runs").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data": None}, "nothing says what it learns from: give data="),
        ({"model": None}, "a model of kind mlp is made for data that settings"),
        ({"model": "nowhere:net"}, "there is no `nowhere:net`"),
        ({"overrides": ["transport.kind=zmq"], "workers": 2}, r'other processes, and transport\.kind is zmq.*model="module:function"'),
        ({"overrides": ["engine.kind=ddp"]}, "the engine ddp is several processes: start this program with torchrun"),
        ({"data": [{"x": torch.zeros(8), "text": "hi"}] * 9}, "`text` of the samples .str. cannot be stacked to a batch.*collate="),
        ({"loss": lambda model, batch: 3}, "loss= must give a tensor with one number.*it gave int"),
        ({"loss": lambda model, batch: {"cost": batch[0].sum()}}, r"loss= must.*a dict without `loss` \(it has cost\)"),
        ({"loss": lambda model, batch: batch[0]}, r"loss= must give a tensor with one number.*shape \(8, 8\)"),
        ({"model": nn.Linear(8, 3).requires_grad_(False)}, "no parameter to train"),
    ],
)
def test_parts_that_do_not_make_a_run_are_told(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    right: dict[str, Any] = {"config": small(tmp_path), "model": net(), "data": samples(), "progress": False}
    with pytest.raises(ShoalError, match=words):
        train(**right | arguments)


def test_a_mistake_in_ones_own_loss_comes_out_as_it_is(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("my mistake")

    with pytest.raises(KeyError, match="my mistake"):
        train(small(tmp_path), model=net(), data=samples(), loss=loss, workers=2, progress=False)


# --- TrainerConfig ---------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    shape = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows"
    rows.mkdir()
    for name, count in (("train", 200), ("validation", 8)):
        lines = [json.dumps({"content": f"{name} row {number} of many"}) + "\n" for number in range(count)]
        (rows / f"{name}.jsonl").write_text("".join(lines))
    return TrainerConfig(
        model_name=str(tmp_path / "model"),
        dataset_name=str(rows),
        output_dir=str(tmp_path / "out"),
        text_field="content",
        seq_len=32,
        batch_size=2,
        grad_accum=2,
        lr=1e-2,
        max_steps=4,
        diloco_loops=3,
        outer_lr_schedule="cosine",
        outer_grad_clip=5.0,
        checkpoint_steps=4,
        log_with="tensorboard",
        log_dir=str(tmp_path / "events"),
        eval_batches=4,
        shuffle_buffer=50,
    )


OURS = ["data.tokenizer=bytes", "training.device=cpu", "logging.every_steps=1"]


def test_a_trainer_config_trains_with_diloco(config: TrainerConfig, tmp_path: Path) -> None:
    result = train(config, workers=1, overrides=OURS, run_dir=tmp_path / "run", progress=False)
    assert (result.status, result.steps) == ("completed", 3)
    assert result.summary["samples"] == 3 * 4 * 2 * 2
    assert [record["step"] for record in result.history if record["split"] == "eval"] == [1, 2, 3]
    trained = [record for record in result.history if record["split"] == "train"]
    assert trained[-1]["loss"] < trained[0]["loss"]
    assert [round(record["outer_learning_rate"], 3) for record in trained] == [0.7, 0.525, 0.175]
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").num_parameters() > 0
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) >= 2
    assert list((tmp_path / "events").glob("events.*")), "log_with and log_dir count from Python, too"
    assert (tmp_path / "run" / "loss.png").exists()


def test_a_wrong_field_is_told_and_nothing_starts(config: TrainerConfig, tmp_path: Path) -> None:
    config.outer_opt = "SDG"
    with pytest.raises(ConfigError, match=r"TrainerConfig\.outer_opt\n.*did you mean `SGD`"):
        train(config, overrides=OURS, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
