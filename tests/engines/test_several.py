"""Several processes give what one gives, whichever engine they are. ZeRO's are in test_zero.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.support import rank_processes
from tests.support.rank_processes import DDP, FSDP, KEPT

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return rank_processes.losses_of(rank_processes.engine_of())


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes found, one after the other."""
    return rank_processes.together(
        "several",
        2,
        json.dumps(["agreement", DDP, FSDP, KEPT]),
        json.dumps(["averages", DDP, FSDP]),
        json.dumps(["best", str(tmp_path_factory.mktemp("best")), FSDP]),
        '["statistics"]',
        '["small_last_batch"]',
    )


def check_agreement(found: list[dict[str, list[float]]], alone: list[float]) -> None:
    for name, losses in found[0].items():
        assert losses == pytest.approx(alone, rel=1e-4), name
        assert all(rank[name] == losses for rank in found), "all ranks are told the same"


def test_ddp_and_fsdp_follow_one_process_step_by_step(alone: list[float], in_two: list[dict[str, Any]]) -> None:
    check_agreement([found["agreement"] for found in in_two], alone)


def test_every_engine_averages_evaluates_and_restores_what_one_process_does(in_two: list[dict[str, Any]]) -> None:
    wanted = rank_processes.averages(None, json.dumps({"kind": "single"}))[json.dumps({"kind": "single"})]
    for found in in_two:
        for name, seen in found["averages"].items():
            torch.testing.assert_close(torch.tensor(seen["average"]), torch.tensor(wanted["average"]), rtol=1e-4, atol=1e-6, msg=name)
            assert seen["restored"] == seen["average"], name
            assert seen["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-4), name


def test_shards_of_the_best_weights_are_kept_and_read_back(in_two: list[dict[str, Any]]) -> None:
    single = rank_processes.engine_of(optimizer=rank_processes.PLAIN)
    rank_processes.losses_of(single, 0, 2)
    for found in in_two:
        step, value, *vector = found["best"]
        assert (step, value) == (1, 1.0)
        torch.testing.assert_close(torch.tensor(vector), single.vector, rtol=1e-4, atol=1e-6)


def check_flat_view(seen_by_all: list[dict[str, Any]]) -> None:
    single = rank_processes.engine_of(optimizer=rank_processes.PLAIN)
    single.gradients(rank_processes.batches(2))
    gradient = single.gradient.clone()
    single.apply(gradient, 10)
    for seen in seen_by_all:
        for name, values in seen.items():
            torch.testing.assert_close(torch.tensor(values["gradient"]), gradient, rtol=1e-4, atol=1e-7, msg=name)
            torch.testing.assert_close(torch.tensor(values["vector"]), single.vector, rtol=1e-4, atol=1e-6, msg=name)


def test_every_rank_sees_the_whole_gradient_and_the_whole_weights() -> None:
    check_flat_view(rank_processes.together("flat_view", 3, DDP, FSDP))


def test_running_figures_of_batchnorm_are_the_same_in_all_ranks(in_two: list[dict[str, Any]]) -> None:
    first, second = (found["statistics"] for found in in_two)
    assert first == second
    assert any(first["buffers"])


def test_a_rank_without_a_sample_of_a_small_last_batch_computes_along(in_two: list[dict[str, Any]]) -> None:
    single = rank_processes.engine_of(gradient_accumulation_steps=1, optimizer=rank_processes.PLAIN)
    whole = rank_processes.batches(0)[0]
    for rows in (len(whole["labels"]), 1):
        single.step([{name: value[:rows] for name, value in whole.items()}])
    for found in in_two:
        torch.testing.assert_close(torch.tensor(found["small_last_batch"]), single.vector, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_sharded_is_refused() -> None:
    from shoal.engines.deepspeed.config import zero_config
    from shoal.engines.fsdp import _check, refuse_several
    from shoal.errors import ShoalError

    class Two:
        players: dict[str, Any] = {"generator": None, "discriminator": None}  # noqa: RUF012

    class One:
        players: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}  # noqa: RUF012

    class Normed:
        players: dict[str, Any] = {"model": torch.nn.BatchNorm1d(2)}  # noqa: RUF012

    run, cpu = rank_processes.run_of({"kind": "fsdp"}), torch.device("cpu")
    with pytest.raises(ShoalError, match="take ddp"):
        refuse_several(run, Two())  # type: ignore[arg-type]
    with pytest.raises(ShoalError, match="figures of BatchNorm"):
        refuse_several(run, Normed())  # type: ignore[arg-type]
    with pytest.raises(ShoalError, match="whole matrices"):
        _check(run, One(), "Muon", cpu)  # type: ignore[arg-type]
    with pytest.raises(ShoalError, match="in main memory already"):
        _check(rank_processes.run_of({"kind": "fsdp", "cpu_offload": True}), One(), "AdamW", cpu)  # type: ignore[arg-type]
    with pytest.raises(ShoalError, match="that is the engine ddp"):
        zero_config(rank_processes.run_of({"kind": "deepspeed", "zero_stage": 0}), 2, None)


def test_deepspeeds_settings_are_shoals() -> None:
    from shoal.engines.deepspeed.config import zero_config

    engine = {"kind": "deepspeed", "zero_stage": 3, "cpu_offload": True, "allgather_bucket_size": 7, "reduce_bucket_size": 8}
    engine |= {"stage3_prefetch_bucket_size": 9, "stage3_param_persistence_threshold": 10, "stage3_max_live_parameters": 11}
    config = zero_config(rank_processes.run_of(engine, precision={"kind": "bf16"}), 4, 0.5)
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (64, 8, 2)
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    zero = config["zero_optimization"]
    names = ("allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size")
    assert [zero[name] for name in (*names, "stage3_param_persistence_threshold", "stage3_max_live_parameters")] == [7, 8, 9, 10, 11]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
