"""The machines of a simulation: the speed and the link of each, and the times when it takes part.

A weather is a named distribution of machines. The name of a link profile gives all machines that link. `mixed` resembles volunteers: links
of all kinds, log-normal speeds, machines that are on by day, many that join within minutes, and sites with outages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.transports.netem.profiles import PROFILES, LinkProfile, profile

TimeSpan = tuple[float, float]
"""Start and end, in virtual seconds."""
CALM = LinkProfile(0.5, 0.0, 0.0, 1000)
"""A local network without loss."""
_MIXED = {"good": 0.45, "cellular": 0.25, "brownout": 0.15, "degraded": 0.1, "satellite": 0.05}
_SITES = 20
_DAY_S, _HOUR_S = 86_400.0, 3600.0


class SimulatedMachine(NamedTuple):
    """One worker's machine."""

    name: str
    step_s: float
    """Seconds per batch, with a core of its own."""
    link: LinkProfile = CALM
    stays: tuple[TimeSpan, ...] = ((0.0, math.inf),)
    """When it takes part. At the end of a stay it disappears without a message."""
    site: str = ""
    """Machines of one site have the same outages."""
    false: bool = False
    """Whether its updates are negated and ten times as large."""
    slowdown: float = 1.0
    """Its worker sleeps after each step, so that the step takes this many times as long. It uses no core meanwhile."""
    start_s: float = 5.0
    """Seconds until its worker has started, read the data and built the model."""
    host: str = ""
    """Machines of the same host share its cores; empty: cores of its own."""


def no_outage(moment: float) -> float:
    """`Weather.outages` of a site that has none."""
    return moment


class Weather(NamedTuple):
    """Machines, links and outages of a simulation."""

    machines: tuple[SimulatedMachine, ...]
    site_outages: dict[str, tuple[TimeSpan, ...]]
    """By site: when it is disconnected."""
    cores: dict[str, float]
    """By host: number of cores that its machines share."""
    others: float = 0.0
    """Unrelated processes that always compute on each host."""

    def outages(self, site: str) -> Callable[[float], float]:
        """A function that maps a moment in an outage of the site to the end of that outage, and any other moment to itself."""
        spans = self.site_outages.get(site, ())
        if not spans:
            return no_outage

        def after(moment: float) -> float:
            for start, end in spans:
                if start <= moment < end:
                    return end
            return moment

        return after


def weather_named(name: str, count: int, step_s: float, hours: float, seed: int, false_share: float = 0.0) -> Weather:
    """`count` machines of the named distribution. Raises ShoalError for an unknown name."""
    rng = random.Random(f"{seed} {name} {count}")
    if name == "mixed":
        machines, outages = _mixed(count, step_s, hours, rng)
    else:
        link = CALM if name == "calm" else _profile("good" if name == "straggler" else name)
        machines, outages = [SimulatedMachine(f"w{number + 1}", step_s, link) for number in range(count)], {}
        if name == "straggler":
            machines[0] = machines[0]._replace(step_s=10 * step_s)
    for number in rng.sample(range(count), round(false_share * count)):
        machines[number] = machines[number]._replace(false=True)
    return Weather(tuple(machines), outages, {})


def _profile(name: str) -> LinkProfile:
    try:
        return profile(name)
    except ShoalError:
        names = ", ".join(["calm", "mixed", "straggler", *PROFILES])
        raise ShoalError(f"`{name}` is no known weather: {names}, or a rate such as 50mbit") from None


def _mixed(count: int, step_s: float, hours: float, rng: random.Random) -> tuple[list[SimulatedMachine], dict[str, tuple[TimeSpan, ...]]]:
    span_s, sites = hours * _HOUR_S, [f"site-{number}" for number in range(_SITES)]
    zones = {site: rng.randrange(24) for site in sites}
    joining_at = rng.uniform(0.2, 0.8) * span_s
    links = rng.choices([*_MIXED], [*_MIXED.values()], k=count)
    machines = []
    for number in range(count):
        site = rng.choice(sites)
        presence = rng.choices(["always", "day", "late"], [0.5, 0.3, 0.2])[0]
        stays = {
            "always": ((rng.uniform(0, min(600.0, 0.1 * span_s)), math.inf),),
            "day": _days(span_s, zones[site], rng),
            "late": ((joining_at + rng.uniform(0, min(600.0, 0.1 * span_s)), math.inf),),
        }[presence]
        machines.append(SimulatedMachine(f"w{number + 1}", step_s * rng.lognormvariate(0, 0.6), PROFILES[links[number]], stays, site))
    return machines, {site: _site_outages(span_s, rng) for site in sites}


def _days(span_s: float, zone: int, rng: random.Random) -> tuple[TimeSpan, ...]:
    """From about 8:00 to about 22:00 every day, in the time zone of the site."""
    first = -zone * _HOUR_S
    days = range(math.ceil((span_s - first) / _DAY_S) + 1)
    spans = [(first + day * _DAY_S + rng.gauss(8, 1) * _HOUR_S, first + day * _DAY_S + rng.gauss(22, 1) * _HOUR_S) for day in days]
    return tuple((max(0.0, start), end) for start, end in spans if end > 0 and start < span_s)


def _site_outages(span_s: float, rng: random.Random) -> tuple[TimeSpan, ...]:
    """One in three sites has one outage, of up to an hour."""
    if rng.random() > 1 / 3:
        return ()
    start = rng.uniform(0, span_s)
    return ((start, start + rng.uniform(60.0, min(3600.0, max(61.0, 0.2 * span_s)))),)


def weather_of(machines: Sequence[SimulatedMachine]) -> Weather:
    """The `Weather` of these machines, without outages."""
    return Weather(tuple(machines), {}, {})
