"""Names of workers: what people call their computers is taken, and nothing that is more than a name."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.join_options import chosen_name
from shoal.errors import ShoalError
from shoal.protocol.messages import BadMessage, Join, header_of, parse
from shoal.protocol.worker_names import is_worker_name, name_of, with_ending
from shoal.runs.connections import JoinOptions
from shoal.transports.postgres import enrolment
from tests.support.postgres_server import Database

GOOD = ("ann", "anna's mac", "Anna’s MacBook Pro (2)", "Büro-PC", "3090", "老师的电脑", "מחשב של דנה", "कंप्यूटर", "a.b_c-d+e", "x" * 64)
BAD = (
    *("", " ann", "ann ", "ann.", "two  spaces", "../ann", "a/b", "a\\b", "..", ".hidden", "-rf", "x" * 65, "ü" * 33),
    *("a\nb", "a\x1b[2Jb", "a\0b", "a\x7fb", "a\x9bb", "a\ud800b", "a\u202eb", "a\u2066b", "a\u200bb", "a\u200fb", "a\u00a0b", "a\ufeffb"),
    *(
        "<b>a</b>",
        "[red]a[/red]",
        'a"b',
        "a`b`",
        "$(a)",
        "a;b",
        "a|b",
        "a&b",
        "a=b",
        "a,b",
        "a:b",
        "a*b",
        "a?b",
        "a%sb",
        "{a}",
        "a#b",
        "a@b",
    ),
    *("\u3164", "a\ufe0fb", "a\u0301\u0301\u0301\u0301", "e\u0301", "\u0301a", "a\ue000b", "a\U000e0041b"),
)

_LAST = 0x20000
"""Characters after this one are rare ideographs, tags and private ones."""


@pytest.mark.parametrize("name", GOOD)
def test_what_people_call_their_computers_is_a_name(name: str, tmp_path: Path) -> None:
    assert is_worker_name(name)
    assert parse(header_of(Join(name, 5, {}, "", "ab" * 32))).name == name
    file = JoinOptions("", "token", None, name=name, state=tmp_path).key_file(name)
    file.write(JoinOptions("", "token", None).own_key())
    assert file.read() is not None
    assert file.path.parent == tmp_path
    assert (tmp_path / f"{name}.jsonl").parent == tmp_path
    assert is_worker_name(with_ending(name, "-12"))


@pytest.mark.parametrize("name", BAD)
def test_what_is_more_than_a_name_is_refused_and_the_rule_is_shown(name: str) -> None:
    assert not is_worker_name(name)
    with pytest.raises(BadMessage, match="letters and digits of any script"):
        parse(header_of(Join(name, 5, {}, "", "ab" * 32)))
    if not name_of(name):
        with pytest.raises(ShoalError, match="letters and digits of any script") as refused:
            chosen_name(name)
        assert str(refused.value).isprintable(), "the message that quotes it steers no terminal"


def test_no_letter_that_is_allowed_can_steer_a_screen_or_name_another_file() -> None:
    allowed = [chr(code) for code in range(_LAST) if is_worker_name(f"a{chr(code)}a")]
    assert len(allowed) > 50_000
    assert {letter for letter in allowed if letter < "\x80" and not letter.isalnum()} == set(" ._-'()+")
    assert all(letter.isprintable() and unicodedata.category(letter)[0] in "LNM" for letter in allowed if letter not in " ._-'’()+")


def letters() -> Iterator[str]:
    """Characters but surrogates and NUL, which no text in PostgreSQL has: all of most scripts, and some of those with thousands."""
    return (chr(code) for code in (*range(1, 0x3200), *range(0x3200, _LAST, 97)) if not 0xD800 <= code < 0xE000)


def test_a_database_takes_what_is_a_name_and_nothing_that_steers_a_screen(database: Database) -> None:
    with database.connect() as connection:
        query = "SELECT shoal.is_worker_name(n) FROM unnest(%s::text[]) WITH ORDINALITY AS u (n, i) ORDER BY i"
        bad = [name for name in BAD if "\0" not in name and "\ud800" not in name]
        found = [row[0] for row in connection.execute(query, ([*GOOD, *bad],)).fetchall()]
        assert found[: len(GOOD)] == [True] * len(GOOD)
        finer = ("a\u0301\u0301\u0301\u0301", "e\u0301", "\u0301a")  # this needs Unicode's tables; the coordinator refuses what comes of it
        assert [name for name, taken in zip(bad, found[len(GOOD) :], strict=True) if taken] == list(finer)
        every = [f"a{letter}a" for letter in letters()]
        taken = {name for name, (fits,) in zip(every, connection.execute(query, (every,)).fetchall(), strict=True) if fits}
    assert {name for name in every if is_worker_name(name)} <= taken
    steering = [name for name in taken if unicodedata.category(name[1]) in ("Cc", "Cf", "Zl", "Zp", "Zs", "Co") and name[1] != " "]
    assert steering == []


def test_a_student_with_such_a_name_has_a_role_of_plain_letters() -> None:
    assert [enrolment._role_part(name) for name in ("anna's mac", "Büro-PC", "老师的电脑", None)] == ["anna-s-mac", "b-ro-pc", None, None]


@pytest.mark.parametrize(
    ("typed", "name"), [("\n", "lab-7"), ("  anna's mac \n", "anna's mac"), ("../x\n[red]\nbo\n", "bo"), ("Bu\u0308ro\n", "B\u00fcro")]
)
def test_a_terminal_is_asked_for_a_name_until_it_is_one(
    typed: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO(typed)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("platform.node", lambda: "lab-7")
    assert chosen_name(None) == name
    asked = capsys.readouterr().err
    assert asked.startswith("this computer's name in the run [lab-7]: ")
    assert asked.count("letters and digits of any script") == typed.count("\n") - 1, "the rule is shown with every refusal"
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert chosen_name(None) is None, "nobody is there to be asked"
