"""GGUF files are served as they are: no expanded copy is made, and the model computes what the converted file gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.config.load import parse_override
from shoal.data import load_tokenizer
from shoal.errors import ShoalError
from shoal.models.huggingface.gguf_weights import GgufWeights
from shoal.models.huggingface.gpt_description import describe, described
from shoal.models.packed.layers import byte_count
from shoal.runs.export.gguf_file import write_gguf
from shoal.runs.trained_model import open_model
from shoal.serve.load_model import open_served
from shoal.serve.model_targets import open_pool, read_targets
from shoal.serve.nodes.model_description import model_maker
from shoal.untrusted.gguf_header import check_gguf

pytest.importorskip("transformers")
pytest.importorskip("gguf", reason="reading a GGUF file's vocabulary needs gguf: pip install gguf")
from tests.runs.test_gguf import small, with_rule
from tests.serve.test_model_targets import write_lora

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "shoal"


def written(folder: Path, kind: str, form: str) -> Path:
    tokenizer = load_tokenizer(str(with_rule(folder / "tokenizer", "qwen25", "qwen2")))
    sizes = {"n_embd": 64} if kind == "gpt2" else WIDE | {"head_dim": 128 if kind == "qwen3" else 16}  # what transformers expects in a file
    write_gguf(small(kind, vocab_size=600, **sizes), tokenizer, form, folder / "m.gguf", "small", lambda note: None)
    return folder / "m.gguf"


def opened(file: Path, nodes: int = 1, weights: str = "auto", warn=lambda text: None):
    return open_served([str(file)], [parse_override("training.device=cpu"), parse_override(f"serving.weights={weights}")], warn, nodes)


@pytest.mark.parametrize(
    ("kind", "form", "most"),
    [
        ("llama", "f32", 1e-5),
        ("llama", "q4_0", 0.03),
        ("qwen3", "q8_0", 0.03),
        ("qwen2", "bf16", 0.03),
        ("gpt2", "q4_0", 0.05),
    ],
)
@torch.inference_mode()
def test_a_file_computes_what_its_expanded_numbers_give(tmp_path, state, kind, form, most):
    file = written(tmp_path, kind, form)
    served = opened(file)
    assert not (state / "converted").exists(), "no expanded copy"
    wanted = open_model(str(file), lambda text: None).task.players["model"](IDS)
    assert (served.model(IDS) - wanted).abs().max() <= most * wanted.abs().max()
    exact = opened(file, weights="fp32").model
    assert (exact(IDS) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    kinds = {one.shape.kind for one in served.model.modules() if hasattr(one, "shape")}
    assert kinds == {"f32": set(), "q4_0": {"int4", "int8"}, "q8_0": {"int8"}, "bf16": {"bf16"}}[form]
    if form != "f32":
        assert byte_count(served.model) < (0.6 if form == "bf16" else 0.5) * byte_count(exact)


def test_what_is_repacked_is_said(tmp_path):
    said = []
    opened(written(tmp_path, "llama", "q8_0"), warn=said.append)
    assert any("Shoal does not compute with the one in the file: Q8_0 as int8" in text for text in said)


@torch.inference_mode()
def test_other_machines_get_the_packed_bytes(tmp_path):
    file = written(tmp_path, "llama", "q4_0")
    whole, spread = opened(file), opened(file, nodes=2)
    assert all(one.is_meta for one in spread.model.parameters())
    make, get = model_maker(spread.described, spread.tensors.get, torch.device("cpu"))
    model = make()
    model.load_state_dict({name: get(name) for name in model.state_dict()}, assign=True)
    assert torch.equal(model(IDS), whole.model(IDS))


def test_a_file_whose_tensors_do_not_fit_is_refused(tmp_path):
    file = written(tmp_path, "llama", "q4_0")
    header = check_gguf(file)
    conversion = described(opened(file, nodes=2).described["gpt"])
    place = header.tensors["blk.0.attn_q.weight"]
    for change, reason in (
        (place._replace(offset=1 << 40), "reaches beyond the end of the file"),
        (place._replace(format=10), "has the format 10, which is not read as it is"),
        (place._replace(shape=(32, 64)), "has other sizes than the model"),
        (place._replace(shape=(64, 33)), "which Q4_0 does not have"),
    ):
        with pytest.raises(ShoalError, match=reason):
            GgufWeights(file, header._replace(tensors=header.tensors | {"blk.0.attn_q.weight": change}), conversion)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": -1},
        {"vocab_size": 1 << 40},
        {"frequencies": [float("nan")] * 8},
        {"frequencies": [1.0]},
        {"variant": {}},
        {"settings": {"kind": "lstm"}},
        {"settings": None},
    ],
)
def test_a_malformed_description_of_a_model_is_refused(tmp_path, change):
    about = describe(described(opened(written(tmp_path, "llama", "f32"), nodes=2).described["gpt"]))
    with pytest.raises(ShoalError, match="description of a GPT is malformed"):
        described(about | change)


def test_files_are_served_beside_each_other_with_adapters(tmp_path):
    file = written(tmp_path, "llama", "q4_0")
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())
    lora = write_lora(tmp_path / "polite", "somebody/m", WIDE["hidden_size"])
    targets = read_targets([str(file), str(tmp_path / "other.gguf"), str(lora)], [])
    assert {one.name: list(one.adapters) for one in targets} == {"m": ["polite"], "other": []}
    pool = open_pool(targets, [parse_override("training.device=cpu")], print, print)
    assert [state.name for state in pool.states()] == ["m", "other", "m+polite"]
    assert pool.first.served.adapters.names == ["polite"]
    with pytest.raises(ShoalError, match="m takes about"):
        open_pool(targets, [parse_override("training.device=cpu"), parse_override("serving.memory=60kB")], print, print)
