"""Runs in virtual time: the same from the same seed, with nothing lost, whatever the weather."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.config import Run
from shoal.config.load import ConfigFile, Override, resolve
from shoal.simulate import SimulatedMachine, SimulationReport, simulate, weather_named, weather_of
from shoal.simulate.event_queue import EventQueue
from shoal.simulate.links import Cores, Link
from shoal.simulate.meta_model import data_of
from shoal.simulate.simulation import agreed_for, scenario_of
from shoal.simulate.virtual_run import VirtualRun
from shoal.transports.netem import PROFILES
from shoal.transports.netem.profiles import LinkProfile

STRATEGIES = {
    "edp": {"strategy.kind": "edp"},
    "syncps": {"strategy.kind": "syncps"},
    "async": {"strategy.kind": "async"},
    "diloco": {"strategy.kind": "diloco", "strategy.inner_steps": "4", "strategy.balance_speeds": "true"},
    "workunits": {"strategy.kind": "workunits", "strategy.batches_per_unit": "2"},
}
SMALL = {"model.hidden_sizes": "[16]", "training.batch_size": "16", "training.epochs": "30", "evaluation.strategy": "never"}


def run_of(**settings: str) -> Run:
    overrides = [Override(name, value, f"{name}={value}") for name, value in (SMALL | settings).items()]
    loaded = resolve([ConfigFile("starter")], overrides)
    assert loaded.ok, loaded.problems
    return loaded.run


def machines(count: int, **other: object) -> list[SimulatedMachine]:
    return [SimulatedMachine(f"w{number}", 1.0 + 0.3 * number, PROFILES["cellular"], **other) for number in range(count)]


def key_figures(report: SimulationReport) -> tuple[object, ...]:
    return report.digest, report.samples, report.outcomes, report.received_bytes, report.hours


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_simulation_is_the_same_from_the_same_seed_and_keeps_every_promise(name: str) -> None:
    run = run_of(**STRATEGIES[name])
    first, again, other = (simulate(run, machines(5), hours=0.04, seed=seed) for seed in (1, 1, 2))
    assert key_figures(first) == key_figures(again)
    assert first.digest != other.digest
    assert first.violations == []
    assert first.accepted > 15
    assert first.samples > 200


@pytest.mark.parametrize("name", ["edp", "diloco", "workunits"])
def test_workers_that_learn_in_virtual_time_really_learn(name: str) -> None:
    run = run_of(**STRATEGIES[name], **{"training.optimizer.learning_rate": "0.01"})
    report = simulate(run, machines(3), hours=0.03, seed=0, learns=True)
    assert report.violations == []
    assert report.losses[-1][1] < 0.9 * report.losses[0][1]
    assert report.hours_to(0.9 * report.losses[0][1]) is not None


def test_false_workers_spoil_the_mean() -> None:
    run = run_of(**STRATEGIES["async"], **{"training.optimizer.learning_rate": "0.01"})
    good = simulate(run, machines(3), hours=0.02, learns=True)
    bad = simulate(run, [*machines(3)[:2], machines(3)[2]._replace(false=True)], hours=0.02, learns=True)
    assert bad.losses[-1][1] > 1.5 * good.losses[-1][1]


def test_a_machine_that_disappears_and_comes_back_is_taken_for_dead_and_goes_on() -> None:
    there = [*machines(2), SimulatedMachine("guest", 1.0, stays=((0.0, 60.0), (150.0, 1e9)))]
    report = simulate(run_of(**STRATEGIES["syncps"], **{"strategy.round_timeout_s": "20"}), there, hours=0.08)
    assert any("guest is taken for dead" in note for note in report.notes)
    assert sum("guest joined" in note for note in report.notes) == 2
    assert report.violations == []


def test_a_site_that_goes_dark_is_silent_until_the_light_is_back() -> None:
    weather = weather_of([SimulatedMachine("here", 1.0), SimulatedMachine("there", 1.0, site="s")])._replace(
        site_outages={"s": ((60.0, 120.0),)}
    )
    report = simulate(run_of(**STRATEGIES["async"]), weather, hours=0.06)
    assert any("there is taken for dead" in note for note in report.notes)
    assert report.violations == []


def test_slower_links_make_slower_runs_and_fewer_bytes_help() -> None:
    slow = [SimulatedMachine(f"w{number}", 0.1, PROFILES["degraded"]) for number in range(3)]
    run = run_of(**STRATEGIES["async"], **{"model.hidden_sizes": "[100, 100]"})
    short = run_of(**STRATEGIES["async"], **{"model.hidden_sizes": "[100, 100]", "updates.codec.kind": "int8"})
    plain, encoded, calm = simulate(run, slow, hours=0.02), simulate(short, slow, hours=0.02), simulate(run, 3, hours=0.002)
    assert encoded.samples_per_s > 1.5 * plain.samples_per_s
    assert calm.samples_per_s > plain.samples_per_s
    assert plain.received_bytes / sum(plain.outcomes.values()) > 3 * encoded.received_bytes / sum(encoded.outcomes.values())


def test_computations_that_share_cores_take_longer() -> None:
    timeline, done = EventQueue(), list[tuple[str, float]]()
    cores = Cores(timeline, 2)
    for name, work_s in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        cores.compute(work_s, lambda name=name: done.append((name, timeline.now)))
    timeline.run(100.0)
    assert [(name, pytest.approx(at)) for name, at in done] == [("a", 1.5), ("b", 1.5), ("c", 2.5)]


def test_a_link_takes_its_time_and_keeps_the_order() -> None:
    link = Link(LinkProfile(100, 40, 0.05, 8), random.Random(0), lambda moment: moment)
    arrivals = [at for number in range(50) if (at := link.arrival(10_000, 0.01 * number, down=False)) is not None]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] > 50 * 10_000 / 1e6, "the rate is that of the link"
    assert link.arrival(100, 100.0, down=True) == pytest.approx(100.05, abs=0.02), "each direction has its own"


def test_the_mixed_weather_has_everything_that_makes_the_world_hard() -> None:
    weather = weather_named("mixed", 2000, 1.0, 24.0, seed=3)
    speeds = sorted(machine.step_s for machine in weather.machines)
    assert speeds[1900] / speeds[1000] > 2
    assert {machine.link for machine in weather.machines} == set(PROFILES.values())
    assert any(len(machine.stays) > 1 for machine in weather.machines)
    assert any(weather.site_outages.values())
    assert weather == weather_named("mixed", 2000, 1.0, 24.0, seed=3)


def test_tasks_are_given_out_in_virtual_time_and_no_batch_is_learned_from_twice() -> None:
    """One of five machines disappears in the middle of its task, and links are slow enough for workers to compute while they send."""
    run = run_of(**STRATEGIES["async"], **{"scheduler.kind": "gale-shapley", "training.epochs": "2"})
    there = [*machines(4), SimulatedMachine("gone", 1.0, PROFILES["cellular"], stays=((0.0, 20.0),))]
    world = VirtualRun(scenario_of(run, agreed_for(run, 5, data_of(run), learns=False), learns=False), weather_of(there), 1.0, 0)
    learned: Counter[tuple[int, int]] = Counter()
    append = world.store.ledger.append

    def looked_at(line: dict[str, Any]) -> None:
        learned.update((one[6], batch) for one in line.get("from", ()) for batch in range(one[7] - one[8], one[7]))
        append(line)

    world.store.ledger.append = looked_at  # type: ignore[method-assign]
    report = world.run()
    assert report.finished
    assert report.violations == []
    assert set(learned.values()) == {1}
    assert report.outcomes["moved"] <= 2, "a worker whose task ends waits to hear of the next one"
    assert report.tasks["given"] > report.tasks["tasks"]
    assert dict(report.rows())["tasks"].startswith(f"{report.tasks['tasks']} an epoch")


def test_things_in_line_and_others_happen_in_the_order_of_their_times() -> None:
    timeline, seen = EventQueue(), list[tuple[str, float]]()

    def see(name: str) -> None:
        seen.append((name, timeline.now))

    timeline.at(2.0, see, "planned")
    timeline.at_in_order(1.0, see, "first")
    timeline.at_in_order(2.0, see, "as late, and planned after it")
    timeline.at_in_order(1.5, see, "not in order")
    timeline.after(3.0, timeline.stop)
    timeline.at_in_order(4.0, see, "too late")
    timeline.run(10.0)
    assert seen == [("first", 1.0), ("not in order", 1.5), ("planned", 2.0), ("as late, and planned after it", 2.0)]
    assert timeline.now == 3.0


def test_simulation_settings_say_how_long_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    """Three heartbeats a second and four rounds of scheduling: the longer of the two is the time, and each round is shown."""
    settings = ["simulation.heartbeats=3", "simulation.scheduling_rounds=4", "simulation.scheduling_interval_s=2.5"]
    options = [word for setting in settings for word in ("--set", setting)]
    assert main(["simulate", "dist-llm-train/wan-conservative", "--step-s", "3", *options]) == 0
    shown = capsys.readouterr().out
    assert shown.count("scheduling round") == 4
    assert "10.0 s  scheduling round 4: 3 workers are here" in shown
    assert ", task-1" in shown


def test_the_command_prints_a_table_and_draws_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["simulate", "starter", "--set", "strategy.kind=async", "--workers", "30", "--hours", "0.02", "--weather", "mixed"]
    assert main([*words, "--step-s", "2", "--plots", str(tmp_path / "plots")]) == 0
    shown = capsys.readouterr().out
    for name in ("samples/s", "utilisation", "lag", "rejected", "wasted work", "bytes", "coordinator"):
        assert name in shown
    drawn = {path.stem for path in (tmp_path / "plots").glob("*.png")}
    assert drawn >= {"samples-a-second", "workers", "useful-share-of-the-time", "turned-away", "megabytes-a-second", "lag"}
    assert main([*words, "--step-s", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["violations"] == []


def test_a_weather_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "starter", "--set", "strategy.kind=async", "--workers", "3", "--hours", "1", "--weather", "hail"]) == 2
    assert "no known weather" in capsys.readouterr().err
    assert main(["simulate", "starter", "--set", "strategy.kind=local", "--workers", "3"]) == 2
    assert "trains alone and has no workers to simulate" in capsys.readouterr().err


def test_workers_of_one_machine_share_its_cores_and_may_be_slower(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "simulate",
        "starter",
        "--set",
        "strategy.kind=syncps",
        "--workers",
        "4",
        "--hours",
        "0.02",
        "--step-s",
        "0.5",
        "--weather",
        "calm",
    ]
    rates = []
    for options in ([], ["--cores", "2"], ["--cores", "2", "--slowdown", "w4=8"]):
        assert main([*words, *options, "--json"]) == 0
        rates.append(json.loads(capsys.readouterr().out)["samples_per_s"])
    assert rates[1] == pytest.approx(rates[0] / 2, rel=0.15), "four compute at once on two cores"
    assert rates[2] < 0.5 * rates[1], "a round waits for the slowest, which sleeps"
    assert main([*words, "--slowdown", "w9=8"]) == 2
    assert "there is no worker `w9`; there are w1, w2, w3, w4" in capsys.readouterr().err


def test_other_peoples_processes_take_their_part_of_the_cores() -> None:
    timeline, done = EventQueue(), list[float]()
    Cores(timeline, 2, others=3).compute(1.0, lambda: done.append(timeline.now))
    timeline.run(100.0)
    assert done == [pytest.approx(2.0)], "one of four gets half a core"


def test_a_long_message_waits_for_the_piece_that_jitters_most() -> None:
    """As the proxy has it: each piece jitters by itself, and none overtakes another."""
    link = Link(LinkProfile(100, 80, 0.0, 10_000), random.Random(1), lambda moment: moment)
    short, long = (
        [link.arrival(size, 10.0 * n, down=True) or 0.0 for n in range(start, start + 200)] for size, start in ((100, 0), (10**7, 200))
    )
    delays = [sum(at - 10.0 * n for n, at in enumerate(found, start)) / 200 for found, start in ((short, 0), (long, 200))]
    assert delays[0] == pytest.approx(0.05, abs=0.005)
    assert delays[1] == pytest.approx(0.008 + 0.09, abs=0.005), "the last of many pieces is about as late as the latest"


def test_the_lag_that_most_do_not_exceed_is_found_among_many_lags() -> None:
    """Ten thousand workers have a hundred thousand different lags in an hour. To add them up again for each took longer than the hour."""
    report = SimulationReport(1, 1.0, 0, "edp", "none", False)
    report.lags.update({lag: 1 + lag % 3 for lag in range(100_000)})
    assert report.lag_below(0.95) == pytest.approx(95_000, abs=5)
