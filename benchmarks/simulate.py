"""What a contribution costs the coordinator when thousands of workers send one a minute each, against a hundred workers; heartbeats every
five seconds included.

The simulator drives the real coordinator with the real protocol and codecs on a virtual clock; updates have 10,000 numbers. Workers have
all joined, and each has contributed, before the time counts. Only the coordinator's own processor time counts, for messages; `make bench
BENCH=simulate` simulates a few minutes, `benchmarks/simulate.py hour` the whole hour of 600,000 contributions with `edp` and no codec, and
`benchmarks/simulate.py hour async int8` with another strategy and codec.

`benchmarks/simulate.py learn` lets 200 workers really learn, with their gradients in calls for all of them and one by one.

Beside it Flower's simulation of as many clients (`benchmarks/simulate.py flower 10000`), each of which sends back the 10,000 numbers that
it was sent: contributions a second by the clock, in two minutes. Flower has no heartbeats there, no journal and no virtual time.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import peers
import torch
from flower import APPS
from processes import environment
from run import Row

from shoal import strategies
from shoal.config.load import ConfigFile, Override, resolve
from shoal.coordinator.members.authentication import FairTokenBucket
from shoal.coordinator.run_plan import MemberLimits, RunPlan
from shoal.simulate import SimulatedMachine, batched_workers, simulate
from shoal.simulate.machines import weather_named
from shoal.simulate.report import SimulationReport
from shoal.simulate.virtual_run import Scenario, VirtualRun
from shoal.simulate.worker_updates import PlainDescent, TimedUpdates

SIZE, MANY, FEW = 10_000, 10_000, 100
STEPS = 8
"""Inner steps of a round; together they take a minute."""
WARM_UP_S, MEASURED_S = 100.0, 120.0
HOUR_S = 3560.0
"""After the warm-up, of which a minute brings no contribution: so there are 600,000 in all."""
STRATEGIES: dict[str, dict[str, str]] = {
    "edp": {},
    "syncps": {"strategy.round_timeout_s": "90"},
    "async": {"strategy.max_staleness": "100000"},
    "diloco": {"strategy.inner_steps": str(STEPS), "strategy.balance_speeds": "true", "strategy.round_timeout_s": "90"},
}
CODECS = ("none", "int8")
LEARNERS, LEARNING_S = 200, 40.0
LEARNED = {"edp": {}, "diloco": {"strategy.inner_steps": str(STEPS)}}
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "mlp": ("starter", {"training.batch_size": "4"}),
    "gpt": (
        "demo-gpt",
        {
            "training.batch_size": "2",
            "model.hidden_size": "32",
            "model.num_layers": "2",
            "model.num_heads": "2",
            "model.max_seq_len": "16",
            "data.sequence_length": "16",
            "data.max_train_samples": "20000",
            "model.dropout": "0",
        },
    ),
}
"""Settings of small models, so that there are workers enough for their data."""
FLOWER, FLOWER_S = "flower-simulation", 120.0
peers.INSTALL.setdefault(FLOWER, [["flwr[simulation]==1.41.0"]])


def scenario(kind: str, codec: str, workers: int) -> Scenario:
    settings = {"strategy.kind": kind, "updates.codec.kind": codec} | STRATEGIES[kind]
    run = resolve([ConfigFile("starter")], [Override(name, value, name) for name, value in settings.items()]).run
    policies = strategies.policies_for(run, workers)
    bounds = MemberLimits(joins_per_minute=60 * workers, sessions=workers)
    plan = RunPlan(run.updates, 0, workers, 1, 10**9, None, workers, 5.0, 0.2, worker_steps=10**9, bounds=bounds)
    timing = TimedUpdates(policies, run.updates, SIZE, 8, 1, None)
    return Scenario(plan, policies, PlainDescent(SIZE), timing, codec, kind)


def simulated(kind: str, codec: str, workers: int, seconds: float) -> SimulationReport:
    steps = STEPS if STRATEGIES[kind].get("strategy.inner_steps") else 1
    hours = (WARM_UP_S + seconds) / 3600
    made: Any = VirtualRun(scenario(kind, codec, workers), weather_named("calm", workers, 60 / steps, hours, 0), hours, 0, WARM_UP_S)
    made.coordinator.authenticator._proofs = FairTokenBucket(1e9, 1e9)  # joining is not what is measured
    report: SimulationReport = made.run()
    assert not report.violations
    return report


def measure() -> Iterator[Row]:
    rates = {}
    for codec in CODECS:
        for kind in STRATEGIES:
            one, rates[kind, codec] = row(kind, codec, MANY)
            yield one
    theirs = flower_rate(MANY)
    ours = rates["syncps", "none"]
    yield Row(
        f"simulate, {MANY:,} workers, syncps against Flower's FedAvg", ours, theirs, "contributions/s", ours / theirs, "", "by the clock"
    )


def flower_rate(clients: int) -> float:
    """Contributions a second of Flower's simulation. Where it does not get through a round in its time, what it told until then counts."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        own = environment(1) | {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_HOME": home, "RAY_TMPDIR": home}
        script = "import flower_crowd; flower_crowd.main()"
        command = [str(peers.python(FLOWER)), "-c", script, str(clients), str(SIZE), str(FLOWER_S)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own | {"PYTHONPATH": str(APPS)}, cwd=home) as running:
            assert running.stdout is not None
            told = [json.loads(line) for line in running.stdout if line.startswith("{")]
    if not told:
        raise RuntimeError(f"Flower's simulation of {clients:,} clients told nothing")
    print(f"Flower, {clients:,} clients: {told[-1]}", file=sys.stderr)
    return float(told[-1]["contributions"] / told[-1]["seconds"])


def row(kind: str, codec: str, many: int) -> tuple[Row, float]:
    """What a contribution costs; and contributions a second by the clock, of a simulation of so many."""
    crowd = simulated(kind, codec, many, MEASURED_S)
    few = simulated(kind, codec, FEW, MEASURED_S * 20)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    note = f"{1 - crowd.rejected_share:.1%} accepted, {crowd.handled:,} contributions in {crowd.wall_s:.0f} s, {memory:.1f} GiB so far"
    name = f"simulate, {kind}, codec {codec}, {many:,} workers against {FEW}"
    made = Row(name, crowd.cpu_us, few.cpu_us, "µs per contribution", crowd.cpu_us / few.cpu_us, "≤ 1.2", note)
    return made, crowd.handled / crowd.wall_s


def learning(model: str, kind: str, alone: bool) -> tuple[float, SimulationReport]:
    """Seconds of processor time that a simulation of workers takes that learn; with gradients one by one, or of many in one call."""
    settings = {"strategy.kind": kind, "evaluation.strategy": "never", "training.epochs": "50"} | LEARNED[kind] | MODELS[model][1]
    run = resolve([ConfigFile(MODELS[model][0])], [Override(name, value, name) for name, value in settings.items()]).run
    machines = [SimulatedMachine(f"w{number}", 1.0 + 0.5 * number / LEARNERS) for number in range(LEARNERS)]
    freely: Any = batched_workers.reason_not_batched
    batched_workers.reason_not_batched = (lambda *_: "as it was before") if alone else freely
    try:
        began = time.process_time()
        report = simulate(run, machines, hours=LEARNING_S / 3600, learns=True)
        return time.process_time() - began, report
    finally:
        batched_workers.reason_not_batched = freely


def show_learning() -> None:
    torch.set_num_threads(1)
    for model in MODELS:
        for kind in LEARNED:
            (before_s, before), (now_s, now) = (learning(model, kind, alone) for alone in (True, False))
            figures = f"{before_s:.1f} s one by one, {now_s:.1f} s together ({now.gradients}), ratio {before_s / now_s:.2f}"
            print(f"{model}, {kind}, {LEARNERS} workers, {now.accepted:,} and {before.accepted:,} contributions: {figures}", flush=True)


def show_hour(kind: str, codec: str) -> None:
    began = time.process_time()
    report = simulated(kind, codec, MANY, HOUR_S)
    for name, text in report.rows():
        print(f"{name:<14} {text}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    took_s = time.process_time() - began
    print(f"{'whole':<14} {took_s:.0f} s of processor time, {memory:.2f} GiB, {report.accepted:,} contributions taken")


def main() -> None:
    if sys.argv[1:2] == ["learn"]:
        return show_learning()
    if sys.argv[1:2] == ["hour"]:
        return show_hour(*(sys.argv[2:4] or ("edp", "none")))
    if sys.argv[1:2] == ["flower"]:
        print(f"{flower_rate(int(sys.argv[2])):.1f} contributions/s")
        return None
    for one, _ in (row(kind, codec, int(sys.argv[1])) for codec in CODECS for kind in STRATEGIES):
        print(f"{one.name}: {one.ours:.0f} against {one.peer:.0f} {one.unit}, ratio {one.ratio:.2f}; {one.note}", flush=True)


if __name__ == "__main__":
    main()
