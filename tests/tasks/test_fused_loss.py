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
    loss = cross_entropy(leaf * 1.0, labels, size, -100)
    (factor * loss).backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    assert abs(float(loss.detach()) - float(expected.detach())) < 1e-5 * max(1.0, float(expected.detach()))
    assert torch.allclose(leaf.grad.double(), exact.grad, atol=tolerance * factor, rtol=1e-2)
    assert not leaf.grad[:, size:].any()


def test_nothing_that_counts_is_no_loss() -> None:
    from shoal.tasks.fused_loss import cross_entropy

    logits = torch.randn(3, 64, device="cuda", requires_grad=True)
    loss = cross_entropy(logits * 1.0, torch.full((3,), -100, device="cuda"), 60, -100)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()
