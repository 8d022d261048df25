"""Eleven workers, two of them false: what a rule keeps of the accuracy that honest workers reach.

The real coordinator takes the contributions of real engines, one after the other in this process; only the two attackers are made up.
They know what the honest ones send, which is the worst case. On MNIST where it is beside the checkout, else on the built-in digits.

Then five of the eleven are free riders, which send what costs them nothing: the accuracy that is left with rules and with
`updates.scorer`, and how much the scorer lets a free rider and an honest worker count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from run import Row
from torch import Tensor

from shoal import strategies
from shoal.config import Run
from shoal.config.load import resolve_data
from shoal.coordinator import Coordinator
from shoal.coordinator.effects import Reply
from shoal.coordinator.events import RequestReceived
from shoal.coordinator.run_plan import RunPlan
from shoal.protocol.messages import PROTOCOL, Contribute
from shoal.runs.build_run import assemble, feed_for_seat, held_out_batches
from shoal.runs.run_size import data_extent, needed_contributions
from shoal.runs.training.contribution_scorer import HeldOutScorer
from shoal.updates import codecs
from shoal.worker.session import SessionEndedError, WorkerSession

WORKERS, FALSE, FREE = 11, 2, 5
RULES: dict[str, dict[str, Any]] = {
    "mean": {"kind": "mean"},
    "trimmed mean": {"kind": "trimmed-mean", "trim_ratio": 2 * FALSE / WORKERS + 0.01},
    "Krum": {"kind": "krum", "byzantine": FALSE},
    "Bulyan": {"kind": "bulyan", "byzantine": FALSE},
}
Attack = Callable[[Tensor, torch.Generator], Tensor]


def sign_flip(honest_ND: Tensor, generator: torch.Generator) -> Tensor:
    """Ten times the opposite of the honest direction."""
    return -10 * honest_ND.mean(0)


def large_noise(honest_ND: Tensor, generator: torch.Generator) -> Tensor:
    """A random vector, a hundred times as long as an honest one."""
    noise = torch.randn(honest_ND.shape[1], generator=generator)
    return noise * (100 * honest_ND.norm(dim=1).mean() / noise.norm())


def a_little_is_enough(honest_ND: Tensor, generator: torch.Generator) -> Tensor:
    """Just within the spread of the honest ones, in every coordinate, so that nobody looks odd."""
    supporters = WORKERS // 2 + 1 - FALSE
    share = (WORKERS - FALSE - supporters) / (WORKERS - FALSE)
    z = math.sqrt(2) * torch.erfinv(torch.tensor(2 * share - 1)).item()
    return honest_ND.mean(0) - max(z, 1.0) * honest_ND.std(0)


def inner_product(honest_ND: Tensor, generator: torch.Generator) -> Tensor:
    """So far against the honest mean that the product with the mean of all turns negative."""
    return -6 * honest_ND.mean(0)


ATTACKS: dict[str, Attack] = {
    "sign flip": sign_flip,
    "large noise": large_noise,
    "a little is enough": a_little_is_enough,
    "inner product": inner_product,
}


def zeros(honest_ND: Tensor, generator: torch.Generator) -> Tensor:
    """Nothing was computed."""
    return torch.zeros(honest_ND.shape[1])


def noise(honest_ND: Tensor, generator: torch.Generator) -> Tensor:
    """A random vector as long as an honest one, from each."""
    noise_ND = torch.randn(FREE, honest_ND.shape[1], generator=generator)
    return noise_ND * (honest_ND.norm(dim=1).mean() / noise_ND.norm(dim=1, keepdim=True))


def copies(honest_ND: Tensor, generator: torch.Generator) -> Tensor:
    """All send what one honest worker sends."""
    return honest_ND[0]


class Stale:
    """What an honest worker sent in the first round, for ever."""

    def __init__(self) -> None:
        self.first: Tensor | None = None

    def __call__(self, honest_ND: Tensor, generator: torch.Generator) -> Tensor:
        self.first = honest_ND[0].clone() if self.first is None else self.first
        return self.first


FREE_RIDERS: dict[str, Callable[[], Attack]] = {"zeros": lambda: zeros, "noise": lambda: noise, "copies": lambda: copies, "stale": Stale}


class Setting(NamedTuple):
    """What the attack takes place in."""

    name: str
    updates: Mapping[str, Any] = {}
    strategy: Mapping[str, Any] = {"kind": "syncps"}


PLAIN = Setting("")
SPARSE_AND_STALE = Setting(
    ", top-k 1 %, stale",
    {"codec": {"kind": "topk", "ratio": 0.01}},
    {"kind": "async", "contributions_per_update": WORKERS, "max_staleness": 5},
)


def configured(rule: Mapping[str, Any], setting: Setting, steps: int, data: Mapping[str, Any]) -> Run:
    loaded = resolve_data(
        {
            "model": {"kind": "mlp", "hidden_sizes": [64]},
            "data": data,
            "training": {"batch_size": 32, "max_steps": steps, "optimizer": {"name": "SGD", "learning_rate": 0.1}},
            "strategy": dict(setting.strategy),
            "updates": {"aggregation": dict(rule), **setting.updates},
            "cluster": {"num_workers": WORKERS},
        },
        name="byzantine",
        dialect="shoal",
        environ={},
    )
    assert loaded.ok, loaded.problems
    return loaded.run


class Cluster:
    """A coordinator and its workers, taking turns. In a stale setting each worker refreshes its weights only every few turns."""

    def __init__(self, run: Run, attack: Attack | None, stale: bool, false: int = FALSE) -> None:
        self.run, self.attack, self.stale, self.false = run, attack, stale, false
        policies = strategies.policies_for(run, WORKERS)
        self.parts = assemble(run, length=lambda samples: policies.length(data_extent(run, samples, WORKERS)).steps)
        length = policies.length(data_extent(run, self.parts.data, WORKERS))
        plan = RunPlan(
            run.updates, run.seed, WORKERS, needed_contributions(run), length.steps, length.batches, length.batches_per_step, 5.0, 0.2
        )
        scorer = HeldOutScorer(self.parts, random.Random(0)) if run.updates.scorer.enabled else None
        plan = plan._replace(scorer=scorer)
        self.learner = policies.apply.learner(self.parts.single, ())
        self.coordinator = Coordinator(plan, policies, self.learner)
        self.feeds = [feed_for_seat(run, self.parts.data, seat, WORKERS) for seat in range(WORKERS)]
        self.weights = [self.learner.vector.clone() for _ in range(WORKERS)]
        self.bases = [0] * WORKERS
        self.residuals = [codecs.residual_for(run.updates.codec, self.learner.vector.numel()) for _ in range(WORKERS)]
        self.generator = torch.Generator().manual_seed(0)
        self.clock = 0.0
        self.protocols = [WorkerSession(f"w{seat}", {}, PROTOCOL, f"instance {seat}") for seat in range(WORKERS)]
        for seat, protocol in enumerate(self.protocols):
            protocol.ready = True
            for _ in ("it joins", "it proves who it is", "it pulls"):
                self._ask(seat)

    def train(self) -> float:
        """The accuracy at the end; 0 when gradients are not finite any more: the coordinator takes none of them, and the run is lost."""
        try:
            self._take_turns()
        except SessionEndedError:
            return 0.0
        batches = held_out_batches(self.run, self.parts.data.eval)
        assert batches is not None
        return self.parts.engine.evaluate(batches())["accuracy"]

    def _take_turns(self) -> None:
        turn = 0
        while not self.coordinator.finished:
            before = self.coordinator.state.version
            for seat, gradient in enumerate(self._gradients()):
                self._contribute(seat, gradient)
            for seat in range(WORKERS):
                if not self.stale or (turn + seat) % 3 == 0:
                    self.weights[seat].copy_(self.learner.vector)
                    self.bases[seat] = self.coordinator.state.version
            turn += 1
            if self.coordinator.state.version == before:
                raise RuntimeError(f"turn {turn} of all workers made no new version")

    def _gradients(self) -> Tensor:
        """What each worker sends; the first ones are false."""
        engine, now = self.parts.engine, self.learner.vector.clone()
        rows = []
        for seat in range(WORKERS):
            engine.vector.copy_(self.weights[seat])
            engine.gradients([next(self.feeds[seat])])
            rows.append(engine.gradient.clone())
        engine.vector.copy_(now)
        stack = torch.stack(rows)
        if self.attack is not None:
            stack[: self.false] = self.attack(stack[self.false :], self.generator)
        return stack

    def _contribute(self, seat: int, gradient: Tensor) -> None:
        frames = codecs.encode(self.run.updates.codec, gradient, self.residuals[seat])
        feed, base = self.feeds[seat], self.bases[seat]
        made = Contribute("", 0, 0, base, 0, 32.0, 32, feed.epoch, feed.position, 1, -1, {})
        self.protocols[seat].contribute(made, frames, pulls=False)
        self._ask(seat)

    def _ask(self, seat: int) -> None:
        """Ask what the worker has to ask. All who wait for a round hear of it with the question that closes it."""
        self.clock += 0.001
        question = self.protocols[seat].next_request(self.clock)
        assert question is not None
        called = RequestReceived(seat, question.asked, question.frames, f"s{seat}")
        for effect in self.coordinator.handle(called, self.clock):
            if isinstance(effect, Reply):
                self.protocols[effect.caller].on_answer(effect.header, effect.frames)


def accuracy(rule: str, attack: str | None, setting: Setting, steps: int, data: Mapping[str, Any]) -> float:
    run = configured(RULES[rule], setting, steps, data)
    return Cluster(run, ATTACKS[attack] if attack else None, stale=setting is SPARSE_AND_STALE).train()


def free_riders(steps: int, data: Mapping[str, Any]) -> list[Row]:
    """Rules and the scorer against workers that send what costs them nothing."""
    clean, rows = accuracy("mean", None, PLAIN, steps, data), []
    for name, attack in FREE_RIDERS.items():
        for way in ("mean", "Krum", "scorer"):
            updates = {"scorer": {"enabled": True, "kept": 0}} if way == "scorer" else {}
            run = configured(RULES["mean" if way == "scorer" else way], Setting("", updates), steps, data)
            cluster = Cluster(run, attack(), stale=False, false=FREE)
            got = cluster.train()
            target = "≥ 0.98" if way == "scorer" else "(for comparison)"
            rows.append(Row(f"{way}, {FREE} of {WORKERS} send {name}", got, clean, "accuracy", got / clean, target))
        scores = {worker: min(1.0, max(0.0, mean)) for worker, (mean, _) in cluster.coordinator.state.scores.items()}
        free = sum(scores[f"w{seat}"] for seat in range(FREE)) / FREE
        honest = sum(scores[f"w{seat}"] for seat in range(FREE, WORKERS)) / (WORKERS - FREE)
        rows.append(Row(f"scorer, {name}: how much a free rider counts", free, honest, "of 1; an honest one", free / honest, "≤ 0.35"))
    return rows


def measure() -> list[Row]:
    mnist = Path(__file__).resolve().parents[2] / "shared" / "data" / "mnist"
    data = {"source": {"kind": "mnist", "path": str(mnist)}} if mnist.is_dir() else {}
    rows = free_riders(300, data)
    for setting in (PLAIN, SPARSE_AND_STALE):
        steps = 300 if setting is PLAIN else 600
        clean = accuracy("mean", None, setting, steps, data)
        for rule in RULES:
            for attack in ATTACKS:
                got = accuracy(rule, attack, setting, steps, data)
                target = "< 0.95 (breaks)" if rule == "mean" else "≥ 0.95"
                rows.append(Row(f"{rule}, {attack}{setting.name}", got, clean, "accuracy", got / clean, target))
    return rows
