"""The loss of the token after the next: what it predicts, what it teaches, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.models.moe import Moe
from shoal.tasks.base import IGNORED
from shoal.tasks.language import LanguageModelling

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 12, "intermediate_size": 24}
DROPLESS = schema.Experts(count=4, capacity_factor=None, aux_loss_weight=0.0)


def model_with(weight: float | None, **settings: Any) -> Moe:
    torch.manual_seed(0)
    mtp = schema.Mtp() if weight is None else schema.Mtp(enabled=True, loss_weight=weight)
    model = Moe(schema.Moe(**SIZES, experts=DROPLESS, mtp=mtp, **settings), 31)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("mtp."):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.double()


def batch_of(rows: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(31, (rows, 13), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[0, :4] = labels[1, 9:] = IGNORED
    return {"input_ids": ids[:, :-1].clone(), "labels": labels}


def losses(model: Moe, batch: dict[str, Tensor]) -> Any:
    return next(iter(LanguageModelling({"model": model}).losses(batch)))


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_that_of_one_more_block_by_hand(tied):
    model, batch = model_with(0.3, tied_embeddings=tied), batch_of()
    found = losses(model, batch)
    ids_BL, labels_BL, mtp = batch["input_ids"], batch["labels"], model.mtp
    assert mtp is not None
    embedded_BLD = model.token_embedding(ids_BL)
    last_BLD = model.through(embedded_BLD, ids_BL)
    joined_BLD = mtp.join(torch.cat([mtp.stream_norm(last_BLD[:, :-1]), mtp.embedding_norm(embedded_BLD[:, 1:])], dim=-1))
    assert model.rotary is not None
    mask = torch.ones(11, 11, dtype=torch.bool).tril()
    from shoal.models.transformer import LayerInputs

    ahead_BLD = mtp.norm(mtp.block(joined_BLD, LayerInputs(model.rotary(0, 11), mask, False, ids_BL[:, :-1]))[0])
    targets_BL = labels_BL[:, 1:].masked_fill(labels_BL[:, :-1] == IGNORED, IGNORED)
    total = F.cross_entropy((ahead_BLD @ model.output_weight.T).flatten(0, 1), targets_BL.flatten(), ignore_index=IGNORED, reduction="sum")
    wanted = total / (labels_BL != IGNORED).sum()
    plain = F.cross_entropy(model(ids_BL).flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(found.metrics["mtp"], wanted)
    torch.testing.assert_close(found.value, plain + 0.3 * wanted)
    slopes = torch.autograd.grad(found.value, list(model.parameters()), retain_graph=True)
    by_hand = torch.autograd.grad(plain + 0.3 * wanted, list(model.parameters()))
    for one, other in zip(slopes, by_hand, strict=True):
        torch.testing.assert_close(one, other)


def test_losses_are_the_same_with_recomputed_activations_and_for_packed_documents():
    batch = batch_of(2)
    plain, recomputing = model_with(0.3), model_with(0.3)
    recomputing.gradient_checkpointing(True)
    torch.testing.assert_close(losses(plain, batch).value, losses(recomputing, batch).value)
    packed = {name: value.flatten().unsqueeze(0).clone() for name, value in batch.items()}
    packed["labels"][0, 11] = batch["labels"][0, 11] = IGNORED
    together = model_with(
        0.3,
    ).double()
    together.max_seq_len, together.rotary = (
        24,
        model_with(
            0.3,
        ).rotary,
    )
    found = losses(together, packed | {"document_lengths": torch.tensor([[12, 12]])})
    torch.testing.assert_close(found.metrics["mtp"], losses(plain, batch).metrics["mtp"])


def test_the_losses_of_two_halves_have_the_mean_of_the_whole_batch():
    model, batch = model_with(0.3), batch_of(4)
    whole = losses(model, batch)
    parts = [{name: value[rows].clone() for name, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    counts = [(part["labels"] != IGNORED).sum() for part in parts]
    found = [losses(model, part).value * int(count) / int(sum(counts)) for part, count in zip(parts, counts, strict=True)]
    assert counts[0] != counts[1]
    torch.testing.assert_close(sum(found), whole.value, rtol=1e-12, atol=1e-12)
    slopes = torch.autograd.grad(whole.value, list(model.parameters()))
    for one, other in zip(torch.autograd.grad(sum(found), list(model.parameters())), slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_an_evaluation_has_the_loss_of_the_next_token_alone():
    model, batch = model_with(0.3).eval(), batch_of()
    plain = model_with(None).eval()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if not name.startswith("mtp.")})
    found = LanguageModelling({"model": model}).measure(batch)
    assert found.keys() == {"loss"}
    torch.testing.assert_close(found["loss"], LanguageModelling({"model": plain}).measure(batch)["loss"])


def test_the_loss_is_the_same_where_the_model_computes_all_logits(monkeypatch):
    wanted = losses(model_with(0.3).float(), batch_of())
    monkeypatch.setattr(LanguageModelling, "_selects", lambda self, batch: False)
    found = losses(model_with(0.3).float(), batch_of())
    torch.testing.assert_close(found.value, wanted.value)
    torch.testing.assert_close(found.metrics["mtp"], wanted.metrics["mtp"])
