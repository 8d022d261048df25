"""One way to open a model: a run, a run in phases, a folder of Hugging Face or PEFT and a GGUF file give the same numbers everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoal.cli.main import main
from shoal.data import load_tokenizer
from shoal.data.text.tokenizers.own import ByteTokenizer
from shoal.errors import ShoalError
from shoal.models.huggingface.adapters import read_adapters
from shoal.models.huggingface.model import HuggingFace
from shoal.runs.converted_models import converted
from shoal.runs.export.gguf_file import write_gguf
from shoal.runs.trained_model import find_model, open_model
from shoal.serve.load_model import open_served
from tests.runs.test_gguf import prompts, small, with_rule, words
from tests.support.chat_folders import write_tokenizer
from tests.support.llama_cpp import llama_cpp, worst_choice

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def saved(folder: Path, kind: str = "llama") -> HuggingFace:
    model = small(kind, vocab_size=600)
    model.save_pretrained(folder)
    write_tokenizer(folder, "chatml")
    return HuggingFace(model)


@torch.inference_mode()
def logits(target: Path) -> torch.Tensor:
    return open_model(str(target), lambda text: None).task.players["model"](IDS)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"o_proj": 3, "c_proj": 3}}])
@torch.inference_mode()
def test_adapters_are_merged_into_their_base_once(tmp_path: Path, kind, lora):
    peft = pytest.importorskip("peft")
    inner = saved(tmp_path / "base", kind).inner
    targets = ["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "o_proj", "up_proj"]
    torch.manual_seed(5)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=kind == "gpt2", **lora)
    adapted = peft.get_peft_model(inner, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    expected = adapted(IDS).logits
    adapted.save_pretrained(tmp_path / "adapters")
    content = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(content | {"base_model_name_or_path": "base"}))
    torch.testing.assert_close(logits(tmp_path / "adapters"), expected, atol=1e-4, rtol=1e-4)
    folder = converted(tmp_path / "adapters")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert converted(tmp_path / "adapters") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert (folder / "chat_template.jinja").read_bytes() == (tmp_path / "base" / "chat_template.jinja").read_bytes()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peft_type": "IA3"}, "only LoRA matrices are read"),
        ({"modules_to_save": ["lm_head"]}, "only LoRA matrices are read"),
        ({"lora_alpha": "much"}, "is no configuration of LoRA"),
        ({"base_model_name_or_path": None}, "is no configuration of LoRA"),
    ],
)
def test_adapters_that_compute_otherwise_or_are_damaged_are_refused(tmp_path: Path, change, reason):
    content = {"peft_type": "LORA", "lora_alpha": 8, "base_model_name_or_path": "base", **change}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(ShoalError, match=reason):
        read_adapters(tmp_path)


def test_a_gguf_file_gives_the_model_and_the_word_rule_that_it_was_made_from(tmp_path: Path):
    pytest.importorskip("gguf")
    tokenizer = load_tokenizer(str(with_rule(tmp_path / "tokenizer", "qwen25", "qwen2")))
    model = small("qwen2", vocab_size=600, num_key_value_heads=2)
    write_gguf(model, tokenizer, "f32", tmp_path / "m.gguf", "small", lambda note: None)
    with torch.inference_mode():
        torch.testing.assert_close(logits(tmp_path / "m.gguf"), model(IDS).logits, atol=1e-5, rtol=1e-5)
    again = open_model("m.gguf", lambda text: None).tokenizer
    for text in ("Hello 123  there\n\n\n x's", "a\n \nb"):
        assert again.encode(text) == tokenizer.encode(text)
    content = (tmp_path / "m.gguf").read_bytes()
    rule = b"tokenizer.ggml.pre"
    at = content.index(rule) + len(rule) + 4 + 8
    (tmp_path / "odd.gguf").write_bytes(content[:at] + b"other" + content[at + 5 :])
    with pytest.raises(ShoalError, match="by the rule 'other', which Shoal does not know"):
        converted(tmp_path / "odd.gguf")


def test_generate_eval_and_serve_open_a_folder_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path / "base")
    texts = [f"the quick brown fox answers {'well ' * (number % 8)}" for number in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert main(["generate", "base", "--prompt", "the ", "--max-new-tokens", "4"]) == 0
    assert "\nthe " in "\n" + capsys.readouterr().out
    assert main(["eval", "base"]) == 2
    assert "add --data FILE" in capsys.readouterr().err
    short = ["--set", "data.sequence_length=64", "--set", "training.device=cpu", "--set", "data.batching=dynamic"]
    assert main(["eval", "base", "--data", "rows.jsonl", "--format", "json", *short]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]["loss"]
    assert found == pytest.approx(mean_loss(tmp_path / "base", texts), rel=1e-4)
    assert main(["eval", "base", "--data", "rows.jsonl", "--format", "json", "--weights", "int8", *short]) == 0
    packed = json.loads(capsys.readouterr().out)["metrics"]["loss"]
    assert packed == pytest.approx(found, rel=0.01)
    assert packed != found
    assert main(["generate", "base", "--weights", "int8", "--prompt", "the ", "--max-new-tokens", "4"]) == 0
    assert open_served(["base"], [], lambda text: None).name == "base"
    assert main(["generate", "nothing"]) == 2
    assert "no run or model at nothing" in capsys.readouterr().err


@torch.inference_mode()
def mean_loss(folder: Path, texts: list[str]) -> float:
    """The mean loss of the next token over texts, each with its end."""
    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), load_tokenizer(str(folder))
    rows = [torch.tensor([[*tokenizer.encode(text), *tokenizer.separator]]) for text in texts]
    losses = [torch.nn.functional.cross_entropy(model(row[:, :-1]).logits[0], row[0, 1:], reduction="none") for row in rows]
    return float(torch.cat(losses).mean())


def test_a_run_in_phases_opens_the_newest_phase_that_answers(tmp_path: Path):
    told: list[str] = []
    for phase in ("base", "answers", "reward", "reward-2", "policy"):
        (tmp_path / "r" / phase).mkdir(parents=True)
        (tmp_path / "r" / phase / "config.yaml").write_text("")
    for phase in ("base", "answers", "reward"):
        (tmp_path / "r" / phase / "checkpoints").mkdir()
    assert find_model("r", told.append) == str(Path("r") / "answers")
    assert told == ["r is a run in phases: its phase answers is used"]
    (tmp_path / "r" / "policy" / "checkpoints").mkdir()
    assert find_model("r", told.append) == str(Path("r") / "policy")


def test_a_vocabulary_that_transformers_cannot_read_is_an_error(tmp_path: Path):
    pytest.importorskip("gguf")
    write_gguf(small("llama", vocab_size=257), ByteTokenizer(), "f16", tmp_path / "b.gguf", "bytes", lambda note: None)
    with pytest.raises(ShoalError, match=r"b.gguf cannot be read as a language model"):
        open_model("b.gguf", lambda text: None)


def test_the_status_of_a_run_in_phases_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for phase in ("policy", "reward-2", "base", "reward"):
        (tmp_path / "r" / phase).mkdir(parents=True)
        (tmp_path / "r" / phase / "config.yaml").write_text("")
    assert main(["status", "r", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["phases"]) == ["base", "reward", "reward-2", "policy"]
    assert main(["status", "r"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:5]] == ["phase", "base", "reward", "reward-2", "policy"]
    assert main(["status", "r", "--grid", "g.png"]) == 2
    assert "name one phase" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_llama_cpp_adds_the_adapters_of_a_file_of_their_own(tmp_path: Path, kind, capsys: pytest.CaptureFixture[str]):
    peft = pytest.importorskip("peft")
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    more = {"use_parallel_residual": False, "hidden_act": "gelu_new"} if kind == "gpt_neox" else {}
    inner = small(kind, **more)
    inner.save_pretrained(tmp_path / "base")
    words().save(tmp_path / "base")
    targets = {"gpt2": ["c_attn", "c_proj"], "gpt_neox": ["query_key_value", "dense"], "llama": ["q_proj", "k_proj", "down_proj"]}[kind]
    torch.manual_seed(6)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=kind == "gpt2")
    adapted = peft.get_peft_model(inner, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(tmp_path / "adapters")
    file = tmp_path / "adapters" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "base"}))
    assert main(["export", "base", "base", "--gguf", "f32"]) == 0
    assert "written: base.gguf" in capsys.readouterr().out
    assert main(["export", "adapters", "adapters.gguf", "--gguf", "f32", "--adapters"]) == 0
    assert main(["export", "adapters", "merged.gguf", "--gguf", "f32"]) == 0
    assert main(["export", "adapters", "q.gguf", "--gguf", "q8_0", "--adapters"]) == 2
    assert "not quantised" in capsys.readouterr().err
    (prompt,) = prompts(1)
    with llama_cpp() as oracle:
        plain = oracle.ask(tmp_path / "base.gguf", prompts=[prompt]).answers[0]
        beside = oracle.ask(tmp_path / "base.gguf", prompts=[prompt], adapter=tmp_path / "adapters.gguf").answers[0]
        merged = oracle.ask(tmp_path / "merged.gguf", prompts=[prompt]).answers[0]
    for answer in (beside, merged):
        gap, difference = worst_choice(HuggingFace(adapted), prompt, answer)
        assert gap < 1e-2
        assert difference < (1e-4 if kind == "llama" else 1e-2)
    assert plain.logprobs != pytest.approx(beside.logprobs, abs=0.01), "the adapters change what the model says"


def test_torch_reads_back_a_checkpoint_that_was_exported_for_it(tmp_path: Path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict_loader import load

    model = saved(tmp_path / "base")
    assert main(["export", "base", "dcp", "--dcp"]) == 0
    expected = model.inner.state_dict()
    found = {f"model.inner.{name}": torch.zeros_like(value) for name, value in expected.items()}
    load(found, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[f"model.inner.{name}"], value, rtol=0, atol=0)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    assert torch.load(tmp_path / "whole.pt", weights_only=True).keys() == found.keys()


def test_the_size_of_a_small_file_is_not_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("shoal.cli.export._write", lambda arguments, target: target.write_bytes(bytes(17_500)))
    assert main(["export", "run", str(tmp_path / "lora.gguf"), "--gguf", "f16"]) == 0
    assert "lora.gguf (17.5 kB)" in capsys.readouterr().out


def test_the_name_of_a_gguf_file_without_a_form_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["export", "run", str(tmp_path / "model.gguf")])
    assert "is a name for a GGUF file: say with --gguf" in capsys.readouterr().err
