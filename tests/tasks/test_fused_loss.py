"""The GPU kernel against torch's own cross-entropy in double precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])
@pytest.mark.parametrize(("size", "columns"), [(1000, 1088), (5, 64), (50257, 50304)])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_loss_and_gradient(dtype: torch.dtype, tolerance: float, size: int, columns: int, factor: float) -> None:
    from shoal.tasks.fused_loss import cross_entropy

    torch.manual_seed(0)
    logits = torch.randn(64, columns, device="cuda", dtype=dtype) * 4
    labels = torch.randint(size, (64,), device="cuda")
    labels[::7] = -100
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact[:, :size], labels, ignore_index=-100)
    (factor * expected).backward()
    leaf = logits.clone().requires_grad_()
    loss, _ = cross_entropy(leaf * 1.0, labels, size, -100)
    (factor * loss).backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    assert abs(float(loss.detach()) - float(expected.detach())) < 1e-5 * max(1.0, float(expected.detach()))
    assert torch.allclose(leaf.grad.double(), exact.grad, atol=tolerance * factor, rtol=1e-2)
    assert not leaf.grad[:, size:].any()


def test_nothing_that_counts_is_no_loss() -> None:
    from shoal.tasks.fused_loss import cross_entropy

    logits = torch.randn(3, 64, device="cuda", requires_grad=True)
    loss, _ = cross_entropy(logits * 1.0, torch.full((3,), -100, device="cuda"), 60, -100)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize("weights", [(0.5, 1.0, 5.0), (1.0, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 2.0)])
@pytest.mark.parametrize(("size", "columns", "window"), [(7, 64, 5), (5000, 5056, 32)])
def test_penalties_in_the_kernel(
    dtype: torch.dtype, tolerance: float, weights: tuple[float, float, float], size: int, columns: int, window: int
) -> None:
    """Against the plain penalties in double precision: few tokens, so that windows hold repetitions, the label and the end of text."""
    from shoal.config.schema.training import Penalties
    from shoal.tasks.fused_loss import Punished, cross_entropy
    from shoal.tasks.penalties import marks, sums

    torch.manual_seed(0)
    rows, length, eos = 4, 24, 3
    ids = torch.randint(min(size, 40), (rows, length), device="cuda")
    labels, real = ids.roll(-1, 1), torch.ones_like(ids, dtype=torch.bool)
    labels[:, -1], labels[1, :4], real[1, :4] = -100, -100, False
    early = (torch.arange(length, device="cuda") < 10).expand(rows, length)
    logits = (torch.randn(rows * length, columns, device="cuda") * 2).to(dtype)
    logits[7, ids.flatten()[7]] += 8.0  # an all but certain repetition
    settings = Penalties(
        repetition_weight=weights[0], repetition_window=window, immediate_repetition_weight=weights[1], eos_weight=weights[2]
    )
    marked = marks(ids, labels, labels != -100, real, early)

    exact = logits.double().requires_grad_()
    counted = (labels != -100).sum()
    expected = F.cross_entropy(exact[:, :size], labels.flatten(), ignore_index=-100)
    for _, weight, value in sums(settings, exact[:, :size].log_softmax(-1).view(rows, length, size), marked, eos):
        expected = expected + weight * value / counted
    (3.0 * expected).backward()
    leaf = logits.clone().requires_grad_()
    total, figures = cross_entropy(leaf * 1.0, labels.flatten(), size, -100, Punished(marked, weights, window, eos))
    (3.0 * total).backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(figures[0] + figures[1:] @ figures.new_tensor(weights)) == pytest.approx(float(total.detach()), rel=1e-5)
    assert torch.allclose(leaf.grad.double(), exact.grad, atol=3 * tolerance, rtol=1e-2)
    assert not leaf.grad[:, size:].any()
