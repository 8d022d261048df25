"""Models as GGUF files: llama.cpp, which is the oracle, finds the same ids and chooses the same tokens; what it computes otherwise is
refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from shoal.data import load_tokenizer
from shoal.data.text.tokenizers.library import LibraryTokenizer
from shoal.data.text.tokenizers.llama_cpp import WORD_RULES, vocabulary_for_llama_cpp
from shoal.data.text.tokenizers.own import ByteTokenizer, CharacterTokenizer
from shoal.errors import ShoalError
from shoal.models.huggingface.llama_cpp import for_llama_cpp
from shoal.models.huggingface.model import HuggingFace
from shoal.runs.export import GGUF_TYPES
from shoal.runs.export.gguf_file import write_gguf
from tests.conftest import SHARED
from tests.support.chat_folders import write_tokenizer
from tests.support.llama_cpp import LlamaCpp, llama_cpp, worst_choice

transformers = pytest.importorskip("transformers")
WORDS = 300
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"rope_theta": 5e5}
TEXTS = [
    "In 1984, 12345 dogs didn't  sleep.\n\n\n\tx ≥ 3.14 ñandú 🙂",
    "  the quick brown fox   ASKS: don't you'LL we\n \n say?!..\r\n",
    "",
    "   ",
    "語\u00a0x\u0301 ½ ²3\t\t.",
]


@pytest.fixture(scope="module")
def oracle():
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    with llama_cpp() as process:
        yield process


def words() -> LibraryTokenizer:
    """A vocabulary without merges, all of whose ids are whole letters: llama.cpp gives no log-probabilities for parts of letters."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = [*map(chr, range(0x21, 0x7F)), *(f"w{number}" for number in range(WORDS - 94))]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return LibraryTokenizer(made, name="words", config={})


def small(kind: str, **settings) -> torch.nn.Module:
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **{**SIZES, **none, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def prompts(count: int) -> list[list[int]]:
    torch.manual_seed(4)
    return torch.randint(0, WORDS, (count, 20)).tolist()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3, "max_position_embeddings": 64}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 48}),
        ("qwen2", {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
        ("gemma", {"num_key_value_heads": 1, "head_dim": 32}),
        ("gpt2", {}),
        ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_llama_cpp_computes_what_the_model_does(tmp_path: Path, oracle: LlamaCpp, kind, settings):
    model, notes = small(kind, **settings), []
    write_gguf(model, words(), "f32", tmp_path / "m.gguf", "small", notes.append)
    assert any("sliding window" in note for note in notes) == (kind == "mistral")
    answers = oracle.ask(tmp_path / "m.gguf", prompts=prompts(2), count=12, context=48).answers
    for prompt, answer in zip(prompts(2), answers, strict=True):
        gap, difference = worst_choice(HuggingFace(model), prompt, answer)
        table = kind in ("gpt2", "gpt_neox", "gemma")  # llama.cpp reads GELU from a table of half-precision numbers
        assert gap < (1e-2 if table else 1e-5)
        assert difference < (1e-2 if table else 1e-4)


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_every_type_of_matrices_is_read_and_loses_only_its_own_precision(tmp_path: Path, oracle: LlamaCpp, kind):
    model = small("llama", num_key_value_heads=2)
    write_gguf(model, words(), kind, tmp_path / "m.gguf", "small", lambda note: None)
    answers = oracle.ask(tmp_path / "m.gguf", prompts=prompts(2), count=8).answers
    worst = max(worst_choice(HuggingFace(model), prompt, answer)[1] for prompt, answer in zip(prompts(2), answers, strict=True))
    assert worst < {"f32": 1e-4, "f16": 0.01, "bf16": 0.1, "q8_0": 0.2, "q4_0": 2.0}[kind]
    size = (tmp_path / "m.gguf").stat().st_size
    write_gguf(model, words(), "f32", tmp_path / "whole.gguf", "small", lambda note: None)
    assert size <= (tmp_path / "whole.gguf").stat().st_size
    with pytest.raises(ShoalError, match="is there already"):
        write_gguf(model, words(), kind, tmp_path / "m.gguf", "small", lambda note: None)


def with_rule(folder: Path, family: str, rule: str) -> Path:
    """A tokenizer that cuts texts into words by a rule of llama.cpp; SentencePiece's has none."""
    write_tokenizer(folder, family)
    if rule not in WORD_RULES:
        return folder
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"] = WORD_RULES[rule].pre_tokenizer
    content["model"]["ignore_merges"] = WORD_RULES[rule].ignore_merges
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("family", "rule"),
    [("smollm2", "smollm"), ("llama3", "llama-bpe"), ("qwen25", "qwen2"), ("chatml", "gpt-2"), ("gemma", "none"), (None, "bytes")],
)
def test_llama_cpp_finds_the_same_ids_and_renders_the_same_conversation(tmp_path: Path, oracle: LlamaCpp, family, rule):
    tokenizer = load_tokenizer("bytes" if family is None else str(with_rule(tmp_path / "tokenizer", family, rule)))
    write_gguf(small("llama", vocab_size=600), tokenizer, "f16", tmp_path / "m.gguf", "small", lambda note: None)
    chat = [{"role": "user", "content": "hello 12"}] if family else []
    marked = [f"<|im_start|>{text}<|im_end|>" for text in TEXTS] if family == "chatml" else TEXTS
    found = oracle.ask(tmp_path / "m.gguf", texts=marked, special=True, chat=chat)
    assert found.texts == [[*tokenizer.opening, *tokenizer.encode(text)] for text in marked]
    if family:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert found.chat == text.removeprefix(theirs.bos_token if tokenizer.opening else "")  # which llama.cpp adds with the ids


def story_tokenizer(folder: Path) -> Path:
    """The SentencePiece vocabulary of the smallest story model, as transformers converts such a vocabulary to merges."""
    pieces = json.loads(gzip.decompress((SHARED / "data" / "lm" / "stories260K.vocab.json.gz").read_bytes()))
    pieces[:3] = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0]]
    ids = {piece.replace(" ", "▁"): number for number, (piece, _) in enumerate(pieces)}
    scored = sorted(((-score, piece.replace(" ", "▁")) for piece, score in pieces[259:]))
    merges = [(p[:cut], p[cut:]) for _, p in scored for cut in range(1, len(p)) if p[:cut] in ids and p[cut:] in ids]
    special = [{"id": number, "content": piece, "special": True} for number, piece in enumerate(("<unk>", "<s>", "</s>"))]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    folder.mkdir(exist_ok=True)
    content = {
        "version": "1.0",
        "added_tokens": [{**token, **flags} for token in special],
        "normalizer": {"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": list(begin),
            "pair": [*begin, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {"type": "BPE", "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>", "vocab": ids, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


_PREPEND = {"type": "Prepend", "prepend": "▁"}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


@pytest.mark.skipif(not (SHARED / "data" / "lm").is_dir(), reason="needs the story models of shared/data")
def test_scores_of_a_sentencepiece_vocabulary_give_the_ids_of_its_merges(tmp_path: Path, oracle: LlamaCpp):
    tokenizer = load_tokenizer(str(story_tokenizer(tmp_path / "tokenizer")))
    write_gguf(small("llama", vocab_size=512), tokenizer, "f16", tmp_path / "m.gguf", "small", lambda note: None)
    texts = ["Once upon a time, there was a little girl named Lily.", *TEXTS[:2]]
    assert oracle.ask(tmp_path / "m.gguf", texts=texts, special=True).texts == [[1, *tokenizer.encode(text)] for text in texts]


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("gpt2", {"activation_function": "gelu"}, "exact GELU"),
        ("gpt2", {"activation_function": "relu"}, "activation relu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scaled by the layer"),
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type dynamic"),
        ("qwen2", {"rope_parameters": LLAMA3}, "type llama3"),
        ("qwen3", {"attention_bias": True}, "attention bias"),
        ("gemma", {"tie_word_embeddings": False}, "output matrix beside"),
        ("gpt_neox", {"use_parallel_residual": True, "hidden_act": "gelu_new"}, "layers in parallel"),
        ("gemma2", {"head_dim": 8}, "gemma2"),
        ("opt", {}, "opt"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(kind, settings, reason):
    with pytest.raises(ShoalError) as refused:
        for_llama_cpp(small(kind, **settings))
    assert reason in str(refused.value) or (kind == "opt" and "OPTForCausalLM" in str(refused.value)) or kind == "gemma2"


def test_a_vocabulary_that_llama_cpp_would_read_to_other_ids_is_refused(tmp_path: Path):
    with pytest.raises(ShoalError, match="no BPE vocabulary"):
        vocabulary_for_llama_cpp(CharacterTokenizer("abc"), 3)
    with pytest.raises(ShoalError, match="more ids than the model has rows"):
        vocabulary_for_llama_cpp(ByteTokenizer(), 256)
    folder = with_rule(tmp_path / "rule", "chatml", "gpt-2")
    content = json.loads((folder / "tokenizer.json").read_text())
    for change, reason in (
        ({"pre_tokenizer": {"type": "Whitespace"}}, "cuts texts into words by a rule"),
        ({"pre_tokenizer": WORD_RULES["llama-bpe"].pre_tokenizer}, "cuts texts into words by a rule"),  # without ignore_merges
        ({"normalizer": {"type": "Lowercase"}}, "its normalizer is"),
    ):
        (folder / "tokenizer.json").write_text(json.dumps(content | change))
        with pytest.raises(ShoalError, match=reason):
            vocabulary_for_llama_cpp(load_tokenizer(str(folder)), 600)
    folder = write_tokenizer(tmp_path / "pieces", "gemma")
    content = json.loads((folder / "tokenizer.json").read_text())
    del content["model"]["merges"][2]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ShoalError, match="merges are not those that scores"):
        vocabulary_for_llama_cpp(load_tokenizer(str(folder)), 600)


@pytest.mark.parametrize(("value", "reason"), [(1e5, "choose bf16 or f32"), (float("nan"), "not finite")])
def test_numbers_that_the_type_cannot_hold_are_refused_and_leave_no_file(tmp_path: Path, value, reason):
    pytest.importorskip("gguf")
    model = small("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = value
    with pytest.raises(ShoalError, match=reason):
        write_gguf(model, ByteTokenizer(), "f16", tmp_path / "m.gguf", "small", lambda note: None)
    assert not list(tmp_path.iterdir())
