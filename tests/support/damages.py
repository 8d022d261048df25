"""Damages of files: a flipped bit, an end that is cut off, other content, or something that is no file in its place."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LONGEST_S = 60
"""A command that takes longer waits for ever."""


def flip(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at, bit = chance.randrange(len(content)), chance.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at} of {len(content)} flipped in {path.name}"


def cut(path: Path, chance: random.Random) -> str:
    content = path.read_bytes()
    at = chance.randrange(len(content))
    path.write_bytes(content[:at])
    return f"{path.name} cut off after {at} of {len(content)} bytes"


def overwrite(path: Path, chance: random.Random) -> str:
    path.write_bytes(chance.choice([b"", b"\0" * 100, b"[]", b'{"format": 1}', b"\xff\xfe" * 50, b"[" * 100_000]))
    return f"{path.name} overwritten"


def pipe(path: Path, chance: random.Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return f"a named pipe in the place of {path.name}"


def folder(path: Path, chance: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return f"a folder in the place of {path.name}"


def remove(path: Path, chance: random.Random) -> str:
    path.unlink()
    return f"{path.name} removed"


KINDS: tuple[Callable[[Path, random.Random], str], ...] = (flip, flip, flip, cut, cut, overwrite, pipe, folder)


def damaged(path: Path, chance: random.Random, kinds: tuple[Any, ...] = KINDS) -> str:
    """Damage a file. Return what was done."""
    return str(chance.choice(kinds)(path, chance))


@contextmanager
def no_hang(what: str) -> Iterator[None]:
    """Fail where the work does not end."""

    def late(*_: Any) -> None:
        raise AssertionError(f"{what}: it waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
