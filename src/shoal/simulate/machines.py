"""The machines of a simulation: how fast each is, over which link it comes, and when it is there.

A weather is a way to draw them. A profile's name gives everybody that link; `mixed` is the world outside: links of all kinds, speeds with a
heavy tail, machines that are on by day, a crowd that comes at once, and sites that go dark.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.transports.netem.profiles import PROFILES, LinkProfile, profile

Stay = tuple[float, float]
CALM = LinkProfile(0.5, 0.0, 0.0, 1000)
"""A quiet network in one room."""
_MIXED = {"good": 0.45, "cellular": 0.25, "brownout": 0.15, "degraded": 0.1, "satellite": 0.05}
_SITES = 20
_DAY_S, _HOUR_S = 86_400.0, 3600.0


class SimulatedMachine(NamedTuple):
    """One worker's machine."""

    name: str
    step_s: float
    """Seconds that one batch takes on it, when nobody else computes there."""
    link: LinkProfile = CALM
    stays: tuple[Stay, ...] = ((0.0, math.inf),)
    """From when to when it is there, in virtual seconds; it disappears without a word."""
    site: str = ""
    """Machines of one site go dark together."""
    false: bool = False
    """Whether it sends the opposite of what it learned, ten times as large."""
    slowdown: float = 1.0
    """Its worker sleeps after each step, so that the step takes so many times as long. Nobody computes meanwhile."""
    start_s: float = 5.0
    """What it takes its worker to start, to read the data and to build the model."""
    host: str = ""
    """Machines of the same host share its cores; empty: it has cores of its own."""


def always_lit(moment: float) -> float:
    """For a site that is never dark."""
    return moment


class Weather(NamedTuple):
    """How machines and their links are in a simulation."""

    machines: tuple[SimulatedMachine, ...]
    dark: dict[str, tuple[Stay, ...]]
    """By site: when it is cut off."""
    cores: dict[str, float]
    """By host: how many cores its machines share."""
    others: float = 0.0
    """Processes of other people that compute on each host all the time."""

    def lights_on(self, site: str) -> Callable[[float], float]:
        """A function that puts a moment off to the end of the time in which the site is dark."""
        spans = self.dark.get(site, ())
        if not spans:
            return always_lit

        def after(moment: float) -> float:
            for start, end in spans:
                if start <= moment < end:
                    return end
            return moment

        return after


def weather_named(name: str, count: int, step_s: float, hours: float, seed: int, false_share: float = 0.0) -> Weather:
    """So many machines in the weather of this name. Raises ShoalError where there is none."""
    dice = random.Random(f"{seed} {name} {count}")
    if name == "mixed":
        machines, dark = _mixed(count, step_s, hours, dice)
    elif name == "straggler":
        slow = [step_s * (10.0 if number == 0 else 1.0) for number in range(count)]
        machines, dark = [SimulatedMachine(f"w{number + 1}", one, PROFILES["good"]) for number, one in enumerate(slow)], {}
    else:
        link = CALM if name == "calm" else _profile(name)
        machines, dark = [SimulatedMachine(f"w{number + 1}", step_s, link) for number in range(count)], {}
    for number in dice.sample(range(count), round(false_share * count)):
        machines[number] = machines[number]._replace(false=True)
    return Weather(tuple(machines), dark, {})


def _profile(name: str) -> LinkProfile:
    try:
        return profile(name)
    except ShoalError:
        names = ", ".join(["calm", "mixed", "straggler", *PROFILES])
        raise ShoalError(f"`{name}` is no weather we know: {names}, or a rate such as 50mbit") from None


def _mixed(count: int, step_s: float, hours: float, dice: random.Random) -> tuple[list[SimulatedMachine], dict[str, tuple[Stay, ...]]]:
    span_s, sites = hours * _HOUR_S, [f"site-{number}" for number in range(_SITES)]
    zones = {site: dice.randrange(24) for site in sites}
    crowd_at = dice.uniform(0.2, 0.8) * span_s
    links = dice.choices([*_MIXED], [*_MIXED.values()], k=count)
    machines = []
    for number in range(count):
        site = dice.choice(sites)
        habit = dice.choices(["always", "day", "crowd"], [0.5, 0.3, 0.2])[0]
        stays = {
            "always": ((dice.uniform(0, min(600.0, 0.1 * span_s)), math.inf),),
            "day": _days(span_s, zones[site], dice),
            "crowd": ((crowd_at + dice.uniform(0, min(600.0, 0.1 * span_s)), math.inf),),
        }[habit]
        machines.append(SimulatedMachine(f"w{number + 1}", step_s * dice.lognormvariate(0, 0.6), PROFILES[links[number]], stays, site))
    return machines, {site: _darkness(span_s, dice) for site in sites}


def _days(span_s: float, zone: int, dice: random.Random) -> tuple[Stay, ...]:
    """From about eight in the morning to about ten at night, by the clock of the site."""
    first = -zone * _HOUR_S
    days = range(math.ceil((span_s - first) / _DAY_S) + 1)
    spans = [(first + day * _DAY_S + dice.gauss(8, 1) * _HOUR_S, first + day * _DAY_S + dice.gauss(22, 1) * _HOUR_S) for day in days]
    return tuple((max(0.0, start), end) for start, end in spans if end > 0 and start < span_s)


def _darkness(span_s: float, dice: random.Random) -> tuple[Stay, ...]:
    """Of three sites one is cut off once, for up to an hour."""
    if dice.random() > 1 / 3:
        return ()
    start = dice.uniform(0, span_s)
    return ((start, start + dice.uniform(60.0, min(3600.0, max(61.0, 0.2 * span_s)))),)


def weather_of(machines: Sequence[SimulatedMachine], cores: dict[str, float] | None = None) -> Weather:
    """The weather of machines that are known one by one."""
    return Weather(tuple(machines), {}, dict(cores or {}))
