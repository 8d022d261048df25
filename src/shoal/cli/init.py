"""`shoal init`: writes a commented configuration."""

from __future__ import annotations

import argparse
import os

from shoal import ShoalError
from shoal.config import presets
from shoal.config.fields import did_you_mean
from shoal.config.load import DEFAULT_FILE
from shoal.config.presets import find, names
from shoal.files import writing


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("shoal init", description="Write a configuration to start from.")
    parser.add_argument("file", nargs="?", default=DEFAULT_FILE, help=f"file to write (default: {DEFAULT_FILE})")
    parser.add_argument("--preset", default="starter", metavar="NAME", help="preset to write (default: starter)")
    parser.add_argument("--list", action="store_true", help="list the presets")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    arguments = parser.parse_args(argv)
    if arguments.list:
        print("\n".join(f"{name:<40} {_title(name)}" for name in names()))
        return 0
    path = find(arguments.preset)
    if path is None:
        raise ShoalError(f"no preset `{arguments.preset}`. {did_you_mean(arguments.preset, names())} `shoal init --list` names them all.")
    with open(path, encoding="utf-8") as preset:
        write(arguments.file, preset.read(), force=arguments.force)
    print(f"wrote {arguments.file} (preset {arguments.preset}); next: shoal config check {arguments.file}")
    if (first := _first_run_beside(path)) is not None:
        print(f"to see such a file learn in two minutes, and from your own text: shoal init --preset {first} first-run.yaml")
    return 0


def _first_run_beside(path: str) -> str | None:
    """The preset of the same shape that learns visibly on one machine; None: there is none, or it is this one."""
    own = os.path.splitext(os.path.relpath(path, os.path.dirname(presets.__file__)))[0].replace(os.sep, "/")
    first = os.path.dirname(own) + "/first-run"
    return first if first != own and first in names() else None


def write(path: str, text: str, *, force: bool) -> None:
    """Write a file; an existing one only with `force`."""
    if os.path.exists(path) and not force:
        raise ShoalError(f"{path} exists already; --force overwrites it, or name another file")
    with writing(path), open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _title(name: str) -> str:
    path = find(name)
    assert path
    with open(path, encoding="utf-8") as preset:
        return preset.readline().lstrip("# ").strip()
