"""Answers from machines that nobody trusts: units on lease, checked with one pass, and learned from by the coordinator."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.config.load import resolve_data
from shoal.coordinator import Coordinator
from shoal.coordinator.events import ServingStarted
from shoal.models.generation.batch_sampling import sample, tokens_to_send
from shoal.models.generation.decoding import group_draws
from shoal.models.layers.cross_attention import WithCrossAttention
from shoal.protocol.frames import UpdateError
from shoal.runs.build_run import assemble
from shoal.runs.coordinator_setup import agree, plan_for
from shoal.runs.live_objects import NO_LIVE_OBJECTS
from shoal.runs.rlhf.rewards.interface import Answer
from shoal.runs.training.train_alone import prepare as prepare_alone
from shoal.updates.answer_frames import InexactAnswers, digest, pack, unpack
from shoal.worker.producers import RolloutProducer
from shoal.worker.session import LeasedUnit
from tests.support.small_cluster import Cluster, FakeWorker, believing, contribution

SIZES: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}
LENGTH = 12


READING: dict[str, Any] = {
    "kind": "moe",
    "experts": {"count": 2, "per_token": 1, "capacity_factor": None},
    "cross_attention": {"enabled": True, "every_layers": 1},
    "retrieval": {"enabled": True, "encoder": "words", "chunk_size": 4, "passage_tokens": 6},
}


def settings(tmp_path: Path, strategy: str = "rollouts", model: dict[str, Any] | None = None, **more: Any) -> Any:
    rows = [{"prompt": f"{i} ", "answer": "!"} for i in range(40)]
    if model:
        rows = [row | {"context": f"of {number}" * (number % 3)} for number, row in enumerate(rows)]
        passages = tmp_path / "passages.txt"
        passages.write_text("\n".join(f"{number} is {number * number}" for number in range(60)))
        model = model | {"retrieval": model["retrieval"] | {"passages": str(passages)}}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ppo = {"rollout_size": 24, "mini_batch_size": 8, "epochs": 2, "steps": 30, "prompt_length": 4, "response_length": LENGTH}
    tree = {
        "model": (model or {"kind": "gpt"}) | SIZES,
        "training": {"epochs": 1, "device": "cpu", "optimizer": {"learning_rate": 0.003}},
        "data": {"max_samples": 50},
        "strategy": {"kind": strategy} | ({"prompts_per_unit": 4} if strategy == "rollouts" else {}),
        "rlhf": {"reward": "exact", "prompts": str(tmp_path / "prompts.jsonl"), "ppo": ppo | more.pop("ppo", {})} | more,
        "output_dir": str(tmp_path),
    }
    loaded = resolve_data(tree, name="test", dialect="shoal", environ={})
    assert loaded.ok, loaded.problems
    return loaded


def ascii_share(answers: Sequence[Answer]) -> list[float]:
    return [sum(letter < "\x80" for letter in one.text) / LENGTH for one in answers]


class Room(Cluster):
    """A real coordinator of a tiny policy, and workers that answer as they like."""

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded
        agreed = agree(loaded.run, 2, None, None, NO_LIVE_OBJECTS)
        self.feed: Any = agreed.parts.feed
        self.feed.reward = ascii_share
        learner: Any = agreed.policies.apply.learner(agreed.parts.single, (), self.feed)
        super().__init__(agreed.policies, 2, learner=learner)
        self.plan = plan_for(loaded.run, agreed)._replace(rollouts=learner)
        self.coordinator = believing(Coordinator(self.plan, agreed.policies, learner))
        self.carry_out(self.coordinator.handle(ServingStarted(), self.now))
        self.old = copy.deepcopy(learner.model)
        """The policy as it was a version ago."""

    def claim(self, worker: FakeWorker) -> LeasedUnit | None:
        worker.protocol.claim()
        call = self.say(worker)
        if call not in self.answers:
            return None
        events = worker.protocol.on_answer(self.answers[call], self.frames[call])
        return next((event for event in events if isinstance(event, LeasedUnit)), None)

    def send(self, worker: FakeWorker, unit: LeasedUnit, frames: list[memoryview]) -> str | None:
        made = contribution(unit.epoch, unit.start + unit.batches, unit.version, batches=unit.batches, unit=unit.number)
        worker.protocol.contribute(made, frames, pulls=False)
        call = self.say(worker)
        if self.answers[call]["kind"] != "refused":
            self.hear(worker, call)
        return self.status(call)


def answers_to(room: Room, unit: LeasedUnit, *, model: Any = None, temperature: float = 1.0, seed: int = 0) -> torch.Tensor:
    prompts, policy = unit.given["prompts"], room.strategy.contribution
    drawn = sample(
        model or room.learner.model,
        [ids for ids in prompts for _ in range(policy.group)],
        max_new_tokens=LENGTH,
        temperature=temperature,
        draws=group_draws(room.loaded.run.seed + seed, unit.given["first"], prompts, policy.group),
        eos_id=unit.given["end"],
        pad_id=0,
    )
    return tokens_to_send(drawn)


def answering(room: Room) -> Callable[[LeasedUnit], list[memoryview]]:
    """Answers as a worker makes them, with the data that it has itself."""
    parts = assemble(room.loaded.run, joins=True)
    policy, model = room.strategy.contribution, parts.engine.task.players["model"]

    def answers(unit: LeasedUnit) -> list[memoryview]:
        model.load_state_dict(room.learner.model.state_dict(), strict=False)
        worker: Any = SimpleNamespace(unit=unit, engine=parts.engine, weights=SimpleNamespace(version=unit.version))
        made = RolloutProducer(worker, policy).make()
        assert made.frames is not None
        return made.frames

    return answers


def open_gates(*models: Any) -> None:
    """Let cross-attention through, as it is after some learning."""
    for part in (part for model in models for part in model.modules() if isinstance(part, WithCrossAttention)):
        part.gate.data.fill_(0.7)
        part.cross.output.weight.data *= 30


def fabricated(room: Room, unit: LeasedUnit) -> torch.Tensor:
    return torch.full((len(unit.given["prompts"]) * room.strategy.contribution.group, LENGTH), ord("!"))


def best_of_four(room: Room, unit: LeasedUnit) -> torch.Tensor:
    drawn = [answers_to(room, unit, seed=seed) for seed in range(4)]
    rows = [max(rows, key=lambda row: int((row < 128).sum())) for rows in zip(*drawn, strict=True)]
    return torch.stack(rows)


CHEATS: dict[str, Callable[[Room, LeasedUnit], torch.Tensor]] = {
    "fabricates": fabricated,
    "stale": lambda room, unit: answers_to(room, unit, model=room.old),
    "best-of-4": best_of_four,
    "cold": lambda room, unit: answers_to(room, unit, temperature=0.7),
}


@pytest.mark.whole
def test_honest_workers_pass_and_others_are_found_within_ten_units_and_named(tmp_path: Path) -> None:
    room = Room(settings(tmp_path))
    workers = {name: room.join(name) for name in ("honest", *CHEATS, "too")}
    handed: dict[str, list[str | None]] = {name: [] for name in workers}
    while room.coordinator.state.version < 10:
        version, before = room.coordinator.state.version, copy.deepcopy(room.learner.model)
        for name, worker in workers.items():
            if worker.protocol.session not in room.coordinator.members.by_session or (unit := room.claim(worker)) is None:
                continue
            handed[name].append(room.send(worker, unit, pack(CHEATS.get(name, answers_to)(room, unit))))
        if room.coordinator.state.version > version:
            room.old = before
    for name in CHEATS:
        assert "inexact" in handed[name][:10], name
        assert [line["inexact"][0] for line in room.ledger if "inexact" in line].count(name) >= 5, "it was kept out at last"
        assert any(f"{name} is in quarantine" in note for note in room.notes)
    assert {*handed["honest"], *handed["too"]} == {"accepted"}
    assert not [note for note in room.notes if "given up" in note], "no cheat uses up the attempts at a unit"
    made = [line for line in room.ledger if "version" in line]
    assert {one[0] for line in made[-3:] for one in line["from"]} <= {"honest", "too", "stale"}
    assert all(len(line["answers"]) == 6 for line in made), "unit, version and hash of each"


@pytest.mark.parametrize("model", [None, pytest.param(READING, marks=pytest.mark.long)], ids=["gpt", "reading"])
def test_the_same_answers_lead_to_the_numbers_of_one_machine(tmp_path: Path, model: dict[str, Any] | None) -> None:
    """Six units by two workers are one rollout of a run alone, and so are the steps that follow."""
    room = Room(settings(tmp_path, model=model))
    alone = prepare_alone(settings(tmp_path, "local", model), run_dir=str(tmp_path / "alone"), resume=False, reporters=[])
    alone_feed: Any = alone.feed
    alone_feed.reward = ascii_share
    open_gates(room.learner.model, alone.engine.task.players["model"], alone_feed.reference._copy, room.feed.reference._copy)
    workers, answers = [room.join("a"), room.join("b")], answering(room)
    for number in range(12):
        worker = workers[number % 2]
        unit = room.claim(worker)
        assert unit is not None
        assert room.send(worker, unit, answers(unit)) == "accepted"
    for _ in range(2 * 6):
        alone.engine.step([next(alone.feed)])
    assert room.coordinator.state.version == 2
    assert room.published[-1].metrics["score"] == pytest.approx(alone_feed.figures["score"], abs=1e-6)
    for name, value in alone.engine.weights().items():
        apart = (value - room.learner.engine.weights()[name]).abs() > 2e-5
        assert float(apart.float().mean()) < (1e-3 if model else 1e-9), f"{name}: Adam makes much of a slope that is almost none"


def test_a_token_that_became_much_more_probable_counts_as_twice_as_probable(tmp_path: Path) -> None:
    room = Room(settings(tmp_path))
    unit = room.claim(room.join("slow"))
    assert unit is not None
    learner, frames = room.learner, pack(answers_to(room, unit))
    asked = (unit.given["first"], len(unit.given["prompts"]))
    _, fresh_BT = learner.read(frames, *asked, 0, 0)
    learner.versions[0] = learner.network.vector.clone()
    learner.network.load(3.0 * learner.network.vector)
    _, now_BT = learner.read(frames, *asked, 1, 1)
    _, late_BT = learner.read(frames, *asked, 0, 1)
    assert (now_BT - fresh_BT).max() > math.log(2.0) + 0.1, "some tokens are more than twice as probable"
    torch.testing.assert_close(late_BT, torch.maximum(fresh_BT, now_BT - math.log(2.0)))


def test_answers_of_an_older_version_count_until_they_are_too_old(tmp_path: Path) -> None:
    room = Room(settings(tmp_path, ppo={"rollout_size": 8}))
    slow, quick = room.join("slow"), room.join("quick")
    unit = room.claim(slow)
    assert unit is not None
    late = pack(answers_to(room, unit))
    statuses = []
    for version in (1, 2):
        while room.coordinator.state.version < version:
            other = room.claim(quick)
            assert other is not None
            assert other.number != unit.number
            room.send(quick, other, pack(answers_to(room, other)))
    assert room.send(slow, unit, late) == "accepted", "two versions old"
    assert max(one[1] for line in room.ledger if "version" in line for one in line["answers"]) >= 1
    unit = room.claim(slow)
    assert unit is not None
    late = pack(answers_to(room, unit))
    while room.coordinator.state.version < unit.version + 3:
        other = room.claim(quick)
        assert other is not None
        statuses.append(room.send(quick, other, pack(answers_to(room, other))))
    assert room.send(slow, unit, late) == "cancelled", "three are too many, and another did the unit"
    assert set(statuses) == {"accepted"}


def test_a_learner_that_was_killed_comes_back_to_the_same_numbers(tmp_path: Path) -> None:
    room = Room(settings(tmp_path))
    worker = room.join("a")
    for _ in range(15):  # two versions, and half of the third
        unit = room.claim(worker)
        assert unit is not None
        room.send(worker, unit, pack(answers_to(room, unit)))
    again = Room(room.loaded)
    for record, frames in room.records:
        again.carry_out(again.coordinator.replayed.apply(record, frames))
    assert again.coordinator.state.version == room.coordinator.state.version == 2
    assert torch.equal(again.learner.engine.vector, room.learner.engine.vector)
    assert again.ledger == room.ledger
    saved = copy.deepcopy(room.learner.state_dict())
    third = Room(room.loaded)
    third.learner.load_state_dict(saved)
    assert third.learner.versions.keys() == {0, 1}
    assert third.learner.shares == room.learner.shares


def test_a_unit_that_nobody_finishes_is_leased_again_to_the_same_answers(tmp_path: Path) -> None:
    room = Room(settings(tmp_path))
    gone, other = room.join("gone"), room.join("other")
    unit = room.claim(gone)
    assert unit is not None
    withheld = pack(answers_to(room, unit))
    for _ in range(4):
        room.pass_time(6.0)
        room.beat(other)
    found = room.claim(other)
    numbers = []
    while found is not None and found.number != unit.number:
        numbers.append(found.number)
        room.send(other, found, pack(answers_to(room, found)))
        found = room.claim(other) if len(numbers) < 80 else None
    assert found is not None
    assert found.given == unit.given
    assert found.version > unit.version or digest(pack(answers_to(room, found))) == digest(withheld)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        (torch.full((2, 3), 300), "vocabulary"),
        (torch.full((2, 3), -2), "vocabulary"),
        (torch.tensor([[-1, -1, -1], [1, 2, 3]]), "empty"),
        (torch.tensor([[1, -1, 2], [1, 2, 3]]), "goes on after its end"),
        (torch.tensor([[1, -1, -1], [1, 2, 3]]), "ends without"),
        (torch.tensor([[256, 2, 3], [1, 2, 3]]), "ends without"),
        (torch.zeros(2, 4), "bytes where"),
    ],
)
def test_what_is_no_answer_is_refused_before_it_costs_anything(tokens: torch.Tensor, why: str) -> None:
    with pytest.raises(UpdateError, match=why):
        unpack(pack(tokens), 2, 3, 257, 256)


def test_settings_that_do_not_go_with_answers_are_refused() -> None:
    tree = {"model": {"kind": "gpt"}, "rlhf": {"ppo": {"rollout_size": 24}}, "strategy": {"kind": "rollouts", "prompts_per_unit": 5}}
    updates = {"codec": {"kind": "int8"}, "aggregation": {"kind": "krum"}}
    found = resolve_data(tree | {"updates": updates}, name="test", dialect="shoal", environ={})
    said = " ".join(problem.message for problem in found.problems)
    assert "no multiple of the 5 answers of a unit" in said
    assert said.count("is for updates of the weights") == 2
    other = resolve_data({"model": {"kind": "gpt"}, "strategy": {"kind": "rollouts"}}, name="test", dialect="shoal", environ={})
    assert any("answer prompts, and the task language-modelling has none" in problem.message for problem in other.problems)
    third = resolve_data({"model": {"kind": "gpt"}, "rlhf": {}, "strategy": {"kind": "syncps"}}, name="test", dialect="shoal", environ={})
    assert any("set strategy.kind to rollouts, or to local" in (problem.help or "") for problem in third.problems)


def test_a_worker_that_does_not_read_is_found_out(tmp_path: Path) -> None:
    """Passages and contexts are in the probabilities that the coordinator checks an answer with."""
    room = Room(settings(tmp_path, model=READING))
    open_gates(room.learner.model)
    unit = room.claim(room.join("a"))
    assert unit is not None
    assert len(unit.given["contexts"]) == len(unit.given["own"]) == len(unit.given["prompts"])
    asked = (unit.given["first"], len(unit.given["prompts"]), unit.version, unit.version, "a")
    room.learner.read(answering(room)(unit), *asked)
    tokens_BT, near_N = room.learner.answer(unit.given["first"], len(unit.given["prompts"]))
    assert digest(pack(tokens_BT)) == digest(answering(room)(unit)), "an audit makes the same answers again"
    assert near_N.numel() == int((tokens_BT >= 0).sum())
    with pytest.raises(InexactAnswers):
        room.learner.read(pack(answers_to(room, unit)), *asked)
