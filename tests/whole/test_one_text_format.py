"""One conversation has the same ids everywhere: in training, pairs, rollouts, `serve RUN` and `serve RUN/model`; those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal import data
from shoal.cli.main import main
from shoal.config.load import resolve_data
from shoal.data.text.tokenizers.files import saved_files
from shoal.runs.trained_model import open_run
from shoal.serve.api.completion import prompt_ids
from shoal.serve.api.requests import ChatRequest
from shoal.serve.load_model import ServedModel, open_served
from tests.support.chat_folders import FAMILIES, conversations, write_tokenizer

transformers = pytest.importorskip("transformers")
CONVERSATIONS = 200


def small_chat_model(folder: Path, name: str) -> Path:
    """A folder as a model's maker publishes it."""
    size = data.load_tokenizer(str(write_tokenizer(folder, name))).vocab_size
    shape = transformers.LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=1024
    )
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


def train(*settings: str) -> None:
    Path("config.yaml").write_text("dialect: shoal\n")
    short = ["training.max_steps=1", "training.batch_size=2", "training.device=cpu", "data.sequence_length=512", "evaluation.batches=0"]
    given = ["model.kind=huggingface", "model.pretrained=base", "data.source.kind=text", "data.source.path=chats.jsonl", *short, *settings]
    assert main(["train", "config.yaml", "--run-dir", "run", *(word for one in given for word in ("--set", one))]) == 0


def served_ids(served: ServedModel, messages: list[Any]) -> list[int]:
    request = ChatRequest.model_validate({"model": "m", "messages": messages})
    (ids,) = prompt_ids(request, served, SimpleNamespace(vocab_size=10**6, longest=10**6))
    return ids


def pair_rows(chats: list[Any]) -> None:
    rows = [{"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [{"role": "assistant", "content": "no"}]} for chat in chats]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def pair_ids(chats: list[Any]) -> list[list[int]]:
    """The tokens of the chosen answers, padding left out."""
    pair_rows(chats)
    settings = {
        "model": {"kind": "gpt", "max_seq_len": 1024},
        "task": {"kind": "dpo"},
        "data": {"tokenizer": "run/tokenizer", "source": {"kind": "preferences", "path": "pairs.jsonl"}, "max_eval_samples": 1},
    }
    samples: Any = data.load(resolve_data(settings, name="test", dialect="shoal", environ={}).run).train
    batch = samples.batch(range(len(samples)))
    rows_of = zip(batch["chosen_input_ids"], batch["chosen_labels"], batch["chosen_attention_mask"], strict=True)
    return [[*ids[mask].tolist(), int(labels[mask][-1])] for ids, labels, mask in rows_of]


HERE = ("llama3", "gemma")
"""One family whose conversations have a system's turn, and one without. test_conversations.py renders those of all."""


@pytest.mark.parametrize("name", [name if name in HERE else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_200_conversations_have_the_same_ids_everywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_chat_model(Path("base"), name)
    chats: list[Any] = conversations(CONVERSATIONS, has_system=FAMILIES[name].has_system)
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    train()
    assert "rows are conversations: " in capsys.readouterr().err
    kept = {file: path.read_bytes() for file, path in saved_files(Path("base")).items() if "token" in file or "template" in file}
    for place in ("run/tokenizer", "run/model"):
        assert {file: (Path(place) / file).read_bytes() for file in kept} == kept
    reference = transformers.AutoTokenizer.from_pretrained("run/model")
    prompts = [reference.apply_chat_template(chat[:-1], add_generation_prompt=True)["input_ids"] for chat in chats]
    whole = {tuple(reference.apply_chat_template(chat)["input_ids"]) for chat in chats}
    for place in ("run", "run/model"):
        served = open_served([place], [], lambda text: None)
        assert [served_ids(served, chat[:-1]) for chat in chats] == prompts, place
        assert reference.convert_tokens_to_ids(FAMILIES[name].specials[-1]) in served.eos_ids, "the end of a turn ends an answer"
    encoder = data.PromptEncoder(data.load_tokenizer("run/tokenizer"))
    assert [encoder.encode(prompt) for prompt in data.read_prompts("chats.jsonl")] == prompts
    found = pair_ids(chats)
    assert len(found) > CONVERSATIONS * 0.9
    assert all(any(one == list(ids[: len(one)]) and len(ids) - len(one) <= 1 for ids in whole) for one in found), "all but a last line end"
    assert main(["generate", "run", "--chat", "--prompt", "hi", "--max-new-tokens", "4"]) == 0
    assert not capsys.readouterr().out.startswith("hi")


def test_a_run_that_goes_on_reads_the_template_and_the_time_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small_chat_model(Path("base"), "chatml")
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in conversations(30)))
    Path("mine.jinja").write_text("{{ strftime_now('%H:%M:%S') }}" + FAMILIES["chatml"].template)
    train("data.chat_template=mine.jinja", "checkpoint.strategy=steps", "checkpoint.every_steps=1")
    began = json.loads(Path("run/tokenizer/shoal_chat_time.json").read_text())["time"]
    Path("mine.jinja").write_text("another")
    assert main(["train", "--run-dir", "run", "--resume", "--set", "training.max_steps=2"]) == 0  # other data would be refused
    assert json.loads(Path("run/tokenizer/shoal_chat_time.json").read_text())["time"] == began
    tokenizer = open_run("run", lambda text: None).tokenizer
    assert tokenizer is not None
    assert tokenizer.chat_templates["default"].startswith("{{ strftime_now")
    assert not Path("run/model/shoal_chat_time.json").exists()
    monkeypatch.chdir(tmp_path / "run" / "model")
    elsewhere = open_run("..", lambda text: None).run.model
    assert getattr(elsewhere, "pretrained", None) == str(tmp_path / "base"), "the model that a run started from is found beside its folder"


@pytest.mark.parametrize("batching", ["packed", "dynamic"])
def test_feedback_reads_conversations_with_a_reward_model_of_such_pairs(
    batching: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_chat_model(Path("base"), "gemma")
    chats: list[Any] = conversations(30, has_system=False)
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    pair_rows(chats)
    common = ["data.sequence_length=256", f"data.batching={batching}", "training.max_steps=1"]
    pairs = ["data.source.kind=preferences", "data.source.path=pairs.jsonl", *common]
    train("task=reward", *pairs)
    Path("run").rename("judge")
    for task in ("{kind: dpo, loss: sigmoid}", "{kind: dpo, loss: kto}"):
        train(f"task={task}", *pairs)
        shutil.rmtree("run")
    ppo = ["rollout_size=4", "mini_batch_size=2", "epochs=1", "prompt_length=64", "response_length=4", "steps=1"]
    rewards = ["rlhf.reward={kind: trained, run: judge}", "rlhf.prompts=chats.jsonl"]
    train("task=ppo", *rewards, *common[:2], *(f"rlhf.ppo.{one}" for one in ppo), "training.max_steps=null")
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert "completed after" in printed.out
