"""`shoal export`: what is written loads elsewhere, to the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.cli.main import main
from shoal.runs.trained_model import open_run

transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
TEXT = ["--set", "data.source.kind=text", "--set", "data.source.path=text.txt", "--set", "data.tokenizer=bytes"]
SHORT = [
    "--set",
    "training.max_steps=3",
    "--set",
    "training.batch_size=2",
    "--set",
    "data.sequence_length=16",
    "--set",
    "training.device=cpu",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "config.yaml").write_text("dialect: shoal\n")
    return tmp_path


def train(*settings: str) -> None:
    assert main(["train", "config.yaml", "--run-dir", "run", *TEXT, *SHORT, *settings]) == 0


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_transformers_loads_what_was_trained_to_identical_logits(lora: bool) -> None:
    shape = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    start = transformers.AutoModelForCausalLM.from_config(shape)
    start.save_pretrained("start")
    if lora:
        pytest.importorskip("peft")
    train("--set", "model.kind=huggingface", "--set", "model.pretrained=start", *(["--set", "model.lora.rank=2"] if lora else []))
    assert main(["export", "run", "model"]) == 0
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        found = transformers.AutoModelForCausalLM.from_pretrained("model").eval()(ids).logits
        expected = open_run("run", lambda text: None).task.players["model"](ids)
        before = start.eval()(ids).logits
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-6 if lora else 0.0)  # LoRA: (W + AB)x for Wx + ABx
    assert not torch.allclose(found, before), "it is the trained one"
    assert not list(Path("model").glob("*.bin"))


def test_a_model_of_our_own_writes_from_where_it_was_exported_to(capsys: pytest.CaptureFixture[str]) -> None:
    train("--set", "model.kind=gpt", "--set", "model.hidden_size=16", "--set", "model.num_layers=1", "--set", "model.num_heads=2")
    assert main(["export", "run", "model"]) == 0
    assert load_file("model/model.safetensors").keys() == open_run("run", lambda text: None).checkpoint.weights.keys()
    capsys.readouterr()
    for place in ("run", "model"):
        assert main(["generate", place, "--prompt", "the ", "--max-new-tokens", "8", "--seed", "1"]) == 0
    first, second = capsys.readouterr().out.split("the ")[1:]
    assert first.strip() == second.strip()


def test_what_is_there_is_not_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    train("--set", "model.kind=gpt", "--set", "model.hidden_size=16", "--set", "model.num_layers=1", "--set", "model.num_heads=2")
    Path("model").mkdir()
    (Path("model") / "mine").touch()
    assert main(["export", "run", "model"]) == 2
    assert "model is there already" in capsys.readouterr().err
    assert main(["export", "nothing", "other"]) == 2
    assert not list(Path().glob("*other*"))


@pytest.mark.whole
def test_adapters_are_exported_alone_and_peft_loads_them_to_the_same_logits(capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    shape = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained("start")
    train("--set", "model.kind=huggingface", "--set", "model.pretrained=start", "--set", "model.lora.rank=2")
    assert main(["export", "run", "small", "--adapters"]) == 0
    ids = torch.arange(24).view(2, 12)
    expected = open_run("run", lambda text: None).task.players["model"](ids)
    for place in ("small", "run/adapters"):
        base = transformers.AutoModelForCausalLM.from_pretrained("start")
        torch.testing.assert_close(peft.PeftModel.from_pretrained(base, place).eval()(ids).logits, expected, rtol=0.0, atol=2e-6)
        assert sorted(path.name for path in Path(place).glob("*.safetensors")) == ["adapter_model.safetensors"]


@pytest.mark.whole
def test_workers_train_adapters_smaller_than_the_tokenizer_over_weights_of_4_bits() -> None:
    pytest.importorskip("peft")
    words = {word: number for number, word in enumerate(["[UNK]", *Path("text.txt").read_text().split()[:9]])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[UNK]").save_pretrained("start")
    with Path("start/tokenizer.json").open("a") as file:
        file.write(" " * 1_500_000)
    shape = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, bos_token_id=None, eos_token_id=0
    )
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained("start")
    model = {"model.kind": "huggingface", "model.pretrained": "start", "model.lora.rank": "2", "model.load": "nf4"}
    model |= {"strategy.kind": "diloco", "strategy.inner_steps": "1", "transport.kind": "in-process", "data.tokenizer": "null"}
    train("--workers", "2", *[word for name, value in model.items() for word in ("--set", f"{name}={value}")])
    trained = open_run("run", lambda text: None)
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        found = transformers.AutoModelForCausalLM.from_pretrained("run/model").eval()(ids).logits
        torch.testing.assert_close(found, trained.task.players["model"](ids), rtol=0.0, atol=2e-6)
    assert any(value.abs().sum() > 0 for name, value in trained.checkpoint.weights.items() if "lora_B" in name), "it is the trained one"


def test_a_run_without_lora_has_no_adapters_to_export(capsys: pytest.CaptureFixture[str]) -> None:
    train("--set", "model.kind=gpt", "--set", "model.hidden_size=16", "--set", "model.num_layers=1", "--set", "model.num_heads=2")
    assert main(["export", "run", "small", "--adapters"]) == 2
    assert "has no adapters" in capsys.readouterr().err
    assert not list(Path().glob("*small*"))


@pytest.mark.whole
def test_a_reward_model_with_lora_ends_with_its_classifier_and_its_adapters() -> None:
    pytest.importorskip("peft")
    shape = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained("start")
    Path("pairs.jsonl").write_text('{"prompt": "Q", "chosen": "yes", "rejected": "no"}\n' * 40)
    pairs = [
        "data.source.kind=preferences",
        "data.source.path=pairs.jsonl",
        "data.tokenizer=bytes",
        "task=reward",
        "data.sequence_length=16",
    ]
    model = [
        "model.kind=huggingface",
        "model.pretrained=start",
        "model.lora.rank=2",
        "training.max_steps=1",
        "training.batch_size=2",
        "training.device=cpu",
    ]
    settings = [word for setting in (*pairs, *model) for word in ("--set", setting)]
    assert main(["train", "config.yaml", "--run-dir", "run", *settings]) == 0
    assert transformers.AutoModelForSequenceClassification.from_pretrained("run/model").config.num_labels == 1
    assert [path.name for path in Path("run/adapters").glob("*.safetensors")] == ["adapter_model.safetensors"]


def test_a_gpt_of_our_own_is_exported_for_transformers_with_its_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [("kind", "gpt"), ("hidden_size", "16"), ("num_layers", "1"), ("num_heads", "2"), ("feed_forward", "swiglu")]
    train(*[word for name, value in sizes for word in ("--set", f"model.{name}={value}")])
    assert main(["export", "run", "model", "--transformers"]) == 2
    assert "GPT-2 has no feed_forward swiglu" in capsys.readouterr().err
    assert not list(Path().glob("*model*"))
    shutil.rmtree("run")
    train(*[word for name, value in sizes[:4] for word in ("--set", f"model.{name}={value}")])
    assert main(["export", "run", "model", "--transformers"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    ids = torch.tensor([tokenizer("the quick brown")["input_ids"]])
    with torch.no_grad():
        found = transformers.AutoModelForCausalLM.from_pretrained("model").eval()(ids).logits
        torch.testing.assert_close(found, open_run("run", lambda text: None).task.players["model"](ids), rtol=1e-5, atol=1e-5)
