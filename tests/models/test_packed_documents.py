"""Documents that share a row are computed as if each had a row of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.gpt import Gpt
from shoal.models.layers import documents as packing
from shoal.models.layers.documents import packed_documents
from shoal.models.lstm import Lstm
from shoal.models.moe import Moe
from shoal.models.partial_model import partial_model

VOCABULARY = 40
ROWS = [[5, 3, 4], [12], [1, 1, 9], [7, 2]]
"""Lengths of the documents of rows of 12 tokens; the last row is padded."""
SMALL: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 12}
ROTARY: dict[str, Any] = {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms", "num_kv_heads": 2, "bias": False}
DROPLESS = schema.Experts(count=4, capacity_factor=None)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from shoal.models.huggingface.model import HuggingFace

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return HuggingFace(transformers.LlamaForCausalLM(config))


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from shoal.models.huggingface.model import HuggingFace

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=12, n_embd=32, n_layer=2, n_head=4, **rates)
    return HuggingFace(transformers.GPT2LMHeadModel(config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "learned": lambda: Gpt(schema.Gpt(**SMALL), VOCABULARY),
    "rotary": lambda: Gpt(schema.Gpt(**SMALL, **ROTARY), VOCABULARY),
    "mixture": lambda: Moe(schema.Moe(**SMALL, **ROTARY, experts=DROPLESS), VOCABULARY),
    "mixture-of-heads": lambda: Moe(
        schema.Moe(**SMALL, experts=DROPLESS, mixture_of_heads=schema.MixtureOfHeads(enabled=True)), VOCABULARY
    ),
    "lstm": lambda: Lstm(schema.Lstm(hidden_size=16), VOCABULARY),
    "llama": llama,
    "gpt2": gpt2,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]().train()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of the rows, their labels, and the lengths of the documents."""
    generator = torch.Generator().manual_seed(1)
    ids_BL, labels_BL = (torch.randint(VOCABULARY, (len(ROWS), 12), generator=generator) for _ in range(2))
    return ids_BL, labels_BL, torch.tensor([row + [0] * (3 - len(row)) for row in ROWS])


def losses(model: nn.Module, ids_BL: Tensor, labels_BL: Tensor, lengths_BM: Tensor | None = None) -> Tensor:
    given = {} if lengths_BM is None else {"document_lengths": lengths_BM}
    return F.cross_entropy(model(ids_BL, **given).float().transpose(1, 2), labels_BL, reduction="none")


def of_documents(values_BL: Tensor) -> list[Tensor]:
    return [part for row, sizes in zip(values_BL, ROWS, strict=True) for part in row[: sum(sizes)].split(sizes)]


def both_ways(model: nn.Module) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Losses of all tokens and the gradient: packed, and with each document in a row of its own."""
    ids_BL, labels_BL, lengths_BM = batch()
    packed = torch.cat(of_documents(losses(model, ids_BL, labels_BL, lengths_BM)))
    pairs = zip(of_documents(ids_BL), of_documents(labels_BL), strict=True)
    alone = torch.cat([losses(model, ids.unsqueeze(0), labels.unsqueeze(0)).squeeze(0) for ids, labels in pairs])
    parameters = [one for one in model.parameters() if one.requires_grad]

    def gradient(total: Tensor) -> Tensor:
        slopes = torch.autograd.grad(total, parameters, allow_unused=True)
        return torch.cat([slope.flatten() for slope in slopes if slope is not None])

    return (packed, gradient(packed.sum())), (alone, gradient(alone.sum()))


@pytest.mark.parametrize("cost", [0, 10**9], ids=["one-by-one", "mask"])
def test_losses_and_gradients_are_those_of_each_document_alone(model: nn.Module, cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CALL_COST", cost)
    (packed, slope), (alone, expected) = both_ways(model)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cost", [0, 10**9], ids=["one-by-one", "mask"])
def test_in_bf16_they_agree_to_its_rounding(cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CALL_COST", cost)
    torch.manual_seed(0)
    model = MODELS["rotary"]()
    with torch.autocast("cpu", torch.bfloat16):
        (packed, slope), (alone, expected) = both_ways(model)
    torch.testing.assert_close(packed, alone, rtol=0, atol=0.02)
    assert float((slope - expected).norm() / expected.norm()) < 0.02


def test_recomputed_activations_are_the_same() -> None:
    torch.manual_seed(0)
    model: Any = MODELS["rotary"]()
    (plain, slope), _ = both_ways(model)
    model.gradient_checkpointing(True)
    (again, recomputed), _ = both_ways(model)
    assert torch.equal(plain, again)
    assert torch.equal(slope, recomputed)


@pytest.mark.parametrize("name", ["learned", "rotary", "llama", "gpt2"])
def test_stages_compute_what_the_whole_model_does(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids_BL, _, lengths_BM = batch()
    whole = model(ids_BL, document_lengths=lengths_BM)
    first, last = partial_model(model, 0, 1, 2), partial_model(model, 1, 2, 2)
    stream = first.through(ids_BL, document_lengths=lengths_BM)
    last.travel.receive = lambda: stream
    torch.testing.assert_close(last(ids_BL, document_lengths=lengths_BM), whole)


def test_positions_begin_anew_and_padding_is_a_document() -> None:
    found = packed_documents(torch.tensor([[2, 1, 0], [3, 2, 0], [1, 1, 1]]), 5)
    assert found.positions_BL.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 0, 1], [0, 0, 0, 0, 1]]
    assert found.lengths_N.tolist() == [2, 1, 0, 2, 3, 2, 0, 0, 1, 1, 1, 2]
    assert found.mask()[0, 0].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_a_model_that_mixes_documents_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from shoal.models.huggingface.model import HuggingFace

    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ShoalError, match=r"data\.packing: BloomForCausalLM"):
        HuggingFace(bloom).expect_documents_apart()
    memory = Moe(schema.Moe(**SMALL, episodic_memory=schema.EpisodicMemory(enabled=True, chunk_size=4)), VOCABULARY)
    with pytest.raises(ShoalError, match=r"set data\.packing to stream"):
        memory.expect_documents_apart()
    for name in ("llama", "gpt2"):
        accepted: Any = MODELS[name]()
        accepted.expect_documents_apart()
