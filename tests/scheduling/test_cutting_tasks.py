"""The data cut into tasks, and the memory that training takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal import models
from shoal.config import Run
from shoal.config.load import ConfigFile, resolve
from shoal.data.loaded_data import Info
from shoal.errors import ShoalError
from shoal.runs.task_split import SplitInput, listed_workers, split_into_tasks
from shoal.scheduling import memory_estimate


def run_of(folder: Path, text: str) -> Run:
    (folder / "run.yaml").write_text("dialect: shoal\nmodel: {kind: gpt}\nstrategy: {kind: async}\n" + text)
    loaded = resolve([ConfigFile(str(folder / "run.yaml"))])
    assert loaded.ok, loaded.problems
    return loaded.run


def extent(batches: int, workers: int = 2, grain: int = 1) -> SplitInput:
    return SplitInput(batches, grain, workers, 1_000_000, 256, 1.0)


def spans(run: Run, of: SplitInput) -> list[tuple[str, int, int]]:
    return [(task.id, task.first, task.end) for task in split_into_tasks(run, of).tasks.tasks]


def test_what_the_tasks_leave_is_cut_into_further_ones_like_them_with_a_note(tmp_path: Path) -> None:
    tasks = "[{id: a, data_share: 0.25, model_share: 0.5, required_flops: 100, priority: 2}, {id: b, data_share: 0.25, model_share: 0.5}]"
    cut = split_into_tasks(run_of(tmp_path, f"scheduler: {{kind: capability, tasks: {tasks}}}\n"), extent(40))
    found = cut.tasks.tasks
    assert [(task.id, task.first, task.end) for task in found] == [("a", 0, 10), ("b", 10, 20), ("rest-1", 20, 30), ("rest-2", 30, 40)]
    assert cut.note == "the tasks listed have 50% of the data; what they leave is cut into rest-1 to rest-2"
    assert [task.work for task in found] == [10.0] * 4  # 100 flops over ten batches; the others take as much
    assert [task.priority for task in found] == [2, 1, 1, 1]
    assert len({task.memory_gb for task in found}) == 1


def test_tasks_without_a_share_have_equal_parts_of_what_is_left(tmp_path: Path) -> None:
    run = run_of(tmp_path, "scheduler: {tasks: [{id: a, data_share: 0.5}, {id: b}, {id: c}]}\n")
    assert spans(run, extent(40)) == [("a", 0, 20), ("b", 20, 30), ("c", 30, 40)]


@pytest.mark.parametrize(
    ("batches", "workers", "grain", "count"), [(6, 2, 1, 2), (1000, 2, 1, 8), (40, 2, 1, 5), (12, 13, 1, 12), (64, 2, 8, 2)]
)
def test_data_is_cut_by_itself_so_that_all_of_it_is_covered(tmp_path: Path, batches: int, workers: int, grain: int, count: int) -> None:
    found = spans(run_of(tmp_path, "scheduler: {kind: priority}\n"), extent(batches, workers, grain))
    assert len(found) == count
    ends = [0, *(end for _, _, end in found)]
    assert [first for _, first, _ in found] == ends[:-1]
    assert ends[-1] == batches
    assert all(end % grain == 0 for end in ends)
    assert all(first < end for _, first, end in found)


def test_more_tasks_than_contributions_are_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, "scheduler: {tasks: [{id: a}, {id: b}, {id: c}]}\n")
    with pytest.raises(ShoalError, match="3 tasks are to share 2 contributions of an epoch"):
        split_into_tasks(run, extent(2))


def test_listed_workers_are_told_with_their_place(tmp_path: Path) -> None:
    hosts = "{a: {host: 10.0.0.1, port: 8001}, b: {host: 10.0.0.2, port: 0}, c: {memory_gb: 4}}"
    run = run_of(tmp_path, f"scheduler: {{kind: priority}}\ncluster: {{workers: [a, b, c], hosts: {hosts}}}\n")
    assert listed_workers(run) == {"a": "10.0.0.1:8001", "b": "10.0.0.2", "c": ""}


@pytest.mark.parametrize(
    "model",
    [
        "{kind: gpt, hidden_size: 128, num_layers: 4, num_heads: 4, max_seq_len: 64}",
        "{kind: gpt, hidden_size: 64, num_layers: 2, num_heads: 2, max_seq_len: 128}",
        "{kind: lstm, hidden_size: 128, num_layers: 2}",
    ],
)
def test_the_memory_of_training_is_estimated_within_a_factor_of_two_of_what_is_kept(tmp_path: Path, model: str) -> None:
    (tmp_path / "run.yaml").write_text(f"dialect: shoal\nmodel: {model}\ndata: {{sequence_length: 64}}\ntraining: {{batch_size: 8}}\n")
    run = resolve([ConfigFile(str(tmp_path / "run.yaml"))]).run
    network = models.build(run, Info("text", "text", vocab_size=256))["model"]
    parameters = sum(one.numel() for one in network.parameters())
    own, kept = {one.data_ptr() for one in network.parameters()}, dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(0, 256, (8, 64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = network(ids)
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1])[:, :256], ids.reshape(-1))
    assert loss.requires_grad
    estimate = memory_estimate.training_memory(run, parameters, 256)
    assert 0.5 < estimate.activations / sum(kept.values()) < 2.0
    assert estimate.optimizer == 8 * parameters  # AdamW keeps two numbers
    assert estimate.gb == pytest.approx((16 * parameters + estimate.activations) / 1e9)
