"""The conditions of `shoal join --when`: what must hold on this computer while a worker computes."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.launch.volunteer.cpu_load import OtherLoad
from shoal.launch.volunteer.idle_time import idle_source
from shoal.launch.volunteer.power import on_battery

FORMS = "idle, idle 10min, plugged-in, load, load 40%, 22:00-07:00"
IDLE_S = 300.0
"""A computer counts as idle this long after the last use of keyboard and mouse. BOINC takes three minutes."""
MOST_LOAD = 0.25
"""The share of the processors that other programs may use. BOINC takes the same."""
SETTLE_S = 30.0
"""A load must have been low for this long before the worker starts again, or it would stop and start with every short program."""
_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Sensors(NamedTuple):
    """What this computer reports, as functions, so that tests can give their own."""

    idle_s: Callable[[], float] | None
    """Seconds since the last use of keyboard or mouse; None: nothing here reports it."""
    on_battery: Callable[[], bool]
    other_load: Callable[[int | None], float]
    """The share of all processors that programs other than the process of this number and its children use."""
    minute_of_day: Callable[[], int]
    """Minutes since midnight in the time zone of this computer."""

    @classmethod
    def here(cls) -> Sensors:
        return cls(idle_source(), on_battery, OtherLoad().share, _minute_of_day)


def _minute_of_day() -> int:
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min


class Condition(ABC):
    """One condition."""

    settle_s = 0.0
    """How long it must have held before the worker starts again."""

    @abstractmethod
    def why_not(self, sensors: Sensors, pid: int | None) -> str:
        """Why the worker must not compute now; empty: it may. `pid`: the worker's process, if it runs. At most 32 characters."""

    def check(self, sensors: Sensors) -> None:
        """Raise ShoalError if this computer cannot tell whether the condition holds."""
        return


class Idle(Condition):
    """Keyboard and mouse have not been used for a while."""

    def __init__(self, after_s: float = IDLE_S) -> None:
        self.after_s = after_s

    def why_not(self, sensors: Sensors, pid: int | None) -> str:
        return "" if sensors.idle_s is not None and sensors.idle_s() >= self.after_s else "its computer is in use"

    def check(self, sensors: Sensors) -> None:
        if sensors.idle_s is None:
            raise ShoalError(
                "--when idle: nothing on this computer reports when it was last used (no display, and no logind); "
                "`--when load` runs the worker while other programs leave the processors free"
            )


class PluggedIn(Condition):
    """The computer has mains power. One without a battery always has."""

    def why_not(self, sensors: Sensors, pid: int | None) -> str:
        return "it runs on battery" if sensors.on_battery() else ""


class LowLoad(Condition):
    """Other programs leave the processors free."""

    settle_s = SETTLE_S

    def __init__(self, most: float = MOST_LOAD) -> None:
        self.most = most

    def why_not(self, sensors: Sensors, pid: int | None) -> str:
        share = sensors.other_load(pid)
        return f"other programs use {share:.0%} of CPUs" if share > self.most else ""

    def check(self, sensors: Sensors) -> None:
        sensors.other_load(None)


class Hours(Condition):
    """A time of the day, which may cross midnight."""

    def __init__(self, begin: int, end: int) -> None:
        """Minutes since midnight; `end` is the first minute that does not belong to it."""
        self.begin, self.end = begin, end

    def why_not(self, sensors: Sensors, pid: int | None) -> str:
        now = sensors.minute_of_day()
        within = self.begin <= now < self.end if self.begin < self.end else now >= self.begin or now < self.end
        return "" if within else f"not within {_clock(self.begin)}-{_clock(self.end)}"


class Conditions(NamedTuple):
    """All of them must hold."""

    conditions: tuple[Condition, ...]
    sensors: Sensors

    def why_not(self, pid: int | None = None) -> str:
        """Why the worker must not compute now: the first condition that does not hold; empty: it may."""
        return next((why for condition in self.conditions if (why := condition.why_not(self.sensors, pid))), "")

    def check(self) -> None:
        """Raise ShoalError if this computer cannot tell whether they hold."""
        for condition in self.conditions:
            condition.check(self.sensors)

    @property
    def settle_s(self) -> float:
        """How long they must have held before the worker starts again."""
        return max((condition.settle_s for condition in self.conditions), default=0.0)


def parse(texts: Sequence[str]) -> tuple[Condition, ...]:
    """The conditions in the values of `--when`. Raises ShoalError."""
    return tuple(_condition(part.strip()) for text in texts for part in re.split(r"\s+and\s+|\s*&\s*", text.strip()))


def _condition(text: str) -> Condition:
    if text == "plugged-in":
        return PluggedIn()
    if found := re.fullmatch(r"idle(?: (\d+(?:\.\d+)?) ?(s|min|h))?", text):
        return Idle(float(found[1]) * _UNITS_S[found[2]]) if found[1] else Idle()
    if found := re.fullmatch(r"load(?: (\d+(?:\.\d+)?) ?%)?", text):
        if found[1] and not 0 < float(found[1]) <= 100:
            raise ShoalError(f"--when {text}: the share of the processors is above 0 % and at most 100 %")
        return LowLoad(float(found[1]) / 100) if found[1] else LowLoad()
    if found := re.fullmatch(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", text):
        return _hours(text, *map(int, found.groups()))
    raise ShoalError(f"--when: `{text}` is no condition; there are {FORMS}, joined with `and`")


def _hours(text: str, hour: int, minute: int, end_hour: int, end_minute: int) -> Hours:
    begin, end = 60 * hour + minute, 60 * end_hour + end_minute
    if hour > 23 or minute > 59 or end_minute > 59 or end > 24 * 60:
        raise ShoalError(f"--when {text}: a time of the day is 00:00 to 23:59")
    if begin == end % (24 * 60):
        raise ShoalError(f"--when {text}: it ends when it begins; for the whole day leave it out")
    return Hours(begin, end)


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"
