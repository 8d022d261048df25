"""Files that a stranger made: models that bring code, tokenizers, templates, GGUF files and data that cost more than they may."""

from __future__ import annotations

import builtins
import gc
import gzip
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shoal.config import Run
from shoal.config.load import resolve_data
from shoal.config.schema import model as schema
from shoal.data import SampleStream, load_tokenizer
from shoal.data import load as load_data
from shoal.data.hub.dataset import DataRequest, load_splits
from shoal.data.images import transfer
from shoal.data.images.decoding import CorruptImageError, decode
from shoal.data.images.mnist import read_idx
from shoal.data.images.transfer import ImageOffer, fetch_images
from shoal.data.retrieval.encoders import HashedWords
from shoal.data.retrieval.index import build_index, open_index
from shoal.data.retrieval.passages import Passages
from shoal.data.text.chat_template import ChatTemplate, template_of
from shoal.errors import ShoalError
from shoal.files import file_digest
from shoal.models.huggingface.pretrained import load
from shoal.runs.folder.checkpoint import load_weights
from shoal.runs.folder.sharded_checkpoint import ShardedTensors
from shoal.serve.load_model import encoder_for
from shoal.serve.nodes.model_description import meta_model, model_maker
from shoal.serve.nodes.weights import WeightStore
from shoal.untrusted import data_files, huggingface, parquet_files, prompt_process
from shoal.untrusted.gguf_header import check_gguf
from shoal.untrusted.parquet_files import check_parquet
from tests.support.processes import HANG_S
from tests.support.small_service import small_served

CODE = "from pathlib import Path\nPath({mark!r}).touch()\n"
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40}


# --- code that comes with a model ---------------------------------------------------------------------------------------


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Somebody, or a pipe, who answers every question on the terminal with yes; the questions."""
    questions: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda text="": questions.append(text) or "y")
    return questions


def folder_with_code(folder: Path, kind: str, names: dict[str, Any]) -> Path:
    """A folder whose configuration names code that leaves a mark when it runs."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": names} | TINY))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": names, "tokenizer_class": "Theirs"}))
    (folder / "theirs.py").write_text(CODE.format(mark=str(folder / "ran")))
    return folder


EVERYTHING = {"AutoConfig": "theirs.A", "AutoModelForCausalLM": "theirs.B", "AutoTokenizer": ["theirs.C", "theirs.C"]}
EVERYTHING |= {"AutoModelForSequenceClassification": "theirs.D"}


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: load(schema.HuggingFace(pretrained=folder), None),
        lambda folder: meta_model(Path(folder)),
        lambda folder: load_tokenizer(folder),
        lambda folder: huggingface.read_classifier(folder),
    ],
    ids=["policy", "server", "tokenizer", "reward"],
)
def test_code_in_a_folder_does_not_run_whatever_stdin_says(tmp_path, yes, read):
    folder = folder_with_code(tmp_path / "theirs", "theirs", EVERYTHING)
    with pytest.raises(ShoalError, match=r"theirs needs Python code of its own.*plugin"):
        read(str(folder))
    assert not (folder / "ran").exists()
    assert not yes


def test_code_that_a_server_names_does_not_run_on_a_node(tmp_path, yes):
    """A model that this version of transformers has no class of, although it knows the configuration."""
    folder = folder_with_code(tmp_path / "theirs", "vit", {"AutoModelForCausalLM": "theirs.B"})
    config = json.dumps({"model_type": "vit", "_name_or_path": str(folder), "auto_map": {"AutoModelForCausalLM": f"{folder}--theirs.B"}})
    with pytest.raises(ShoalError, match=r"the server's model|needs Python code of its own"):
        model_maker({"config": config}, lambda name: None, torch.device("cpu"))[0]()
    assert not (folder / "ran").exists()
    assert not yes


@pytest.mark.long
def test_shoal_serve_refuses_a_folder_with_code_although_yes_is_piped_into_it(tmp_path):
    folder = folder_with_code(tmp_path / "theirs", "theirs", EVERYTHING)
    command = [sys.executable, "-m", "shoal", "serve", str(folder), "--port", "0"]
    done = subprocess.run(command, input="y\n" * 20, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)
    assert done.returncode == 2
    assert "needs Python code of its own" in done.stderr
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1e\\+09"),
        ({"num_hidden_layers": 2000}, "more than .* modules"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"attn_implementation": "them/kernel"}, "names code on the hub"),
        ({"text_config": {"num_local_experts": 10**8}}, "num_local_experts"),
        ({"head_dim": "wide"}, "cannot be made here"),
    ],
)
def test_a_server_cannot_name_a_model_that_exhausts_a_node(monkeypatch, change, reason):
    monkeypatch.setattr(huggingface, "MOST_MODULES", 1000)
    with pytest.raises(ShoalError, match=reason):
        model_maker({"config": json.dumps({"model_type": "llama"} | TINY | change)}, lambda name: None, torch.device("cpu"))[0]()


def test_pickled_weights_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | TINY))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    for read in (lambda: load(schema.HuggingFace(pretrained=str(tmp_path)), None), lambda: huggingface.read_classifier(str(tmp_path))):
        with pytest.raises((ShoalError, OSError), match="safetensors"):
            read()


# --- tokenizers ---------------------------------------------------------------------------------------------------------

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, " ": 2}, "merges": []}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def tokenizer_file(folder: Path, **parts: Any) -> Path:
    empty = dict.fromkeys(["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"])
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": BPE} | empty | parts))
    return file


def split_at(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40}}, "its normalizer can make a text"),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 40}}, "its decoder can make a text"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 100_000}}, "its normalizer can make a text"),
        ({"model": BPE | {"vocab": {"a": 2**32 - 1}}}, "its highest id is 4,294,967,295"),
        ({"model": BPE | {"vocab": {"a": 0, "b" * 20_000: 1}}}, "a token has 20,000 letters"),
        (
            {"model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "", "vocab": {"a": 0}}
             | {"max_input_chars_per_word": 10**9}},
            "max_input_chars_per_word",
        ),
    ],
)  # fmt: skip
def test_a_tokenizer_that_grows_without_bound_is_refused(tmp_path, parts, reason):
    file = tokenizer_file(tmp_path, **parts)
    for place in (file, tmp_path):
        with pytest.raises(ShoalError, match=reason):
            load_tokenizer(str(place))


def test_a_tokenizer_file_of_any_size_is_not_read(tmp_path):
    file = tokenizer_file(tmp_path)
    with file.open("ab") as content:
        content.truncate(300 << 20)  # it takes no room on the disk
    with pytest.raises(ShoalError, match="may have 268,435,456"):
        load_tokenizer(str(tmp_path))


def test_a_text_that_the_tokenizers_library_gives_up_on_is_an_error_and_no_crash(tmp_path):
    tokenizer = load_tokenizer(str(tokenizer_file(tmp_path, pre_tokenizer=split_at("(a+)+b"))))
    with pytest.raises(ShoalError, match="gives up on this text"):
        tokenizer.encode("a" * 30)


def test_a_damaged_tokenizer_configuration_is_named(tmp_path):
    tokenizer_file(tmp_path)
    for content in ("[" * 100_000, "{", '{"eos_token": ' + "9" * 5000 + "}"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ShoalError, match=r"tokenizer_config\.json is damaged"):
            load_tokenizer(str(tmp_path))


# --- chat templates, and tokenizers that take their time ------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_process, "SECONDS", 1)


FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (FOREVER, "more than 1 seconds"),
        ("{{ 'a' * 10**11 }}", "too much memory"),
        ("{{ '%099999999999d' % 1 }}", "too much memory|refuses"),
        ("{{ 'a' * 20000000 }}", "letters, and 16,777,216 are allowed"),
        ("{{ 9 ** (9 ** (8 + messages|length)) }}", "more than 1 seconds"),
        ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_template_that_never_ends_or_fills_the_memory_is_stopped(tmp_path, impatient, template, reason):
    source = "{% if messages[0].content == 'now' %}" + template + "{% else %}fine{% endif %}"
    rendered = ChatTemplate({"default": source}, {})
    with pytest.raises(ShoalError, match=f"chat template .*({reason})"):
        rendered.prompt([{"role": "user", "content": "now"}])
    assert rendered.prompt([{"role": "user", "content": "later"}]) == "fine", "the next request is answered"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ dict.__class__.__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% generation %}{{ caller.__globals__ }}{% endgeneration %}",
    ],
)
def test_a_template_reaches_nothing_but_its_conversation(template):
    """What is forbidden is an error, or an empty text."""
    rendered = ChatTemplate({"default": template}, {})
    try:
        found = rendered.prompt([{"role": "user", "content": "now"}])
    except ShoalError as error:
        assert re.search("unsafe|undefined|no loader|cannot store|not safely callable|has no attribute|No caller", str(error))  # noqa: PT017
    else:
        assert found == ""


def test_a_template_of_any_size_or_kind_is_refused(tmp_path):
    tokenizer_file(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x" * (5 << 20))
    with pytest.raises(ShoalError, match=r"chat_template\.jinja is too large"):
        template_of(load_tokenizer(str(tmp_path)))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ShoalError, match=r"chat_template\.jinja is not UTF-8"):
        template_of(load_tokenizer(str(tmp_path)))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    template = template_of(load_tokenizer(str(tmp_path)))
    assert template is not None
    with pytest.raises(ShoalError, match="chat template refuses"):
        template.check()


def test_a_pattern_that_takes_for_ever_ends_one_request_and_not_the_service(tmp_path, impatient):
    """The time of this pattern grows with the square of a text's length."""
    tokenizer = load_tokenizer(str(tokenizer_file(tmp_path, pre_tokenizer=split_at("a+b"))))
    served = small_served()._replace(tokenizer=tokenizer, encoder=encoder_for(tokenizer))
    with pytest.raises(ShoalError, match=r"the tokenizer .* was stopped: it took more than 1 seconds"):
        served.encode("a" * 200_000)
    assert served.encode("ab a") == tokenizer.encode("ab a") == [0, 1, 2, 0]


def test_the_process_that_encodes_ends_with_the_model_it_serves(tmp_path):
    encoder = encoder_for(load_tokenizer(str(tokenizer_file(tmp_path))))
    assert encoder is not None
    encoder.start()
    process = encoder._process
    assert process is not None
    assert process.poll() is None
    del encoder
    gc.collect()
    assert process.poll() is not None


# --- GGUF ---------------------------------------------------------------------------------------------------------------


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def gguf(entries: int = 0, tensors: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + body


HONEST = text("general.architecture") + struct.pack("<I", 8) + text("llama")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GGML", "does not begin with GGUF"),
        (b"GGUF\x03", "ends within its header"),
        (gguf(entries=2**60), "claims 1,152,921,504,606,846,976 entries"),
        (gguf(tensors=2**60), "claims 1,152,921,504,606,846,976 tensors"),
        (gguf(1, body=struct.pack("<Q", 2**62)), "a name has"),
        (gguf(1, body=text("a") + struct.pack("<IQ", 8, 2**62)), "reaches beyond its end"),
        (gguf(1, body=text("a") + struct.pack("<IIQ", 9, 4, 2**50)), "lists claim"),
        (gguf(1, body=text("a") + struct.pack("<IIQ", 9, 9, 1)), "items of type 9"),
        (gguf(1, body=text("a") + struct.pack("<I", 77)), "type 77"),
        (gguf(1, body=text("llama.block_count") + struct.pack("<IQ", 10, 2**40)), "block_count"),
        (gguf(0, 1, text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**20, 0, 0)), "need more bytes than it has"),
        (gguf(0, 9, (text("t") + struct.pack("<IQIQ", 1, 1000, 0, 0)) * 9), "need more bytes than it has"),
    ],
)
def test_a_gguf_file_that_claims_more_than_it_has_is_refused(tmp_path, content, reason):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ShoalError, match=f"model.gguf.*{reason}"):
        check_gguf(tmp_path / "model.gguf")


def test_an_honest_gguf_header_is_accepted(tmp_path):
    tensor = text("t") + struct.pack("<IQIQ", 1, 32, 0, 0)
    (tmp_path / "model.gguf").write_bytes(gguf(1, 1, HONEST + tensor) + bytes(256))
    check_gguf(tmp_path / "model.gguf")


# --- text ---------------------------------------------------------------------------------------------------------------


def run_on(source: dict[str, Any], model: str = "gpt", **more: Any) -> Run:
    settings: dict[str, Any] = {"data": {"source": source} | more, "model": {"kind": model}, "training": {"max_steps": 3}}
    if model == "gpt":
        settings["data"] |= {"sequence_length": 8, "tokenizer": "bytes"}
    return resolve_data(settings, name="test", dialect="shoal").run


def images_of(path: Path) -> Run:
    return run_on({"kind": "images", "path": str(path), "download": None}, "dcgan")


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(data_files, "LONGEST_LINE", 1 << 20)
    monkeypatch.setattr(data_files, "MOST_MEMBER_BYTES", 1 << 20)


@pytest.mark.parametrize("name", ["bomb.txt.gz", "bomb.jsonl.gz"])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_compressed_text_of_blanks_is_refused_before_it_fills_the_memory(tmp_path, small_limits, name, streaming):
    (tmp_path / name).write_bytes(gzip.compress(b" " * (8 << 20)))
    with pytest.raises(ShoalError, match=rf"{name} is refused: (decompressed|a line)"):
        read_all(run_on({"kind": "text", "path": str(tmp_path)}, streaming=streaming))


def read_all(run: Run) -> None:
    data = load_data(run)
    if isinstance(data.train, SampleStream):
        for _ in data.train.read(shard=(0, 1), seed=0, epoch=0):
            pass


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[" * 200_000, "JSON that is not read"),
        (b'{"text": ' + b"9" * 5000 + b"}", "JSON that is not read"),
        (b'{"text": "' + b"a" * (2 << 20) + b'"}', "a line of it has more than"),
    ],
    ids=["nested", "digits", "long"],
)
def test_a_line_of_json_that_no_program_wrote_is_refused_by_name(tmp_path, small_limits, line, reason):
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(ShoalError, match=rf"a\.jsonl.*{reason}"):
        load_data(run_on({"kind": "text", "path": str(tmp_path)}))


def test_a_named_pipe_among_texts_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text("text " * 100)
    with pytest.raises(ShoalError, match=r"a\.txt is no regular file"):
        load_data(run_on({"kind": "text", "path": str(tmp_path)}))


def test_honest_text_that_shrinks_well_is_read(tmp_path, small_limits):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("".join(f"line {n} of the text\n" for n in range(50_000)).encode()))
    assert len(load_data(run_on({"kind": "text", "path": str(tmp_path)})).train) > 25_000


# --- images and arrays --------------------------------------------------------------------------------------------------


def png(width: int, height: int) -> bytes:
    """An image whose header claims a size; its pixels are not there."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8_200, 60_000, 2**31 - 1])
def test_an_image_that_claims_too_many_pixels_is_refused_from_its_header(side):
    with pytest.raises(CorruptImageError, match="make it smaller"):
        decode(png(side, side), None, None)


@pytest.mark.parametrize(
    "content",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"SIMPLE  =                    T",
        b"\x89PNG\r\n\x1a\n" + b"\0" * 40,
        b"GIF89a",
        b"BM" + b"\xff" * 60,
        b"II*\0\x08\0\0\0\xff\xff" + b"\xff" * 50,
        b"P6 99999999999 99999999999 255\n",
    ],
)
def test_what_is_no_photograph_is_a_corrupt_image_and_starts_no_program(content):
    with pytest.raises(CorruptImageError):
        decode(content, 8, 3)


def test_a_file_in_an_archive_of_images_has_a_largest_size(tmp_path, small_limits):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(4 << 20))
    with pytest.raises(ShoalError, match=r"a\.zip/a\.png is refused: it claims 4,194,304 bytes"):
        load_data(images_of(tmp_path / "a.zip"))


def npz(file: Path, header: dict[str, Any], content: bytes) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("images.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, header)
        member.write(content)
    return file


@pytest.mark.parametrize(
    ("shape", "descr", "size", "reason"),
    [
        ((2**40, 8, 8), "|u1", 64, "its header says 70,368,744,177,664 bytes"),
        ((2**40, 2**40, 2**40), "|u1", 64, "its header says"),
        ((10**6, 8), "|u1", 8_000_000, "decompressed it has more than"),
        ((4, 8, 8), "|O", 64, "its header says|pickle|Object"),
    ],
)
def test_an_npz_file_that_claims_more_than_it_has_is_refused(tmp_path, small_limits, shape, descr, size, reason):
    file = npz(tmp_path / "a.npz", {"shape": shape, "fortran_order": False, "descr": descr}, bytes(size))
    with pytest.raises(ShoalError, match=rf"a\.npz.*({reason})"):
        load_data(images_of(file))


def test_a_label_cannot_make_a_model_of_a_trillion_classes(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 8, 8), np.uint8), labels=np.asarray([0, 1, 2, 10**12]))
    with pytest.raises(ShoalError, match="label 3 is 1000000000000, out of range"):
        load_data(images_of(tmp_path / "a.npz"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (struct.pack(">4I", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1), "its header says"),
        (gzip.compress(struct.pack(">4I", 0x803, 8, 1024, 1024) + bytes(8 << 20)), "decompressed it has more than"),
    ],
)
def test_an_idx_file_that_claims_more_than_it_has_is_refused(tmp_path, small_limits, content, reason):
    (tmp_path / "train").write_bytes(content)
    with pytest.raises(ShoalError, match=rf"train.*{reason}"):
        read_idx(tmp_path / "train", 0x803)


# --- Parquet, safetensors and indexes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_a_parquet_file_of_a_kilobyte_cannot_become_gigabytes(tmp_path, monkeypatch, nested):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    monkeypatch.setattr(parquet_files, "MOST_GROUP_BYTES", 64 << 20)
    texts = arrow.DictionaryArray.from_arrays(arrow.array([0] * 1000, arrow.int32()), arrow.array(["x" * (1 << 20)]))
    column = arrow.ListArray.from_arrays(arrow.array(range(1001), arrow.int32()), texts) if nested else texts
    parquet.write_table(arrow.table({"text": column}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 5000
    for place in (tmp_path / "a.parquet", tmp_path):
        for streaming in (True, False):
            with pytest.raises(ShoalError, match=r"a\.parquet is refused: a group of its rows becomes 1,0\d\d,"):
                load_splits(DataRequest(str(place), streaming), None)


def test_parquet_files_that_repeat_no_more_than_usual_are_read(tmp_path, monkeypatch):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet_files, "MOST_GROUP_BYTES", 1 << 20)
    texts = [f"a text of its own, number {number} " * (number % 30) for number in range(2000)]
    columns = {"text": texts, "label": ["yes", "no"] * 1000, "number": list(range(2000)), "tags": [["a", "b"]] * 2000}
    for options in ({}, {"use_dictionary": False}, {"compression": "zstd", "row_group_size": 100}):
        parquet.write_table(arrow.table(columns), tmp_path / "a.parquet", **options)
        check_parquet(tmp_path / "a.parquet")


def test_what_is_no_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    for content in (b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"\xff\xff\xff\x7fPAR1"):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(ShoalError, match=r"a\.parquet is no Parquet file"):
            check_parquet(tmp_path / "a.parquet")


def safetensors(header: bytes, body: bytes = b"", claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if claimed is None else claimed) + header + body


@pytest.mark.parametrize(
    "content",
    [
        safetensors(b"{}", claimed=2**63),
        safetensors(b"[" * 10_000),
        safetensors(b'{"a": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4398046511104]}}'),
        safetensors(b'{"a": {"dtype": "F32", "shape": [4294967296, 4294967296, 4], "data_offsets": [0, 0]}}'),
        safetensors(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', bytes(4)),
        safetensors(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}', bytes(4)),
    ],
)
def test_a_safetensors_header_that_lies_is_an_error_that_names_the_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ShoalError, match=r"model\.safetensors"):
        load_weights(tmp_path / "model.safetensors")
    with pytest.raises(ShoalError, match=r"model\.safetensors"):
        WeightStore.of_folder(tmp_path)


@pytest.mark.parametrize("start", [[2**45], [-4], ["a"], [0, 0], None])
def test_parts_of_a_tensor_that_do_not_fill_it_take_no_memory(tmp_path, start):
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for file, offset in zip(files, ([0], start), strict=True):
        info = json.dumps({"w": {"saved_offsets": offset}})
        save_file({"w": torch.ones(4)}, file, {"DCP_SHARDING_INFO": info})
    with pytest.raises(ShoalError, match=r"the parts of w do not fill it|is damaged"):
        ShardedTensors(files)["w"]


def test_an_index_of_vectors_that_is_of_another_kind_or_size_is_not_given_to_faiss(tmp_path):
    pytest.importorskip("faiss")
    passages = Passages(["one text", "another text"], np.asarray([0, 1], np.int32), ["a", "b"])
    index = build_index(passages, HashedWords(), tmp_path / "index", {})
    assert open_index(tmp_path / "index").digest == index.digest
    vectors, manifest = tmp_path / "index" / "vectors.faiss", tmp_path / "index" / "manifest.json"
    honest, fields = vectors.read_bytes(), json.loads(manifest.read_text())
    fields.pop("checksum", None)
    for content in (b"IwIV" + honest[4:], honest[:8] + struct.pack("<q", 2**50) + honest[16:], honest[:40], b""):
        vectors.write_bytes(content)
        fields["files"]["vectors.faiss"] = file_digest(vectors)
        manifest.write_text(json.dumps(fields))
        with pytest.raises(ShoalError, match=r"index .* is damaged"):
            open_index(tmp_path / "index")


# --- images that a coordinator sends ------------------------------------------------------------------------------------


def test_images_that_a_coordinator_sends_do_not_fill_the_disk(tmp_path, monkeypatch):
    chunk = bytes(100)
    listed = hashlib.sha256(chunk).digest()
    offer = ImageOffer.of([hashlib.sha256(listed).hexdigest(), 1, 100, ".zip"])
    sent = {0: listed, 1: chunk}
    monkeypatch.setattr(transfer, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(ShoalError, match="make room there"):
        fetch_images(offer, sent.get, tmp_path, None)
    monkeypatch.undo()
    assert fetch_images(offer, sent.get, tmp_path, None).read_bytes() == chunk


@pytest.mark.parametrize("size", [1, 3 * (4 << 20)])
def test_an_offer_of_images_cannot_name_fewer_bytes_than_its_pieces_have(size):
    with pytest.raises(ShoalError, match="invalid sizes"):
        ImageOffer.of(["0" * 64, 1 << 20, size, ".zip"])


def test_a_piece_of_images_is_no_larger_than_a_piece(tmp_path):
    chunk = bytes((4 << 20) + 1)
    listed = hashlib.sha256(chunk).digest()
    offer = ImageOffer.of([hashlib.sha256(listed).hexdigest(), 1, 100, ".zip"])
    with pytest.raises(ShoalError, match="was changed on its way"):
        fetch_images(offer, {0: listed, 1: chunk}.get, tmp_path, None)
