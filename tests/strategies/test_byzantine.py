"""Two of eleven workers are false: the mean is lost, the rules that compare are not; nor with sparse and stale updates."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from shoal.config.load import resolve_data
from shoal.runs.run_size import needed_contributions

CLEAN = 0.93
"""What honest workers reach at least on the digits, in so few steps."""


@pytest.fixture(scope="module")
def byzantine() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
        yield importlib.import_module("byzantine")


def test_honest_workers_learn_and_the_mean_is_lost_to_false_ones(byzantine: Any) -> None:
    assert byzantine.accuracy("mean", None, byzantine.PLAIN, 80, {}) > CLEAN
    assert byzantine.accuracy("mean", "sign flip", byzantine.PLAIN, 80, {}) < 0.5


@pytest.mark.long
def test_the_mean_is_lost_to_an_inner_product_too(byzantine: Any) -> None:
    assert byzantine.accuracy("mean", "inner product", byzantine.PLAIN, 80, {}) < 0.5


LONG = (pytest.param(attack, marks=pytest.mark.long) for attack in ("large noise", "inner product"))


@pytest.mark.parametrize("attack", ["sign flip", "a little is enough", *LONG])
@pytest.mark.parametrize("rule", ["trimmed mean", "Krum", "Bulyan"])
def test_a_rule_that_compares_keeps_what_was_learned(byzantine: Any, rule: str, attack: str) -> None:
    assert byzantine.accuracy(rule, attack, byzantine.PLAIN, 80, {}) > 0.95 * CLEAN


@pytest.mark.long
@pytest.mark.parametrize("rule", ["trimmed mean", "Krum", "Bulyan"])
def test_also_with_the_largest_one_per_cent_and_stale_weights(byzantine: Any, rule: str) -> None:
    assert byzantine.accuracy(rule, "sign flip", byzantine.SPARSE_AND_STALE, 200, {}) > 0.95 * CLEAN


@pytest.mark.parametrize(
    ("mixing", "least"), [({"kind": "none"}, 5), ({"kind": "bucketing", "size": 2}, 9), ({"kind": "nearest-neighbours", "byzantine": 3}, 7)]
)
def test_mixing_counts_in_how_many_contributions_a_round_needs(mixing: Any, least: int) -> None:
    updates = {"aggregation": {"kind": "krum", "byzantine": 1}, "mixing": mixing}
    run = resolve_data(
        {"strategy": {"kind": "syncps"}, "cluster": {"num_workers": 9}, "updates": updates}, name="n", dialect="shoal", environ={}
    )
    assert needed_contributions(run.run) == least
