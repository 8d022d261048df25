"""`kill -9` of machines that hold layers while they answer: every text is what it would have been, and how long the longest pause is.

stories15M (or a random model of its size) on processes of this machine: with 4 of them one is a spare, with 3 none is. The pause may be one
and a half times what the lost layers take to read the text so far, and 0.3 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from run import Row

from serve import serving, stories

KILLS, LENGTHS = 20, (60, 200)
PROMPT = [1, 9038, 2501, 263, 931]


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        made = stories(Path(folder) / "stories")
        for count, spare in ((4, "a spare"), (3, "no spare")):
            with serving(made, count) as address:
                for length in LENGTHS:
                    yield killed(address, count, length, spare)


def killed(address: str, count: int, length: int, spare: str) -> Row:
    """Kill a node after so many tokens, again and again, each of them in turn."""
    wanted, _ = answer(address, length + 40)
    pauses, wrong = [], 0
    for kill in range(KILLS):
        there = _all_nodes(count)
        text, gaps = answer(address, length + 40, length, there[kill % len(there)])
        wrong += text != wanted
        pauses.append(max(gaps[length - 1 :]))
    allowed = 1.5 * _reading_s(address, length) / (count - 1 if spare == "a spare" else count) + 0.3
    note = f"{KILLS} kills, {wrong} texts differ"
    return Row(
        f"pause, killed after {length} tokens, {spare}", 1000 * max(pauses), 1000 * allowed, "ms", max(pauses) / allowed, "≤ 1", note
    )


def answer(address: str, tokens: int, kill_at: int = -1, victim: int = 0) -> tuple[str, list[float]]:
    """The text, and the time between its tokens. Raises SystemExit where the request fails."""
    body = {"model": "stories", "prompt": PROMPT, "max_tokens": min(tokens, 250), "temperature": 1.0, "seed": 7, "stream": True}
    text, times = "", list[float]()
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in piece:
                raise SystemExit(f"a request failed: {piece}")
            text += "".join(choice["text"] for choice in piece["choices"])
            times.append(time.perf_counter())
            if len(times) == kill_at:
                os.kill(victim, signal.SIGKILL)
    return text, [after - before for before, after in pairwise(times)]


def _reading_s(address: str, length: int) -> float:
    """How long all layers take to read a text of this length."""
    body = {"model": "stories", "prompt": (PROMPT * length)[:length], "max_tokens": 1, "temperature": 0}
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        httpx.post(f"{address}/v1/completions", json=body, timeout=60).raise_for_status()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _all_nodes(count: int) -> list[int]:
    """The processes that hold layers for the server of this bench, once all of them are back and have joined."""
    while True:
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                found += [process.pid] if "--node" in process.cmdline() else []
        if len(found) == count - 1:
            return sorted(found)
        time.sleep(0.05)
