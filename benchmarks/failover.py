"""`kill -9` of machines that hold layers while they answer: every text is what it would have been, and how long the longest pause is.

stories15M (or a random model of its size) on processes of this machine: five, of which one is a spare, since three with two layers each are
as quick as four; and four without a spare. SmolLM2-135M, where it is installed, once in a text of 512 tokens. With a spare, the pause may
be one and a half times what the lost layers take to read the text so far, and 0.3 s. `BENCH=failover:4` kills 4 times instead of 20, and a
quarter as often where there is no spare.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from run import Row
from serve import Model, models, serving

PROMPT = [1, 9038, 2501, 263, 931]
WRITTEN = 24
"""Tokens that are written before the machine is killed, and after it; what is missing to the length is prompt."""


def measure(kills: str = "20", only: str = "") -> Iterator[Row]:
    """`only`: the name of one model, as in `BENCH=failover:20:stories15M`."""
    with tempfile.TemporaryDirectory() as folder:
        for model in (one for one in models(Path(folder)) if only in ("", one.name)):
            whole = model.name == "stories15M"
            for count in (5, 4) if whole else (4,):
                for length in (60, 200) if whole else (512,):
                    # A process that is killed takes seconds to come back, and without a spare the pause is only told
                    often = int(kills) if count == 5 else max(1, int(kills) // 4)
                    yield killed(model, count, length, often if whole else 1)


class Killed(NamedTuple):
    """What came of killing machines of one server."""

    spare: bool
    allowed_s: float
    pauses_s: list[float]
    texts: set[str]
    """All that were written, and the one that was written before anybody was killed."""


def killed(model: Model, count: int, length: int, kills: int) -> Row:
    """Kill a machine with layers when the text has so many tokens, again and again, each of them in turn."""
    found: list[Killed] = []
    while (left := kills - sum(len(one.pauses_s) for one in found)) > 0:
        with serving(model.folder, count) as address:
            found.append(_kill(address, count, length, left))
        if not found[-1].pauses_s and len(found) > 20:
            raise SystemExit("no machine was killed: this machine is too busy for a measurement")
    pauses, allowed = [pause for one in found for pause in one.pauses_s], min(one.allowed_s for one in found)
    spare, texts = all(one.spare for one in found), set[str]().union(*(one.texts for one in found))
    note = f"{len(pauses)} kills, {len(texts) - 1} other texts, median {1000 * statistics.median(pauses):.0f} ms"
    shown = f"{model.name}, pause, killed after {length} tokens, {'a spare' if spare else 'no spare'}"
    return Row(shown, 1000 * max(pauses), 1000 * allowed, "ms", max(pauses) / allowed, "≤ 1" if spare else "told", note)


def _kill(address: str, count: int, length: int, kills: int) -> Killed:
    """Until a machine that came back was measured in a busy moment, and the server has all layers: then another server is started."""
    wanted, _ = answer(address, length)
    machines = all_machines(address, count)
    spare, holding = any(_is_spare(machine) for machine in machines), max(1, len(_holders(machines)))
    made = Killed(spare, 1.5 * _reading_s(address, length) / holding + 0.3, [], {wanted})
    for kill in range(kills):
        holders = _holders(all_machines(address, count))
        if not holders:
            break
        text, gaps = answer(address, length, _process(holders[kill % len(holders)]))
        made.texts.add(text)
        made.pauses_s.append(max(gaps[WRITTEN - 1 :]))
        print(f"    {holders[kill % len(holders)]} killed: {1000 * made.pauses_s[-1]:.0f} ms", file=sys.stderr, flush=True)
    return made


def answer(address: str, length: int, victim: int = 0) -> tuple[str, list[float]]:
    """The text, and the time between its tokens. Raises SystemExit where the request fails."""
    prompt = (PROMPT * length)[: length - WRITTEN]
    body = {"model": _name(address), "prompt": prompt, "max_tokens": 2 * WRITTEN, "temperature": 1.0, "seed": 7, "stream": True}
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
            if len(times) == WRITTEN and victim:
                os.kill(victim, signal.SIGKILL)
    return text, [after - before for before, after in pairwise(times)]


def _reading_s(address: str, length: int) -> float:
    """How long all layers take to read a text of this length."""
    body = {"model": _name(address), "prompt": (PROMPT * length)[:length], "max_tokens": 1, "temperature": 0}
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        httpx.post(f"{address}/v1/completions", json=body, timeout=60).raise_for_status()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _name(address: str) -> str:
    name: str = httpx.get(f"{address}/v1/models", timeout=60).json()["data"][0]["id"]
    return name


def all_machines(address: str, count: int) -> list[dict[str, Any]]:
    """What the server tells of its machines, once all of them are there again."""
    while True:
        told: list[dict[str, Any]] = httpx.get(f"{address}/v1/status", timeout=60).json()["machines"]
        alive = [machine for machine in told if machine["alive"]]
        if len(alive) == count:
            return alive
        time.sleep(0.05)


def _is_spare(machine: dict[str, Any]) -> bool:
    return machine["layers"][1] < machine["layers"][0] and not machine["has_ends"]


def _holders(machines: list[dict[str, Any]]) -> list[str]:
    """The names of the machines that hold layers, but for the server itself."""
    return [machine["name"] for machine in machines if machine["layers"][1] >= machine["layers"][0] and not machine["has_ends"]]


def _process(name: str) -> int:
    """The process of this bench's server that goes by that name."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            words = process.cmdline()
            if "--node" in words and name in words:
                return process.pid
    raise SystemExit(f"there is no process of {name}")
