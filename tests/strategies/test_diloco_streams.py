"""What the literature added to DiLoCo: fragments and overlap, quorum and asynchronous rounds, workers of different speed, few bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.runs.build_run import assemble, feed_for_seat
from shoal.runs.worker_run import JoinedWorker
from shoal.updates.fragments import spans
from tests.support.layered_settings import loaded, merged

SMALL = {
    "model": {"kind": "mlp", "hidden_sizes": [24, 16]},
    "training": {"batch_size": 20, "device": "cpu", "optimizer": {"name": "AdamW", "learning_rate": 0.005}},
    "evaluation": {"strategy": "never"},
    "logging": {"every_steps": 1},
}
DILOCO = {"strategy": {"kind": "diloco", "inner_steps": 6, "rounds": 4, "round_timeout_s": 60.0}}
LONGER = {"strategy": {"inner_steps": 12, "rounds": 9}, "evaluation": {"strategy": "steps"}}
PLAIN_OUTER = {"strategy": {"outer": {"learning_rate": 1.0, "momentum": 0.0}}}


def streamed_by_hand(settings: dict[str, Any], workers: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Fragment after fragment: each has its own θ₀, its own momentum, and takes its turn once in `inner_steps`."""
    run = loaded(settings).run
    strategy: Any = run.strategy
    overlap, share = strategy.overlap_steps, strategy.overlap_blend if strategy.overlap_steps else 1.0
    islands = [assemble(run, length=lambda samples: run.training.max_steps or 0) for _ in range(workers)]
    feeds = [feed_for_seat(run, one.data, seat, workers) for seat, one in enumerate(islands)]
    slots = [slot for network in islands[0].engine.networks.values() for slot in network.layout.slots]
    parts = spans([slot.size for slot in slots], strategy.fragments)
    shared = islands[0].engine.vector.clone()
    fragments = [torch.nn.Parameter(shared[start:end].clone()) for start, end in parts]
    optimizer = torch.optim.SGD(fragments, lr=0.7, momentum=0.9, nesterov=True)
    steps, arriving = strategy.inner_steps // strategy.fragments, None
    for number in range(strategy.rounds * strategy.fragments):
        for taken in range(steps):
            if arriving is not None and taken == overlap:
                start, end = parts[arriving]
                for island in islands:
                    island.engine.vector[start:end].lerp_(fragments[arriving].detach(), share)
                arriving = None
            for island, feed in zip(islands, feeds, strict=True):
                island.engine.step([next(feed)])
        arriving = number % strategy.fragments
        start, end = parts[arriving]
        for fragment in fragments:
            fragment.grad = None
        fragment = fragments[arriving]
        fragment.grad = torch.stack([fragment.detach() - island.engine.vector[start:end] for island in islands]).mean(0)
        optimizer.step()
    for feed in feeds:
        feed.close()
    return torch.cat([fragment.detach() for fragment in fragments]), [island.engine.vector for island in islands]


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("fragments", [1, 2])
def test_fragments_and_overlap_are_what_the_arithmetic_says(cluster: Callable[..., Any], fragments: int, overlap: int) -> None:
    streaming = {"strategy": {"fragments": fragments, "overlap_steps": overlap}}
    together = cluster(SMALL, DILOCO, streaming, workers=2)
    expected, _ = streamed_by_hand(merged(SMALL, DILOCO, streaming), 2)
    assert together.loop.step == 4 * fragments
    assert torch.allclose(together.loop.engine.vector, expected, atol=2e-6)


def test_one_worker_in_fragments_with_a_plain_outer_step_equals_plain_training(
    cluster: Callable[..., Any], alone: Callable[..., Any]
) -> None:
    together = cluster(SMALL, DILOCO, PLAIN_OUTER, {"strategy": {"fragments": 3}}, workers=1)
    single = alone(SMALL, {"training": {"max_steps": 24}})
    assert torch.equal(together.workers[0].worker.engine.vector, single.engine.vector)


def test_a_fragment_is_all_that_is_on_its_way(cluster: Callable[..., Any]) -> None:
    """The largest message falls with the number of fragments; the sum of all is the same."""

    def sizes(fragments: int) -> list[int]:
        found: list[int] = []

        def watch(joined: JoinedWorker) -> None:
            assert joined.worker is not None
            send = joined.worker._send
            joined.worker._send = lambda made, frames, soon: (found.append(sum(map(len, frames))), send(made, frames, soon))[1]  # type: ignore[method-assign]

        cluster(SMALL, DILOCO, {"strategy": {"fragments": fragments}}, workers=1, change=watch)
        return found

    whole, parts = sizes(1), sizes(3)
    assert sum(parts) == sum(whole)
    assert max(parts) < 0.8 * max(whole)  # tensors of a small network are of very different sizes


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": {"fragments": 3, "overlap_steps": 2}},
        pytest.param({"strategy": {"fragments": 2}, "updates": {"codec": {"kind": "int4"}}}, marks=pytest.mark.long),
        pytest.param(
            {"strategy": {"outer": {"learning_rate": 1.0, "momentum": 0.0}}, "updates": {"codec": {"kind": "topk", "ratio": 0.1}}},
            marks=pytest.mark.long,
        ),
        {"strategy": {"fragments": 2}, "updates": {"codec": {"kind": "topk", "ratio": 0.2, "values": "ternary"}}},
        {"strategy": {"fragments": 2, "outer": {"name": "Muon", "learning_rate": 0.1}}},
        {"strategy": {"quorum": 2, "grace_s": 0.05}},
        {"strategy": {"quorum": 1, "late": "weigh", "outer": {"learning_rate": 1.0, "momentum": 0.0}}},
        {"strategy": {"balance_speeds": True}},
    ],
    ids=["overlap", "int4", "sparse", "sparse and ternary", "muon", "quorum", "asynchronous", "balanced"],
)
def test_each_way_learns(cluster: Callable[..., Any], settings: dict[str, Any]) -> None:
    assert cluster(SMALL, DILOCO, LONGER, settings, workers=3).accuracy > 0.85


def test_asynchronous_rounds_learn_from_as_much_data(cluster: Callable[..., Any]) -> None:
    together = cluster(SMALL, DILOCO, {"strategy": {"quorum": 1, "late": "weigh"}}, workers=3)
    assert 3 * 24 * 20 <= together.summary["samples"] <= 3 * 24 * 20 + 3 * 6 * 20
    assert together.loop.step >= 12


def test_a_slow_worker_takes_fewer_steps_and_counts_for_less(cluster: Callable[..., Any]) -> None:
    def slow(joined: JoinedWorker) -> None:
        assert joined.worker is not None
        if joined.name == "w2":
            joined.worker.slowdown = 30.0  # far more than what other processes of this machine can cost the other one

    together = cluster(SMALL, DILOCO, {"strategy": {"balance_speeds": True, "rounds": 12}}, workers=2, change=slow)
    batches: dict[str, list[int]] = {"w1": [], "w2": []}
    for line in (together.loop.directory.path / "coordinator" / "ledger.jsonl").read_text().splitlines():
        for one in json.loads(line).get("from", []):
            batches[one[0]].append(one[8])
    assert max(batches["w1"]) == max(batches["w2"]) == 6
    assert sum(batches["w2"][2:]) < 0.7 * sum(batches["w1"][2:])
