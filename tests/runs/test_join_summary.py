"""What a worker's user is shown before it computes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shoal.config.load import resolve_data
from shoal.runs.join_summary import summary_of

GPT = {"kind": "gpt", "hidden_size": 512, "num_layers": 6, "num_heads": 8, "max_seq_len": 128}


@pytest.mark.parametrize(
    ("model", "weights", "measured_mb"), [({"kind": "mlp"}, 9_866, (270, 270)), (GPT, 19_046_912, (993, 1143))], ids=["mlp", "gpt"]
)
def test_the_memory_that_is_announced_is_what_a_process_was_measured_to_take(
    model: dict[str, Any], weights: int, measured_mb: tuple[int, int]
) -> None:
    """With syncps and with diloco, `shoal join` took this much on a CPU."""
    tree = {"model": model, "training": {"batch_size": 4 if model is GPT else 32}, "strategy": {"kind": "syncps"}}
    run = resolve_data(tree, name="test", dialect="shoal", environ={}).run
    found = re.fullmatch(
        r"about ([\d.]+) (MB|GB) for each process; 20\.0 GB are free here", summary_of(run, weights, 20 * 10**9, []).memory
    )
    assert found
    told = float(found[1]) * (1000 if found[2] == "GB" else 1)
    assert 0.9 * measured_mb[0] < told < 1.1 * measured_mb[1]
