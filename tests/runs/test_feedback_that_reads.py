"""Models that learn from pairs and from their own answers, and read: passages, contexts and a memory that a run before has filled."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import data
from shoal.cli.main import main
from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.runs.rlhf.rewards.interface import Answer
from shoal.runs.trained_model import open_run
from shoal.runs.training.train_alone import prepare
from shoal.tasks.answer_logprobs import PromptAnswers, as_used, log_probs

pytest.importorskip("faiss", reason="retrieval needs faiss-cpu (shoal[rag])")

CHUNK = 16
MODEL: dict[str, Any] = {
    "kind": "moe",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 48,
    "max_seq_len": 48,
    "experts": {"count": 2, "per_token": 1, "capacity_factor": None},
    "cross_attention": {"every_layers": 1},
}
RETRIEVAL = {"enabled": True, "encoder": "words", "passages": "facts.txt", "top_k": 1, "chunk_size": CHUNK, "passage_tokens": 4}
CROSS = {"enabled": True, "every_layers": 1}
MEMORY = {"enabled": True, "capacity": 16, "chunk_size": 8}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def secrets(seed: int, count: int) -> list[tuple[str, str]]:
    """Names that are a chunk long with a full stop, and the letter that each means."""
    drawn = random.Random(seed)
    return [("".join(drawn.choices("abcdefghijklmnop", k=CHUNK - 1)) + ".", drawn.choice("QRST")) for _ in range(count)]


def write_facts(name: str, facts: list[tuple[str, str]]) -> None:
    Path(name).write_text("\n".join(meaning * 4 + " " + secret for secret, meaning in facts))


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def resolved(tree: dict[str, Any]) -> Any:
    loaded = resolve_data(tree, name="test", dialect="shoal", environ={})
    assert loaded.ok, loaded.problems
    return loaded


def pairs_run(task: str, model: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> Any:
    write_rows("pairs.jsonl", rows)
    tree = {
        "task": {"kind": task},
        "model": MODEL | model,
        "data": {"source": {"kind": "preferences", "path": "pairs.jsonl"}, "sequence_length": 40},
        "training": {"batch_size": 8, "max_steps": 2, "device": "cpu", "optimizer": {"learning_rate": 0.01}},
        "output_dir": "out",
    }
    return resolved(tree | more)


def policy_run(model: dict[str, Any], texts: dict[str, Any] | None = None, **rlhf: Any) -> Any:
    ppo = {"rollout_size": 16, "mini_batch_size": 8, "epochs": 1, "steps": 2, "prompt_length": 20, "response_length": 8}
    tree = {
        "model": MODEL | model,
        "training": {"device": "cpu", "optimizer": {"learning_rate": 0.003}},
        "data": texts or {"max_samples": 50, "sequence_length": 40},
        "rlhf": {"reward": "exact", "prompts": "prompts.jsonl", "ppo": ppo} | rlhf,
        "output_dir": "out",
    }
    return resolved(tree)


def started(loaded: Any, name: str) -> Any:
    run: Any = prepare(loaded, run_dir=name, resume=False, reporters=[])
    for part in run.engine.task.players["model"].modules():
        if hasattr(part, "gate") and hasattr(part, "cross"):
            part.gate.data.fill_(0.7)
    return run


PLANTED = """\
dialect: shoal
model: {model}
data: {{source: {{kind: text, path: rows.jsonl}}, sequence_length: 32, batching: dynamic, max_eval_samples: 20}}
training: {{max_steps: 50, batch_size: 32, device: cpu, optimizer: {{name: AdamW, learning_rate: 0.01}}}}
evaluation: {{strategy: steps, every_steps: 50}}
output_dir: out
"""
REWARDED = """\
model: {retrieval: {passages: null}}
training: {max_steps: null, epochs: 1, optimizer: {name: AdamW, learning_rate: 0.003}}
evaluation: {strategy: steps, every_steps: 10}
rlhf:
  reward: exact
  prompts: prompts.jsonl
  policy: base
  value: head
  ppo: {rollout_size: 64, mini_batch_size: 32, epochs: 2, steps: 5, prompt_length: 20, response_length: 2}
"""


@pytest.mark.long
@pytest.mark.whole
def test_a_planted_fact_can_be_rewarded_only_while_it_is_indexed(folder: Path) -> None:
    """What a name means stands in the passages alone. The policy finds them in the index of the run that it goes on from."""
    facts = secrets(1, 400)
    write_facts("facts.txt", facts)
    write_facts("others.txt", secrets(2, 400))
    write_rows("rows.jsonl", [{"prompt": f"{name}=", "completion": meaning} for name, meaning in facts])
    write_rows("prompts.jsonl", [{"prompt": f"{name}=", "answer": meaning} for name, meaning in facts])
    Path("run.yaml").write_text(PLANTED.format(model=json.dumps(MODEL | {"retrieval": RETRIEVAL})))
    Path("rlhf.yaml").write_text(REWARDED)
    assert main(["train", "run.yaml", "--run-dir", "base"]) == 0
    assert main(["train", "run.yaml", "--rlhf_config", "rlhf.yaml", "--run-dir", "run"]) == 0
    about = {name: json.loads((folder / name / "data.json").read_text()) for name in ("base", "run/policy")}
    assert about["base"]["passages"] == about["run/policy"]["passages"]
    score = json.loads((folder / "run/policy/summary.json").read_text())["metrics"]["eval"]["score"]
    rlhf = {"value": "head", "policy": "run/policy", "ppo": {"prompt_length": 20, "response_length": 2}}
    scores = {}
    for index in ("facts.txt", "others.txt"):
        loaded = policy_run({"retrieval": RETRIEVAL | {"passages": index}}, **rlhf)
        feed: Any = prepare(loaded, run_dir=index[:-4], resume=False, reporters=[]).feed
        (judged,) = feed.answers_to_held_out()
        scores[index] = float(judged["score"].mean())
    assert scores["facts.txt"] == pytest.approx(score)
    assert score > scores["others.txt"] + 0.2


@pytest.mark.parametrize("value", ["head", "network"])
def test_what_a_policy_reads_is_in_its_probabilities_and_values_and_survives_a_break(value: str) -> None:
    facts = secrets(1, 30)
    write_facts("facts.txt", facts)
    rows = [{"prompt": f"{name}=?"[number % 9 :], "answer": meaning} for number, (name, meaning) in enumerate(facts)]
    write_rows("prompts.jsonl", [row | ({"context": "about " + row["answer"]} if row["answer"] in "QR" else {}) for row in rows])
    model = {"retrieval": RETRIEVAL, "cross_attention": CROSS}
    run = started(policy_run(model, value=value), "whole")
    task, feed = run.engine.task, run.feed
    batch = next(feed)
    (loss, *_) = task.losses(batch)
    assert float(loss.metrics["approximate_kl"]) == pytest.approx(0, abs=1e-5), "the first mini-batch is as probable as when it was drawn"
    assert float(loss.metrics["clip_share"]) == 0
    assert {"passage_ids", "passage_from", "context_ids"} <= set(batch)
    text = PromptAnswers.of(batch)
    with as_used(task.players["model"]), torch.no_grad():
        seen = log_probs(task.players["model"], text)
        for name in ("passage_ids", "context_ids"):
            changed = {**text.beside, name: torch.where(text.beside[name] >= 0, 65, text.beside[name])}
            assert not torch.allclose(seen, log_probs(task.players["model"], text._replace(beside=changed)), atol=1e-4), name
    state = feed.state_dict()
    again = started(policy_run(model, value=value), "again").feed
    again.load_state_dict(state)
    for one, other in zip(next(feed).items(), next(again).items(), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1]), one[0]


@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_each_answer_of_a_pair_reads_its_own_passages_and_the_context_of_both(task: str) -> None:
    facts = secrets(1, 40)
    write_facts("facts.txt", facts)
    rows = [
        {"prompt": f"{name}="[number % 5 :], "chosen": f"{meaning} it is", "rejected": f"not {name}, no", "context": meaning * (number % 3)}
        for number, (name, meaning) in enumerate(facts)
    ]
    run = started(pairs_run(task, {"retrieval": RETRIEVAL, "cross_attention": CROSS}, rows), "run")
    batch = next(run.feed)
    assert not torch.equal(batch["chosen_passage_ids"], batch["rejected_passage_ids"])
    assert torch.equal(batch["chosen_context_ids"], batch["rejected_context_ids"])
    (loss,) = run.engine.task.losses(batch)
    loss.value.backward()
    model = run.engine.task.players["model"]
    slopes = [part.cross.key_value.weight.grad for part in model.modules() if hasattr(part, "cross")]
    assert task == "reward" or any(slope is not None and bool(slope.any()) for slope in slopes)
    texts = [PromptAnswers.of(batch, side) for side in ("chosen_", "rejected_")]
    assert all(set(text.beside) == {"context_ids", "passage_ids", "passage_from"} for text in texts)
    summary = run.train()
    assert summary["status"] == "completed"


def test_an_answer_finds_no_passages_of_the_pair_that_it_is_of() -> None:
    rows = [{"prompt": f"{name}? ", "chosen": f"{name} {meaning}", "rejected": f"{name} no"} for name, meaning in secrets(1, 30)]
    samples: Any = data.load(pairs_run("dpo", {"retrieval": RETRIEVAL | {"passages": None}}, rows).run).train
    passages = samples.finder.index.passages
    batch = samples.batch(range(len(samples)))
    for number, pair in enumerate(samples.inner.pairs):
        text = batch["chosen_input_ids"][number][batch["chosen_attention_mask"][number]].tolist()
        near = samples.finder.neighbours([text], [()], 2).flatten().tolist()
        assert pair.origin in {passages.origins[passages.documents[one]] for one in near if one >= 0}, "it is the most like itself"
        for side in range(2):
            near = [one for one in samples._neighbours_NSUK[number, side].flatten().tolist() if one >= 0]
            assert near
            assert pair.origin not in {passages.origins[passages.documents[one]] for one in near}


def test_a_context_that_nobody_has_is_refused_for_pairs_and_prompts() -> None:
    write_rows("prompts.jsonl", [{"prompt": f"{number} ", "answer": "!"} for number in range(20)])
    rows = [{"prompt": f"{number} ", "chosen": "yes", "rejected": "no"} for number in range(20)]
    with pytest.raises(ShoalError, match="there is nothing to attend to"):
        prepare(pairs_run("dpo", {"cross_attention": CROSS}, rows), run_dir="pairs", resume=False, reporters=[])
    write_rows("texts.jsonl", [{"text": f"text {number} of many", "context": f"about {number}"} for number in range(40)])
    texts = {"source": {"kind": "text", "path": "texts.jsonl"}, "sequence_length": 40, "batching": "dynamic"}
    with pytest.raises(ShoalError, match=r"no prompt of prompts\.jsonl has a `context`"):
        prepare(policy_run({"cross_attention": CROSS}, texts), run_dir="prompts", resume=False, reporters=[])
    loaded = policy_run({"cross_attention": CROSS}, texts, prompts=None, reward="sentiment")
    feed: Any = prepare(loaded, run_dir="texts", resume=False, reporters=[]).feed
    asked = feed.prompts[0]
    assert asked.context.removeprefix("about ") in asked.text, "the beginning of a text has the context of the text"
    assert bytes(asked.context_ids).decode() == asked.context
    assert "\0" not in asked.text, "a prompt has no padding"


def test_chunks_that_no_answer_fills_are_refused() -> None:
    write_facts("facts.txt", secrets(1, 10))
    write_rows("prompts.jsonl", [{"prompt": f"{number} ", "answer": "!"} for number in range(20)])
    loaded = policy_run({"retrieval": RETRIEVAL}, ppo={"prompt_length": 8, "response_length": 8})
    with pytest.raises(ShoalError, match="have one chunk of 16: set it lower"):
        prepare(loaded, run_dir="run", resume=False, reporters=[])


def test_a_memory_is_read_by_a_policy_and_stays_as_it_is() -> None:
    write_rows("prompts.jsonl", [{"prompt": f"{number} and so on" * 2, "answer": "!"} for number in range(20)])
    run = started(policy_run({"episodic_memory": MEMORY}, value="head"), "run")
    assert isinstance(run.engine, SingleEngine)
    model = run.engine.task.players["model"]
    model.memory.importance_N.fill_(1.0)
    model.memory.vectors_NVD.normal_()
    before = {name: value.clone() for name, value in model.memory.state_dict().items()}
    batch = next(run.feed)
    (loss,) = run.engine.task.losses(batch)
    assert float(loss.metrics["approximate_kl"]) == pytest.approx(0, abs=1e-5)
    model.memory.reading = False
    (loss,) = run.engine.task.losses(batch)
    assert abs(float(loss.metrics["approximate_kl"])) > 1e-5, "answers were drawn with the memory"
    model.memory.reading = True
    run.feed.reward = lambda answers: [float(len(answer.text)) for answer in answers]
    run.train()
    for name, value in model.memory.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_reward_model_scores_answers_with_what_it_reads() -> None:
    facts = secrets(1, 30)
    write_facts("facts.txt", facts)
    rows = [
        {"prompt": f"{name}=", "chosen": f"{meaning} it is", "rejected": f"not {name}, no", "context": meaning * (number % 3)}
        for number, (name, meaning) in enumerate(facts)
    ]
    run = started(pairs_run("reward", {"retrieval": RETRIEVAL, "cross_attention": CROSS}, rows), "reward")
    run.engine.task.players["model"].head.weight.data.normal_()
    run.train()
    write_rows("prompts.jsonl", [{"prompt": row["prompt"], "context": row["context"]} for row in rows])
    loaded = policy_run({"retrieval": RETRIEVAL, "cross_attention": CROSS}, reward={"kind": "trained", "run": "reward"})
    score = started(loaded, "policy").feed.reward
    batch = next(run.feed)
    with as_used(run.engine.task.players["model"]), torch.no_grad():
        wanted = run.engine.task.score(PromptAnswers.of(batch, "chosen_"))
    by_text = {row["prompt"] + row["chosen"]: row for row in rows}
    for row_L, mask_L, one in zip(batch["chosen_input_ids"], batch["chosen_attention_mask"], wanted, strict=True):
        row = by_text[bytes(row_L[mask_L].tolist()).decode()]
        answer = Answer(row["prompt"], row["chosen"], context=row["context"])
        assert score([answer])[0] == pytest.approx(float(one), abs=1e-4)
        assert score([answer._replace(context="something else")])[0] != pytest.approx(float(one), abs=1e-5)


@pytest.mark.whole
def test_a_policy_has_the_episodes_that_its_base_wrote_and_learning_leaves_them(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / "texts" / f"{number}.txt").write_text(" ".join(random.Random(number).choices(["one", "two", "three"], k=60)))
    Path("prompts.txt").write_text("\n".join("one two three four"[: 6 + number % 12] for number in range(20)))
    memory = MEMORY | {"replay_rate": 0.5}
    tree = PLANTED.replace("rows.jsonl", "texts").replace("batching: dynamic, ", "").replace("max_steps: 50", "max_steps: 3")
    Path("run.yaml").write_text(tree.format(model=json.dumps(MODEL | {"episodic_memory": memory})))
    ppo = "{rollout_size: 16, mini_batch_size: 8, epochs: 1, steps: 2, prompt_length: 20, response_length: 10}"
    Path("rlhf.yaml").write_text(
        f"training: {{max_steps: null, epochs: 1}}\nrlhf: {{reward: sentiment, prompts: prompts.txt, ppo: {ppo}}}\n"
    )
    assert main(["train", "run.yaml", "--rlhf_config", "rlhf.yaml", "--run-dir", "run"]) == 0
    base, policy = (open_run(f"run/{name}", print).task.players["model"] for name in ("base", "policy"))
    episodes: Any = base.memory
    kept: Any = policy.memory
    assert (episodes.importance_N > 0).any()
    assert not torch.equal(base.state_dict()["norm.weight"], policy.state_dict()["norm.weight"])
    for name, value in kept.state_dict().items():
        assert torch.equal(value, episodes.state_dict()[name]), name
