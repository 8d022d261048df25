"""YAML with positions: YAML 1.2's words and numbers, bounded cost, and nothing but problems for bad input."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.load import ConfigFile, resolve
from shoal.config.problems import Problem
from shoal.config.source_span import SourceText
from shoal.config.text import YamlNode, data_of, interpolate, parse, read


def parsed(text: str) -> tuple[Any, list[Problem]]:
    problems: list[Problem] = []
    root = parse(text, SourceText("test.yaml", text), problems.append)
    return (data_of(root) if root else None), problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6e-4", 6e-4),
        ("3e-5", 3e-5),
        ("5e8", 5e8),
        ("1.0e-04", 1e-4),
        (".5", 0.5),
        ("1.", 1.0),
        ("-7", -7),
        ("0x1F", 31),
        ("0o17", 15),
        ("no", "no"),
        ("off", "off"),
        ("yes", "yes"),
        ("on", "on"),
        ("y", "y"),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("08", "08"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-05-24", "2024-05-24"),
        ("1e", "1e"),
        ("'5'", "5"),
        ('"true"', "true"),
        ("!!str 5", "5"),
        (".inf", float("inf")),
        ("[1, two, null]", [1, "two", None]),
    ],
)
def test_words_and_numbers_are_those_of_yaml_1_2(text: str, value: object) -> None:
    data, problems = parsed(f"key: {text}\n")
    assert not problems
    assert data == {"key": value}
    assert type(data["key"]) is type(value)


def test_positions_are_of_the_text() -> None:
    text = "a:\n  b: 12\n  c: [x,  yy]\n  d: 'q'\n"
    root = parse(text, SourceText("t", text), lambda problem: None)
    assert root is not None
    section = root.get("a")
    assert section is not None
    spans = {name: entry.value.span[1:] for name, entry in section.value.items()}
    assert spans["b"] == (2, 6, 2)
    assert spans["d"] == (4, 6, 3)
    assert section.value["c"].value.value[1].span[1:] == (3, 11, 2)
    assert section.value["b"].key[1:] == (2, 3, 1)
    assert section.value["c"].value.value[1].user_path == "a.c[1]"


def test_merge_keys_and_aliases_copy() -> None:
    data, problems = parsed("base: &base {a: 1, b: 2}\nuse:\n  <<: *base\n  b: 3\nagain: *base\n")
    assert not problems
    assert data["use"] == {"a": 1, "b": 3}
    assert data["again"] == {"a": 1, "b": 2}


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a: 1\na: 2\n", "duplicate-key"),
        ("a:\n\tb: 1\n", "syntax"),
        ("a: [1, 2\n", "syntax"),
        ("a: b: c\n", "syntax"),
        ("- 1\n- 2\n", "wrong-type"),
        ("just words\n", "wrong-type"),
        ("", "empty-file"),
        ("# only a comment\n", "empty-file"),
        ("a: 1\n---\nb: 2\n", "many-documents"),
        ("a: &x [*x]\n", "bad-alias"),
        ("a: *nobody\n", "bad-alias"),
        ("a: !!python/object:os.system {}\n", "bad-tag"),
        ("a: !custom 1\n", "bad-tag"),
        ("? [a, b]\n: 1\n", "bad-key"),
        ("a: " + "[" * 100 + "]" * 100, "too-deep"),
        (BOMB, "too-many-values"),
        ("a: \x07\n", "syntax"),
    ],
)
def test_bad_text_is_a_problem_with_a_place(text: str, code: str) -> None:
    _, problems = parsed(text)
    assert code in [problem.code for problem in problems]
    assert problems[0].labels


@pytest.mark.parametrize(
    "text", ["[" * 500_000, "{a: " * 250_000, "- " * 250_000, "? " * 250_000, "&a " * 250_000, "a: " + "x" * 900_000, BOMB]
)
def test_hostile_text_costs_little(text: str) -> None:
    tracemalloc.start()
    start = time.process_time()
    parsed(text)
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 60  # of this process; what grows with the square of the size takes hours
    assert peak < 300 << 20


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "huge.yaml"
    with file.open("wb") as stream:
        stream.truncate(50 << 20)
    tracemalloc.start()
    problems: list[Problem] = []
    assert read(str(file), problems.append) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [problem.code for problem in problems] == ["too-large"]
    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\x00\x01\x02", "binary-file"),
        (b"a: caf\xe9\n", "not-utf8"),
        (b"\xff\xfea\x00:\x00", "binary-file"),
        (b"\x89PNG\r\n\x1a\n\x00", "binary-file"),
        (b"", "empty-file"),
    ],
)
def test_bad_files_are_problems(content: bytes, code: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    problems: list[Problem] = []
    assert read(str(file), problems.append) is None
    assert [problem.code for problem in problems] == [code]
    assert problems[0].labels[0].span.source.name == str(file)


def test_missing_files_and_folders_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    problems: list[Problem] = []
    read(str(tmp_path / "confg.yaml"), problems.append)
    read(str(tmp_path), problems.append)
    read(str(tmp_path / "no" / "x.yaml"), problems.append)
    read("nul\0byte", problems.append)
    assert [problem.code for problem in problems] == ["missing-file", "not-a-file", "missing-file", "unreadable-file"]
    assert "config.yaml" in problems[0].help
    assert "config.yaml" in problems[1].help


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "bom.yaml"
    file.write_bytes(b"\xef\xbb\xbfseed: 1\r\nlog_level: DEBUG\r\n")
    run = resolve([ConfigFile(str(file))], environ={}).run
    assert (run.seed, run.log_level) == (1, "DEBUG")


# --- variables ---------------------------------------------------------------------------------


def expanded(text: str, environ: dict[str, str]) -> tuple[Any, list[str]]:
    problems: list[Problem] = []
    root = parse(f"key: {text}\n", SourceText("t", f"key: {text}\n"), problems.append)
    assert root is not None
    data = data_of(interpolate(root, environ, problems.append))
    return data["key"], [problem.code for problem in problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${A}", "x"),
        ("${N}", 5),
        ("'${N}'", "5"),
        ("pre-${A}-post", "pre-x-post"),
        ("${NONE:-7}", 7),
        ("${NONE:-}", None),
        ("${EMPTY:-full}", "full"),
        ("${A:-y}", "x"),
        ("${A:?needed}", "x"),
        ("$${A}", "${A}"),
        ("$A", "$A"),
        ("${A}${N}", "x5"),
        ("[a, '${A}']", ["a", "x"]),
        ("{b: '${A}'}", {"b": "x"}),
        ("${EMPTY}", None),
    ],
)
def test_variables(text: str, value: object) -> None:
    assert expanded(text, {"A": "x", "N": "5", "EMPTY": ""}) == (value, [])


def test_unset_and_broken_variables_are_problems() -> None:
    assert expanded("${NONE}", {})[1] == ["unset-variable"]
    assert expanded("${NONE:?ask the teacher}", {})[1] == ["unset-variable"]
    assert expanded("a${1}", {})[1] == ["bad-variable"]
    assert expanded("${OPEN", {})[1] == ["bad-variable"]


@given(
    st.dictionaries(st.from_regex(r"[A-Z_]{1,3}", fullmatch=True), st.text(max_size=8), max_size=4),
    st.text(alphabet="${}ABC:-?x ", max_size=20),
)
def test_expansion_ends_and_never_expands_what_it_inserted(environ: dict[str, str], text: str) -> None:
    problems: list[Problem] = []
    node = YamlNode(text, SourceText("t", text).whole(), raw=text)
    value = interpolate(node, environ, problems.append).value
    assert isinstance(value, str)
    if "${" not in text:
        assert value == text


# --- fuzz --------------------------------------------------------------------------------------

YAMLISH = st.text(alphabet=st.sampled_from(list("abk: \n-[]{},#&*!|>'\"%@`?~0123456789.eE+_$\t\r\x00\x85\u2028é😀")), max_size=120)


@settings(max_examples=600)
@given(YAMLISH | st.text(max_size=60))
def test_no_text_raises(text: str) -> None:
    parsed(text)


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_no_bytes_raise(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_bytes(content)
    loaded = resolve([ConfigFile(str(file))], environ={})
    assert loaded.problems or loaded.ok


KEYS = st.sampled_from(
    [
        "model",
        "training",
        "kind",
        "batch_size",
        "strategy",
        "data",
        "source",
        "engine",
        "dialect",
        "workers",
        "name",
        "port",
        "optimizer",
        "x",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["mlp", "async", "gpt", "ava", "${X}", "08", "+-1", "0²", "1__0", ""])
    | st.text(max_size=5)
)
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12)


@settings(max_examples=60)
@given(st.dictionaries(KEYS, TREES, max_size=5))
def test_no_tree_raises(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    import yaml

    file = tmp_path_factory.getbasetemp() / "tree.yaml"
    file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8", errors="surrogatepass")
    for dialect in (None, "shoal", "ava", "smolcluster", "dist-llm-train"):
        loaded = resolve([ConfigFile(str(file))], dialect=dialect, environ={})
        assert loaded.ok or all(problem.message for problem in loaded.problems)
