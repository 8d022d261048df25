"""Hundreds of damages over every kind of file that Shoal writes: the same tests as in every run of the suite, with more of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import test_damaged_files as files
from tests.runs.test_damaged_files import made  # noqa: F401

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("name", files.COMMANDS)
def test_hundreds_of_damages_are_recovered_exactly_or_refused_by_name(
    made: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setattr(files, "DAMAGES", 80)
    files.test_every_command_recovers_exactly_or_names_the_damaged_file(made, tmp_path, monkeypatch, capsys, name)


@pytest.mark.parametrize("name", files.ALONE)
def test_hundreds_of_flipped_bits_are_refused_by_name_or_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(files, "FLIPS", 1000)
    files.test_a_flipped_bit_in_a_file_is_refused_by_its_name_or_changes_nothing(tmp_path, name)
