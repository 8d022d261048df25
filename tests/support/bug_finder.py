"""Looks for schedules that break a promise: draws hostile ones by seed, lives through them, and shrinks one that fails to a short story.

A schedule is a list of things that happen (`World.happen`): workers act, messages arrive, are lost or doubled, workers and the
coordinator die at any effect, the disk fails, clocks jump, snapshots are taken. After each, the promises are checked (`World.check`,
`check_patience`, `check_same`). A seed gives the same schedule for ever, so whatever is found can be replayed.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from tests.support.fault_schedules import DISK, LIKELY, STRATEGIES, WRONG, live_through

Step = tuple[str, int]
TOLD = {
    "go": "{who} speaks with the coordinator, and all is well",
    "act": "{who} hears its answer, and puts its next question on its way",
    "deliver": "message {number} of those under way arrives",
    "double": "message {number} of those under way arrives, and stays under way",
    "lose": "message {number} of those under way is lost",
    "again": "{who} has waited in vain, and asks again",
    "die": "{who} dies, and starts anew",
    "leave": "{who} says goodbye, and starts anew",
    "crash": "the coordinator will die after {number} effects of its next event",
    "snapshot": "the coordinator takes a snapshot",
    "full": "the disk is full: it does not take the records of the next {few} events that have any, and the coordinator dies of each",
    "half": "the disk takes a new journal and half of a snapshot, and the coordinator dies",
    "spoil": "the newest snapshot cannot be read, and the coordinator comes back from the one before it",
    "rest": "for a minute {who} gives signs of life, and nothing else, while the others work",
    "time": "time passes: {seconds:g} s",
}
SECONDS = (0.1, 1.0, 4.0, 6.0, 11.0, 40.0, -30.0)


class Case(NamedTuple):
    """A strategy, its workers, and what happens to them."""

    strategy: str
    workers: int
    steps: int
    schedule: tuple[Step, ...]

    def broken(self) -> str:
        """The promise that this breaks; empty: none."""
        try:
            live_through(self.strategy, list(self.schedule), self.workers, self.steps)
        except Exception as problem:  # whatever goes wrong is a find
            return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else _line_of(problem)}"
        return ""

    def story(self) -> str:
        """What happens, for people."""
        lines = [f"strategy {self.strategy}, {self.workers} workers, {'4 versions' if self.steps == 4 else 'no end'}:"]
        for kind, number in self.schedule:
            who, seconds = f"w{number % self.workers}", SECONDS[number % 7]
            lines.append("  " + TOLD[kind].format(who=who, number=number, seconds=seconds, few=1 + number % 3))
        return "\n".join([*lines, f"  then the weather clears, and: {self.broken()}"])


def _line_of(problem: Exception) -> str:
    """The line that failed, for a promise without words."""
    return traceback.extract_tb(problem.__traceback__)[-1].line or ""


class Found(NamedTuple):
    """A case that breaks a promise, as short as it got, and how many schedules were tried before."""

    case: Case
    seed: int
    tried: int


def drawn(seed: int) -> Case:
    """A hostile case, the same for the same seed."""
    dice = random.Random(seed)
    length = dice.choice((12, 25, 50, 100))
    schedule = tuple((dice.choice(LIKELY + WRONG + DISK), dice.randrange(12)) for _ in range(length))
    return Case(dice.choice([*STRATEGIES]), dice.randint(1, 4), dice.choice((4, 10**6)), schedule)


def look(first: int, longest_s: float, most: int = 10**9) -> Found | int:
    """Try one seed after the other. Return the first find, shrunk, or how many were tried."""
    until, tried = time.monotonic() + longest_s, 0
    while time.monotonic() < until and tried < most:
        case = drawn(first + tried)
        tried += 1
        if case.broken():
            return Found(shrunk(case, until), first + tried - 1, tried)
    return tried


def shrunk(case: Case, until: float) -> Case:
    """A shorter case that also breaks a promise: parts of the schedule are left out, large ones first, then numbers are made small."""
    size = max(1, len(case.schedule) // 2)
    while size >= 1 and time.monotonic() < until:
        shorter = _without_parts(case, size, until)
        size = size // 2 if len(shorter.schedule) == len(case.schedule) else min(size, max(1, len(shorter.schedule) // 2))
        case = shorter
    return _smaller(case, until)


def _without_parts(case: Case, size: int, until: float) -> Case:
    at = 0
    while at < len(case.schedule) and time.monotonic() < until:
        shorter = case._replace(schedule=case.schedule[:at] + case.schedule[at + size :])
        if shorter.broken():
            case = shorter
        else:
            at += size
    return case


def _smaller(case: Case, until: float) -> Case:
    """Fewer workers, and smaller numbers."""
    changes: list[Callable[[Case], Case]] = [lambda case, count=count: case._replace(workers=count) for count in range(1, case.workers)]
    for change in changes:
        if time.monotonic() < until and (smaller := change(case)).broken():
            return smaller
    return case
