"""Tensors on their way to a machine without the model's files: compared, kept, and never taken where they are damaged."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ShoalError
from shoal.serve.nodes import weights as module
from shoal.serve.nodes.weights import RemoteWeights, WeightStore

WEIGHTS = {"a": torch.arange(1000, dtype=torch.float32), "half": torch.ones(3, 2, dtype=torch.bfloat16)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "PIECE_BYTES", 600)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_tensors_arrive_in_pieces_and_are_kept_for_the_next_time():
    first, second = RemoteWeights(WeightStore(WEIGHTS).answer), RemoteWeights(WeightStore(WEIGHTS).answer)
    for fetched in (first, second):
        for name, tensor in WEIGHTS.items():
            assert torch.equal(fetched.get(name), tensor)
            assert fetched.get(name).dtype == tensor.dtype
    assert (first.received_bytes, second.received_bytes) == (4012, 0)


def test_two_machines_that_share_a_folder_may_keep_the_same_tensor_at_once(monkeypatch):
    rename = module.os.replace

    def while_another_does_the_same(source, target):
        monkeypatch.setattr(module.os, "replace", rename)
        assert torch.equal(RemoteWeights(WeightStore(WEIGHTS).answer).get("a"), WEIGHTS["a"])
        rename(source, target)

    monkeypatch.setattr(module.os, "replace", while_another_does_the_same)
    first = RemoteWeights(WeightStore(WEIGHTS).answer)
    assert torch.equal(first.get("a"), WEIGHTS["a"])
    assert len(list(first.folder.iterdir())) == 1


def test_what_was_damaged_on_the_way_is_refused_and_not_kept():
    served = WeightStore(WEIGHTS)

    def damaging(header):
        answer, frames = served.answer(header)
        return answer, tuple(bytes(len(frame)) for frame in frames)

    with pytest.raises(ShoalError, match="its digest differs"):
        RemoteWeights(damaging).get("a")
    assert not list(RemoteWeights(damaging).folder.glob("*"))
    with pytest.raises(ShoalError, match="only 0 of 4000 bytes"):
        RemoteWeights(lambda header: (served.answer(header)[0], ())).get("a")


def test_what_was_damaged_on_the_disk_is_received_again():
    RemoteWeights(WeightStore(WEIGHTS).answer).get("a")
    (kept,) = RemoteWeights(WeightStore(WEIGHTS).answer).folder.glob("*")
    kept.write_bytes(b"\0" * 4000)
    again = RemoteWeights(WeightStore(WEIGHTS).answer)
    assert torch.equal(again.get("a"), WEIGHTS["a"])
    assert again.received_bytes == 4000
    assert RemoteWeights(WeightStore(WEIGHTS).answer)._kept(kept, kept.name) is not None


@pytest.mark.parametrize(
    "lie",
    [
        {"digest": "../../etc/passwd"},
        {"digest": "a" * 64, "shape": [10**9, 10**9]},
        {"shape": "no shape"},
        {"shape": [-1]},
        {"type": "complex"},
        {"shape": [3]},
    ],
)
def test_what_a_server_says_of_a_tensor_is_checked_before_anything_is_received(lie):
    served = WeightStore(WEIGHTS)

    def lying(header):
        answer, frames = served.answer(header)
        return ({**answer, **lie} if "digest" in answer else answer), frames

    with pytest.raises(ShoalError):
        RemoteWeights(lying).get("a")


def test_a_machine_that_sees_the_very_file_reads_it_itself(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(WEIGHTS, tmp_path / "model.safetensors")
    fetched = RemoteWeights(WeightStore.of_folder(tmp_path, "inner.").answer)
    assert torch.equal(fetched.get("inner.a"), WEIGHTS["a"])
    assert fetched.received_bytes == 0
