"""A tokenizer keeps the files it came with, byte for byte: transformers reads the same tokenizer from what Shoal saves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shoal.data import load_tokenizer
from shoal.data.text.tokenizers.files import MOST_FILES, read_files, saved_files
from shoal.errors import ShoalError
from shoal.runs.welcome import unpack
from tests.support.chat_folders import FAMILIES, conversations, write_tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_saved_is_what_was_read_and_transformers_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = write_tokenizer(tmp_path / "source", name, in_config=name == "qwen25")
    (source / "special_tokens_map.json").write_text('{"additional_special_tokens":  []}')
    (source / "tokenizer.model").write_bytes(bytes(range(256)))
    if name != "qwen25":  # transformers ignores the configuration's template where a file holds another
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}\r\n")
    (source / "README.md").write_text("no part of a tokenizer")
    load_tokenizer(str(source)).save(tmp_path / "first")
    load_tokenizer(str(tmp_path / "first")).save(tmp_path / "saved")  # as a run saves it, and an export of the run
    found = {file: path.read_bytes() for file, path in saved_files(tmp_path / "saved").items()}
    assert found == {file: path.read_bytes() for file, path in saved_files(source).items() if file != "README.md"}
    assert {"tokenizer.model", "special_tokens_map.json"} < set(found)
    before, after = (AutoTokenizer.from_pretrained(str(tmp_path / place)) for place in ("source", "saved"))
    for messages in conversations(20, has_system=FAMILIES[name].has_system):
        assert after.apply_chat_template(messages) == before.apply_chat_template(messages)
        assert after(messages[0]["content"]) == before(messages[0]["content"])
        ours = load_tokenizer(str(tmp_path / "saved"))
        assert [*ours.opening, *ours.encode(messages[0]["content"])] == before(messages[0]["content"])["input_ids"]


def test_a_token_that_only_the_configuration_lists_is_added_as_transformers_adds_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = write_tokenizer(tmp_path, "chatml")
    config = json.loads((source / "tokenizer_config.json").read_text())
    size = load_tokenizer(str(source)).vocab_size
    for number, content in enumerate(["<tool_call>", "<|im_end|>", "</tool_call>"]):
        config.setdefault("added_tokens_decoder", {})[str(size + number)] = {"content": content, "special": number == 0}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(str(source)), AutoTokenizer.from_pretrained(str(source))
    text = "a <tool_call>b</tool_call> c<|im_end|>"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.vocab_size == size + 2


@pytest.mark.parametrize("adds", [True, False])
def test_a_text_begins_as_transformers_begins_it(adds: bool, tmp_path: Path) -> None:
    """The post-processor of tokenizer.json decides, whatever the configuration says."""
    from transformers import AutoTokenizer

    source = write_tokenizer(tmp_path, "llama3")
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": adds}))
    ours, theirs = load_tokenizer(str(source)), AutoTokenizer.from_pretrained(str(source))
    assert [*ours.opening, *ours.encode("a fox")] == theirs("a fox")["input_ids"]
    assert theirs.convert_ids_to_tokens(list(ours.opening)) == ["<|begin_of_text|>"]


def test_a_folder_in_gpt2s_style_is_kept_and_transformers_can_read_it(tmp_path: Path, shared_data: Path) -> None:
    from transformers import AutoTokenizer

    source = shared_data / "gpt2_tokenizer"
    load_tokenizer(str(source)).save(tmp_path)
    for file in ("vocab.json", "merges.txt"):
        assert (tmp_path / file).read_bytes() == (source / file).read_bytes()
    text = "Hello world, hello<|endoftext|>"
    assert AutoTokenizer.from_pretrained(str(tmp_path))(text)["input_ids"] == load_tokenizer(str(source)).encode(text)


def test_files_of_a_tokenizer_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tokenizer(tmp_path / "source", "chatml")
    (source / "vocab.json").mkdir()
    with pytest.raises(ShoalError, match=r"vocab\.json is a folder"):
        read_files(source)
    (source / "vocab.json").rmdir()
    (source / "additional_chat_templates").mkdir()
    for number in range(MOST_FILES):
        (source / "additional_chat_templates" / f"{number}.jinja").touch()
    with pytest.raises(ShoalError, match=f"holds {MOST_FILES} templates, and at most"):
        read_files(source)
    shutil.rmtree(source / "additional_chat_templates")
    monkeypatch.setattr("shoal.data.text.tokenizers.files.MOST_FILE_BYTES", 1000)
    with pytest.raises(ShoalError, match=r"tokenizer\.json is too large"):
        read_files(source)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "additional_chat_templates/../x", "additional_chat_templates/.x", ".x", ""])
def test_a_coordinators_files_stay_in_the_folder_of_the_tokenizer(name: str, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="impossible name"):
        unpack(tmp_path / "tokenizer", [name], [memoryview(b"x")])
    assert not list(tmp_path.rglob("x"))
    unpack(tmp_path / "tokenizer", ["additional_chat_templates/rag.jinja"], [memoryview(b"x")])
    assert saved_files(tmp_path / "tokenizer").keys() == {"additional_chat_templates/rag.jinja"}
