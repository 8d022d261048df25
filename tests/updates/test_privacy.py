"""Noise of the size that was asked for, and an ε that agrees with the library step by step."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec

import pytest
import torch

from shoal.errors import ShoalError
from shoal.updates import privacy
from shoal.updates.privacy import Accountant, add_noise_, epsilon, sample_level_multiplier

pytestmark = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="needs shoal[privacy]")


def test_noise_has_the_spread_of_clip_times_multiplier_and_repeats_with_its_seed() -> None:
    size = 400_000
    first, second = torch.ones(size), torch.ones(size)
    add_noise_(first, 2.0, 1.5, torch.Generator().manual_seed(3))
    add_noise_(second, 2.0, 1.5, torch.Generator().manual_seed(3))
    assert torch.equal(first, second)
    assert float(first.std()) == pytest.approx(3.0, rel=0.01)
    assert float(first.mean()) == pytest.approx(1.0, abs=0.03)
    assert not torch.equal(first[:1000], first[-1000:])


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.01, 1), (1.1, 0.004, 1000), (0.6, 0.2, 37), (4.0, 1.0, 100)])
def test_epsilon_is_the_one_of_the_whole_composition(noise: float, rate: float, steps: int) -> None:
    import dp_accounting  # it takes seconds, and only the process that comes here needs it

    event = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(event)
    assert epsilon(noise, rate, steps, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_a_known_figure() -> None:
    """The MNIST example everybody quotes: noise 1.1, batch 256 of 60,000, 60 epochs, δ = 1e-5: ε under 3 by the old, looser bound."""
    assert 2.5 < epsilon(1.1, 256 / 60_000, 60 * 60_000 // 256, 1e-5) < 3


def test_the_ends() -> None:
    assert epsilon(1.0, 0.01, 0, 1e-5) == 0.0
    assert epsilon(0.0, 0.01, 1, 1e-5) == math.inf
    assert epsilon(1.0, 0.01, 100, 1e-5) < epsilon(1.0, 0.01, 101, 1e-5) < epsilon(sample_level_multiplier(1.0), 0.01, 101, 1e-5)


def test_another_sample_can_move_a_clipped_contribution_by_twice_the_norm() -> None:
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])
    assert float((one - other).norm()) == 2.0
    assert sample_level_multiplier(3.0) == 1.5


def test_a_run_has_spent_what_its_worst_worker_has() -> None:
    accountant = Accountant(noise_multiplier=1.0, sampling_rate=0.02, delta=1e-5)
    assert accountant.spent() == 0.0
    for _ in range(30):
        accountant.record("ada")
    accountant.record("bob", 12)
    assert accountant.steps == {"ada": 30, "bob": 12}
    assert accountant.spent() == epsilon(1.0, 0.02, 30, 1e-5)
    again = Accountant(1.0, 0.02, 1e-5, dict(accountant.steps))
    assert again.spent() == accountant.spent()


def test_without_the_library_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    privacy._one_step.cache_clear()
    privacy.epsilon.cache_clear()
    with pytest.raises(ShoalError, match=r"pip install 'shoal\[privacy\]'"):
        epsilon(1.0, 0.5, 1, 1e-5)
