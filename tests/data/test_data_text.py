"""Text of every source: read, split, limited; what is wrong with a file is said with its place."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.data import Data, Prompt, ShardFeed, load, read_prompts
from shoal.data.text.files import TextFiles, by_split, find_files
from shoal.data.text.python_source import zen
from shoal.data.text.rows import Fields
from shoal.errors import ShoalError

Make = Callable[..., Any]
LINES = "".join(f"this is line number {i} of the text\n" for i in range(200))


@pytest.fixture
def text_of(make_run: Make) -> Make:
    def load_text(path: Path, *, text_field: str | None = None, **settings: Any) -> Data:
        source = {"kind": "text", "path": str(path), "text_field": text_field}
        defaults = {"model__kind": "gpt", "data__sequence_length": 16}
        return load(make_run(data__source=source, **defaults | settings))

    return load_text


def texts_in(samples: Any, data: Data) -> list[str]:
    """The text of each sample, padding left out."""
    batch = samples.batch(range(len(samples)))
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"], dtype=torch.bool))
    assert data.info.tokenizer is not None
    return [data.info.tokenizer.decode(ids[keep].tolist()) for ids, keep in zip(batch["input_ids"], mask, strict=True)]


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def test_a_text_file_is_cut_in_front_and_end(tmp_path: Path, text_of: Make) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    data = text_of(tmp_path / "a.txt")
    front, end = "".join(texts_in(data.train, data)), "".join(texts_in(data.eval, data))
    assert LINES.startswith(front[:-16])
    assert end[:-16] in LINES
    assert LINES.index(end[:40]) >= len(front) - 16, "the end is not in the front"
    assert 0.04 < len(end) / len(LINES) < 0.06
    assert end.startswith("this is line"), "it is cut at a line"
    assert data.info.name == f"a.txt: {len(data.train):,} training sequences of 16 tokens"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_are_documents(tmp_path: Path, text_of: Make, name: str) -> None:
    rows = [{"id": f"no {i}", "content": f"row {i}"} for i in range(40)]
    data = text_of(write_rows(tmp_path / name, rows), data__batching="dynamic")
    train, held_out = texts_in(data.train, data), texts_in(data.eval, data)
    assert len(held_out) == 2
    assert sorted(train + held_out) == sorted(str(row["content"]) for row in rows)


def test_lines_are_samples_when_they_are_not_packed(tmp_path: Path, text_of: Make) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\r\n   \nthree")
    data = text_of(tmp_path / "a.txt", data__batching="padded")
    assert texts_in(data.train, data) == ["one", "two", "three"]


def test_a_folder_is_all_its_texts(tmp_path: Path, text_of: Make) -> None:
    write_rows(tmp_path / "deep" / "b.jsonl.gz", [{"text": "from a row " * 5}] * 30)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"from a file " * 30))
    (tmp_path / "ignored.md").write_text("ignored " * 50)
    text = "".join(texts_in(text_of(tmp_path).train, text_of(tmp_path)))
    assert "from a row" in text
    assert "from a file" in text
    assert "ignored" not in text


def test_names_tell_splits_apart(tmp_path: Path, text_of: Make) -> None:
    for name in ("train-00001.txt", "corpus.train.txt", "valid.txt", "other.txt"):
        (tmp_path / name).write_text(f"this is {name} " * 20)
    data = text_of(tmp_path)
    held_out = "".join(texts_in(data.eval, data))
    assert "valid" in held_out
    assert "train" not in held_out
    train, held = by_split(tmp_path, find_files(tmp_path))
    assert [file.name for file in held] == ["valid.txt"]
    assert len(train) == 3
    (tmp_path / "valid.txt").unlink()
    assert by_split(tmp_path, find_files(tmp_path))[1] == []


def test_prompts_are_not_learned(tmp_path: Path, text_of: Make) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": f"Q{i}:", "completion": f"A{i}"} for i in range(30)])
    for streaming in (False, True):
        data = text_of(file, data__batching="dynamic", data__streaming=streaming)
        batch = next(ShardFeed(data.train, batch_size=4, seed=1))
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            learned = [int(label) for label in labels if label != -100]
            text = data.info.tokenizer.decode(ids.tolist())
            assert learned == [*text.split(":")[1].encode(), 256]


def test_the_separator_parts_documents(tmp_path: Path, text_of: Make) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"text": "ab"}] * 40)
    data = text_of(file, data__sequence_length=3)
    tokens = data.train.batch(range(len(data.train)))["input_ids"].flatten().tolist()
    assert tokens[:9] == [97, 98, 256] * 3
    characters = text_of(file, data__sequence_length=3, data__tokenizer="characters")
    assert characters.info.vocab_size == 3
    assert characters.train.batch([0])["input_ids"].tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("streaming", [False, True])
def test_limits(tmp_path: Path, text_of: Make, streaming: bool) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(400)])
    options = {"data__batching": "dynamic", "data__streaming": streaming}

    def sizes(**limits: Any) -> tuple[int, int]:
        data = text_of(file, **options, **limits)
        if not streaming:
            return len(data.train), len(data.eval)
        return len(list(data.train.read(shard=(0, 1), seed=0, epoch=0))), len(data.eval)

    assert sizes() == (380, 20)
    assert sizes(data__max_train_samples=50) == (50, 20)
    assert sizes(data__max_samples=100) == (95, 5)
    assert sizes(data__max_samples=100, data__max_eval_samples=2) == ((95, 2) if not streaming else (98, 2))
    held = sizes(data__max_eval_samples=3)
    assert held == ((380, 3) if not streaming else (397, 3))


def test_training_and_held_out_documents_never_overlap(tmp_path: Path, text_of: Make) -> None:
    rows = [{"text": f"document {i}"} for i in range(300)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    for seed in (1, 2):
        whole = text_of(file, data__batching="dynamic", seed=seed)
        stream = text_of(file, data__batching="dynamic", data__streaming=True, seed=seed)
        held_out = texts_in(stream.eval, stream)
        learned = [stream.info.tokenizer.decode(s.inputs.tolist()) for s in stream.train.read(shard=(0, 1), seed=0, epoch=0)]
        for train, held in ((texts_in(whole.train, whole), texts_in(whole.eval, whole)), (learned, held_out)):
            assert len(held) == 15
            assert sorted(train + held) == sorted(row["text"] for row in rows)
    assert texts_in(whole.eval, whole) != texts_in(text_of(file, data__batching="dynamic").eval, whole), "another seed holds out others"


def test_a_stream_of_few_documents_holds_out_their_ends(tmp_path: Path, text_of: Make) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{i:04d}\n" for i in range(500)))
    data = text_of(tmp_path, data__streaming=True, data__batching="dynamic", data__shuffle_buffer=50)
    assert len(data.eval) == 75, "of many lines, every 20th"
    data = text_of(tmp_path, data__streaming=True)
    held_out = set("".join(texts_in(data.eval, data)).split())
    train = {data.info.tokenizer.decode(sample.inputs.tolist()) for sample in data.train.read(shard=(0, 1), seed=0, epoch=0)}
    assert {line[0] for line in held_out} == {"a", "b", "c"}
    assert not any(line in text for text in train for line in held_out if len(line) == 5)


def test_a_stream_without_evaluation_holds_nothing_out(tmp_path: Path, text_of: Make) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    data = text_of(tmp_path / "a.txt", data__streaming=True, evaluation__batches=0)
    assert data.eval is None
    labels = [label for sample in data.train.read(shard=(0, 1), seed=0, epoch=0) for label in sample.labels.tolist() if label != -100]
    assert sorted(labels) == sorted([*LINES.encode()[1:], 256])


def test_streams_have_the_tokens_of_files(tmp_path: Path, text_of: Make) -> None:
    (tmp_path / "a.txt").write_text(LINES * 30)
    data = text_of(tmp_path / "a.txt", data__streaming=True, data__tokenizer="bpe", data__shuffle_buffer=50)
    assert data.info.name == "a.txt: a stream of sequences of 16 tokens"
    batches = list(islice(ShardFeed(data.train, batch_size=8, seed=1), 20))
    assert all("line number" in data.info.tokenizer.decode(batch["input_ids"].flatten().tolist()) for batch in batches)
    with pytest.raises(ShoalError, match="`characters` must see the whole text first"):
        text_of(tmp_path / "a.txt", data__streaming=True, data__tokenizer="characters")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.jsonl", b"", r"a\.jsonl is empty"),
        ("a.jsonl", b'{"text": ""}\n', r"a\.jsonl is empty"),
        ("a.txt", b"short", "has 5 tokens, and one sequence takes 16"),
        ("a.txt", b"good\n" * 50 + b"bad \xff\xfe bytes", r"a\.txt: not UTF-8: byte 254 is 0xff"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": oops}\n', r"a\.jsonl:3: this line is not JSON: .* at column 10"),
        ("a.jsonl", b'{"text": "a"}\n["a"]\n', r"a\.jsonl:2: this line is not a JSON object but list"),
        ("a.jsonl", b'{"text": "a"}\n{"tex": "a"}\n', r"a\.jsonl:2: there is no field `text`: the fields are `tex`"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"a\.jsonl:2: `text` is not a text but int"),
        ("a.jsonl", b'{"a": "x", "b": "y", "n": 1}\n', r"which field is the text\? .* the fields are `a`, `b`, `n`"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', r"a\.jsonl:1: this line holds half of a surrogate pair"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not UTF-8"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz is damaged"),
        ("a.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:40], r"a\.txt\.gz is damaged"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_files(tmp_path: Path, text_of: Make, name: str, content: bytes, message: str, streaming: bool) -> None:
    (tmp_path / name).write_bytes(content)
    if streaming and "tokens" in message:
        message = "not one batch"
    with pytest.raises(ShoalError, match=message):
        next(ShardFeed(text_of(tmp_path / name, data__streaming=streaming).train, batch_size=2, seed=0))


def test_missing_files_and_fields(tmp_path: Path, text_of: Make) -> None:
    with pytest.raises(ShoalError, match=r"there is nothing at .*nowhere: put text files there"):
        text_of(tmp_path / "nowhere")
    with pytest.raises(ShoalError, match="there are no text files in"):
        text_of(tmp_path)
    write_rows(tmp_path / "a.jsonl", [{"text": "a", "other": "b" * 40}])
    assert set("".join(texts_in(text_of(tmp_path, text_field="other").train, text_of(tmp_path, text_field="other")))) == {"b"}
    with pytest.raises(ShoalError, match=r"a\.jsonl:1: there is no field `txt`: the fields are `text`, `other`"):
        text_of(tmp_path, text_field="txt")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext\n")
    for unit in ("whole", "piece", "line"):
        assert next(TextFiles([tmp_path / "a.txt"], Fields(), unit).read())[0].text.strip() == "text"


def test_a_vocabulary_too_large_for_the_model_is_refused(tmp_path: Path, text_of: Make) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    with pytest.raises(ShoalError, match=r"model\.vocab_size is 100, and the tokenizer bytes has 257 ids"):
        text_of(tmp_path / "a.txt", model__vocab_size=100)


def test_the_zen_of_python_is_read_without_running_its_module() -> None:
    poem = zen()
    assert poem.startswith("The Zen of Python, by Tim Peters\n\nBeautiful is better than ugly.\n")
    assert poem.endswith("let's do more of those!\n")
    assert "this" not in sys.modules, "to import it prints it"


def test_python_source(make_run: Make) -> None:
    data = load(make_run(model__kind="gpt"))
    assert data.eval is not None
    assert data.info.name.startswith("python-source: ")
    size = sum(len(samples) * 128 for samples in (data.train, data.eval))
    assert 3_000_000 < size <= 4_100_000
    text = "".join(texts_in(data.train, data)[:50])
    assert "import" in text
    assert "test_" not in text
    small = load(make_run(model__kind="gpt", data__max_samples=100))
    assert len(small.train) + len(small.eval) == 100
    assert 3 <= len(small.eval) <= 10


def test_real_shakespeare_by_characters(shared_data: Path, text_of: Make) -> None:
    data = text_of(shared_data / "text" / "tinyshakespeare.txt", data__tokenizer="characters")
    assert data.info.vocab_size == 65
    text = (shared_data / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    train = "".join(texts_in(data.train, data))
    assert train[:-16] == text[: len(train) - 16]
    assert "".join(texts_in(data.eval, data)).rstrip("\n")[-50:-16] in text[-100:]


def test_real_wikitext(shared_data: Path, make_run: Make) -> None:
    data = load(make_run(model__kind="gpt", data__source={"kind": "wikitext", "path": str(shared_data / "text")}))
    assert "there is no train file" in data.info.name
    valid = gzip.decompress((shared_data / "text" / "wikitext2.valid.tokens.txt.gz").read_bytes())
    assert len(data.train) == -(-(len(valid) - 1) // 128)
    assert "Robert <unk>" in "".join(texts_in(data.eval, data)[:200])


@pytest.mark.parametrize(("suffix", "names"), [("", "wiki.{}.tokens"), (".gz", "wiki.{}.raw"), (".gz", "wikitext2.{}.tokens.txt")])
def test_wikitext_files(tmp_path: Path, make_run: Make, suffix: str, names: str) -> None:
    for split in ("train", "valid", "test"):
        content = f" = {split} = \n".encode() * 40
        (tmp_path / (names.format(split) + suffix)).write_bytes(gzip.compress(content) if suffix else content)
    data = load(make_run(model__kind="gpt", data__source={"kind": "wikitext", "path": str(tmp_path)}))
    assert data.info.name.startswith("WikiText-2: ")
    assert "train" in texts_in(data.train, data)[0]
    assert "valid" in texts_in(data.eval, data)[0]


def test_real_snli(shared_data: Path, make_run: Make) -> None:
    run = make_run(model__kind="gpt", data__batching="dynamic", data__source={"kind": "snli", "path": str(shared_data / "snli")})
    data = load(run)
    assert (len(data.train), len(data.eval)) == (9842, 9824)
    assert texts_in(data.train, data)[1] == (
        "Premise: two women are embracing while holding to go packages\nHypothesis: two woman are holding packages\nLabel: entailment"
    )


def test_snli_as_published(tmp_path: Path, make_run: Make) -> None:
    rows = [{"gold_label": label, "sentence1": "a b", "sentence2": f"c {i}"} for i, label in enumerate(["neutral", "-", "entailment"])]
    write_rows(tmp_path / "snli_1.0_train.jsonl", rows)
    header = "gold_label\tsentence1_parse\tsentence1\tsentence2\n"
    (tmp_path / "snli_1.0_dev.txt").write_text(header + 'contradiction\tx\tsays "a\tc 9\n')
    run = make_run(model__kind="gpt", data__batching="dynamic", data__source={"kind": "snli", "path": str(tmp_path)})
    data = load(run)
    assert texts_in(data.train, data) == [
        f"Premise: a b\nHypothesis: c {i}\nLabel: {label}" for i, label in ((0, "neutral"), (2, "entailment"))
    ]
    assert texts_in(data.eval, data) == ['Premise: says "a\nHypothesis: c 9\nLabel: contradiction']
    for content, message in (("a\tb\n", ":1: 2 columns"), ("a\tb\t3\n", "label 3 is out of range"), ("a\tb\tyes\n", "`yes` is no label")):
        (tmp_path / "snli_1.0_train.jsonl").unlink(missing_ok=True)
        (tmp_path / "snli_1.0_train.tsv").write_text(content)
        with pytest.raises(ShoalError, match=message):
            load(run)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("kind", ["wikitext", "snli"])
def test_missing_corpora_say_what_to_put_where(tmp_path: Path, make_run: Make, kind: str) -> None:
    with pytest.raises(ShoalError, match=r"there are no .* files in .*: put \w+"):
        load(make_run(model__kind="gpt", data__source={"kind": kind, "path": str(tmp_path)}))
    with pytest.raises(
        ShoalError, match=r"the Hugging Face hub cannot be reached: put \w+.* in a folder, and set data\.source\.path to it"
    ):
        load(make_run(model__kind="gpt", data__source={"kind": kind}), cache_dir=tmp_path)


def test_preferences(tmp_path: Path, make_run: Make) -> None:
    dialogue = "\n\nHuman: hi {i}\n\nAssistant: hello\n\nHuman: more\n\nAssistant:"
    rows = [{"chosen": dialogue.format(i=i) + " good", "rejected": dialogue.format(i=i) + " bad thing"} for i in range(30)]
    rows.append({"chosen": "the same", "rejected": "the same"})
    file = write_rows(tmp_path / "pairs.jsonl.gz", rows)
    run = make_run(model__kind="gpt", task__kind="reward", data__source={"kind": "preferences", "path": str(file)})
    data = load(run)
    assert data.eval is not None
    assert (len(data.train), len(data.eval)) == (28, 2)
    assert "1 rows that prefer nothing" in data.info.name
    batch = next(ShardFeed(data.train, batch_size=4, seed=1))
    assert set(batch) == {f"{side}_{name}" for side in ("chosen", "rejected") for name in ("input_ids", "labels", "attention_mask")}
    for side, answer in (("chosen", " good"), ("rejected", " bad thing")):
        for labels in batch[f"{side}_labels"]:
            assert [int(label) for label in labels if label != -100] == [*answer.encode(), 256]
    short = load(
        make_run(model__kind="gpt", task__kind="reward", data__sequence_length=8, data__source={"kind": "preferences", "path": str(file)})
    )
    labels = next(ShardFeed(short.train, batch_size=4, seed=1))["chosen_labels"]
    assert [int(label) for label in labels[0] if label != -100] == [*b" good", 256], "of a long prompt the end is kept"


def test_preferences_with_a_prompt_of_their_own(tmp_path: Path, make_run: Make) -> None:
    rows = [{"prompt": f"Q{i} ", "better": f"Q{i} yes", "worse": "no"} for i in range(4)]
    source = {
        "kind": "preferences",
        "path": str(write_rows(tmp_path / "a.jsonl", rows)),
        "chosen_field": "better",
        "rejected_field": "worse",
    }
    pairs = load(make_run(model__kind="gpt", task__kind="reward", data__source=source)).train.pairs
    assert {pair.chosen for pair in pairs} == {"yes"}
    assert {pair.rejected for pair in pairs} == {"no"}


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_preferences_as_messages(loss: str, tmp_path: Path, make_run: Make) -> None:
    question = {"role": "user", "content": "hi"}
    good, bad = ({"role": "assistant", "content": text} for text in ("good", "bad"))
    rows: list[Any] = [
        {"chosen": [question, good], "rejected": [question, bad]},
        {"prompt": [question], "chosen": [good], "rejected": [bad]},
        {"prompt": "hi", "chosen": [good], "rejected": [bad]},
        {"prompt": [question], "chosen": [question, good], "rejected": [question, bad]},
    ]
    if loss == "kto":
        rows = [{"prompt": [question], "completion": [good], "label": True}, {"completion": [question, bad], "label": False}] * 2
    source = {"kind": "preferences", "path": str(write_rows(tmp_path / "a.jsonl", rows))}
    settings = {"model__kind": "gpt", "task__kind": "dpo", "task__loss": loss, "data__source": source}
    data = load(make_run(**settings, data__chat_template="plain", data__max_eval_samples=1))
    batch = data.train.batch(range(3))
    prompt = "User: hi\nAssistant:"
    if loss == "kto":
        assert {*rows_of(batch)} <= {(prompt, " good\n"), (prompt, " bad\n")}
    else:
        assert rows_of(batch, "chosen_") == [(prompt, " good\n")] * 3
        assert rows_of(batch, "rejected_") == [(prompt, " bad\n")] * 3
    with pytest.raises(ShoalError, match="rows are conversations, and the tokenizer bytes has no chat template"):
        load(make_run(**settings))
    for row, message in (
        ({"chosen": [{"role": "poet", "content": "x"}], "rejected": [good]}, r"a\.jsonl:1: each message of `chosen` must have a `role`"),
        ({"chosen": [good], "rejected": "y"}, r"a\.jsonl:1: `rejected` must be a list of messages"),
        ({"chosen": [good], "rejected": [bad]}, "an answer needs the messages before it"),
        ({"prompt": [question], "chosen": "a", "rejected": "b"}, "the answers must be lists of messages, too"),
    ):
        write_rows(tmp_path / "a.jsonl", [row])
        with pytest.raises(ShoalError, match=message):
            load(make_run(**settings))


def rows_of(batch: Any, side: str = "") -> list[tuple[str, str]]:
    """The prompt and the answer of each row of a batch, and `$` at the end of an answer."""
    found = []
    for ids, labels, mask in zip(*(batch[f"{side}{name}"] for name in ("input_ids", "labels", "attention_mask")), strict=True):
        answer = labels[labels != -100].tolist()
        first = ids[mask].tolist()
        prompt = first[: len(first) - len(answer) + 1]
        found.append((bytes(prompt).decode(), "".join(chr(token) if token < 256 else "$" for token in answer)))
    return found


def test_pairs_are_split_into_answers_with_a_label(tmp_path: Path, make_run: Make) -> None:
    rows = [{"prompt": f"Q{i} ", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(30)]
    source = {"kind": "preferences", "path": str(write_rows(tmp_path / "a.jsonl", rows))}
    data = load(make_run(model__kind="gpt", task__kind="dpo", task__loss="kto", data__source=source))
    assert (len(data.train), len(data.eval), data.info.name) == (56, 4, "a.jsonl: 56 answers, 28 of them good")
    assert not {one.prompt for one in data.train.answers} & {one.prompt for one in data.eval.answers}, "both answers are on one side"
    for one in (*data.train.answers, *data.eval.answers):
        assert one.answer.startswith("yes" if one.desirable else "no")


@pytest.mark.parametrize("side", ["right", "left"])
def test_each_answer_comes_with_the_answer_of_the_row_before_to_its_prompt(tmp_path: Path, make_run: Make, side: str) -> None:
    rows = [{"prompt": f"Q{i}: ", "completion": "a" * (i + 1), "label": i % 2 == 0} for i in range(8)]
    source = {"kind": "preferences", "path": str(write_rows(tmp_path / "a.jsonl", rows))}
    run = make_run(model__kind="gpt", task__kind="dpo", task__loss="kto", data__source=source, data__padding_side=side)
    train = load(run).train
    batch = train.batch([3, 0, 5])
    own = [train.answers[number] for number in (3, 0, 5)]
    assert rows_of(batch) == [(one.prompt, f"{one.answer}$") for one in own]
    assert rows_of(batch, "kl_") == [(one.prompt, f"{other.answer}$") for one, other in zip(own, own[-1:] + own[:-1], strict=True)]
    assert batch["desirable"].tolist() == [one.desirable for one in own]


def test_bad_answers_with_a_label(tmp_path: Path, make_run: Make) -> None:
    good, path = {"prompt": "a", "completion": "b", "label": True}, tmp_path / "a.jsonl"
    source = {"kind": "preferences", "path": str(path)}
    for row, message in (
        (good | {"label": "no"}, r"a\.jsonl:2: `label` must be true for a good answer or false for a bad one, and it is 'no'"),
        (good | {"completion": ""}, r"a\.jsonl:2: `completion` must be a text, and it is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "holds pairs of answers and single answers with a label"),
    ):
        write_rows(path, [good, row])
        with pytest.raises(ShoalError, match=message):
            load(make_run(model__kind="gpt", task__kind="dpo", task__loss="kto", data__source=source))
    write_rows(path, [good] * 4)
    with pytest.raises(ShoalError, match="holds single answers with a label, and the task dpo compares pairs: set task to"):
        load(make_run(model__kind="gpt", task__kind="dpo", data__source=source))


def test_a_language_model_learns_the_good_answers(tmp_path: Path, make_run: Make) -> None:
    rows = [{"prompt": f"Q{i} ", "completion": "yes" if i % 2 else "no", "label": i % 2} for i in range(40)]
    source = {"kind": "preferences", "path": str(write_rows(tmp_path / "a.jsonl", rows))}
    data = load(make_run(model__kind="gpt", data__source=source, data__batching="dynamic"))
    assert len(data.train) + len(data.eval) == 20
    assert all(answer.startswith("yes") for _, answer in rows_of(data.train.batch(range(4))))


def test_a_language_model_learns_the_chosen_answers(tmp_path: Path, make_run: Make) -> None:
    rows = [{"prompt": f"Q{i} ", "chosen": "yes", "rejected": "no"} for i in range(40)]
    source = {"kind": "preferences", "path": str(write_rows(tmp_path / "a.jsonl", rows))}
    data = load(make_run(model__kind="gpt", data__source=source, data__batching="dynamic"))
    batch = data.train.batch(range(4))
    for labels in batch["labels"]:
        assert bytes(int(label) for label in labels if 0 <= label < 256) == b"yes", "the loss is on answers only"


def test_bad_preferences(tmp_path: Path, make_run: Make) -> None:
    run = make_run(model__kind="gpt", task__kind="reward", data__source={"kind": "preferences", "path": str(tmp_path / "a.jsonl")})
    for row, message in (
        ({"chosen": "a"}, "`rejected` must be a text, and there is none"),
        ({"chosen": "", "rejected": "b"}, "it is empty"),
    ):
        write_rows(tmp_path / "a.jsonl", [{"chosen": "a", "rejected": "b"}, row])
        with pytest.raises(ShoalError, match=rf"a\.jsonl:2: .*{message}"):
            load(run)
    write_rows(tmp_path / "a.jsonl", [])
    with pytest.raises(ShoalError, match="there are no pairs"):
        load(run)


def test_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first\n\nsecond\n")
    lines = tmp_path / "a.txt"
    assert read_prompts(lines) == [Prompt("first", where=f"{lines}:1"), Prompt("second", where=f"{lines}:3")]
    rows = [{"prompt": "third", "answer": 4, "context": "a number"}, {"prompt": "fourth"}]
    found, with_context = read_prompts(write_rows(tmp_path / "a.jsonl", rows)), read_prompts(tmp_path / "a.jsonl", True)
    assert [one[:3] for one in found] == [("third", "4", ""), ("fourth", None, "")]
    assert [one[:3] for one in with_context] == [("third", "4", "a number"), ("fourth", None, "")]
    assert (found[0].columns, found[0].where) == ({"expected": 4, "context": "a number"}, f"{tmp_path / 'a.jsonl'}:1")
    with pytest.raises(ShoalError, match=r"c\.jsonl:1: `context` must be a text, and it is int"):
        read_prompts(write_rows(tmp_path / "c.jsonl", [{"prompt": "?", "context": 3}]), True)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for row in ({"prompt": chat[:1]}, {"messages": chat}, {"prompt": chat}):
        (prompt,) = read_prompts(write_rows(tmp_path / "d.jsonl", [row]))
        assert prompt.text == "User: hi\nAssistant: "
        assert prompt.conversation is not None
        assert prompt.conversation.messages == chat[:1]
    with pytest.raises(ShoalError, match=r"b\.jsonl:1: `prompt` must be a text"):
        read_prompts(write_rows(tmp_path / "b.jsonl", [{"question": "?"}]))


def test_real_preferences(shared_data: Path, make_run: Make) -> None:
    source = {"kind": "preferences", "path": str(shared_data / "preference" / "hh_helpful_base_test.jsonl.gz")}
    data = load(make_run(model__kind="gpt", task__kind="reward", data__source=source, data__max_samples=200))
    assert len(data.train) + len(data.eval) == 200
    assert all(pair.prompt.endswith("\n\nAssistant:") for pair in data.train.pairs)
