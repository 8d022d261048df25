"""The machines that a run is planned for: a file of names, and what each is able to do.

laptop: {count: 3, memory_gb: 16, steps_per_s: 2.5, bandwidth_mbps: 50, latency_ms: 20}
server: {memory_gb: 80, flops: 2.0e13, devices: 8, bandwidth_mbps: 1000, price_per_hour: 2.5}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.fields import (
    INVALID,
    Fault,
    Faults,
    MappingType,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    SectionType,
)
from shoal.config.problems import ConfigError, Label, Problem, errors
from shoal.config.source_span import Span
from shoal.config.text import YamlNode, read


class MachineKind(Section):
    """Some machines that are alike."""

    count: PositiveInt = 1
    """How many there are."""
    memory_gb: PositiveFloat | None = None
    """Memory that one of them has for training, or one of its devices; null: enough."""
    steps_per_s: PositiveFloat | None = None
    """Batches that it was seen to learn from in a second, of the size that the run's settings have."""
    flops: PositiveFloat | None = None
    """Operations a second that it reaches while it trains; counts where steps_per_s is null."""
    devices: PositiveInt = 1
    """Devices of one of them, which an engine makes one worker of. Memory and speed are those of one device."""
    device_mbps: PositiveFloat = 100_000.0
    """What travels between two of its devices, in megabits a second."""
    bandwidth_mbps: PositiveFloat = 1000.0
    """Of its link to the coordinator, each way."""
    latency_ms: NonNegativeFloat = 0.5
    """There and back."""
    price_per_hour: NonNegativeFloat = 0.0
    """Of one of them, in any currency."""


def read_machines(path: str) -> Mapping[str, MachineKind]:
    """The machines of a file, by name. Raises ConfigError with every problem, at its place."""
    problems: list[Problem] = []
    root, faults = read(path, problems.append), Faults()
    found: Any = INVALID if root is None else MappingType(SectionType(MachineKind)).check(root, (), faults)
    problems += [_problem(fault) for fault in faults]
    if root is not None and not faults:
        problems += _without_speed(root, found)
    if errors(problems):
        raise ConfigError(problems)
    machines: Mapping[str, MachineKind] = found
    return machines


def _without_speed(root: YamlNode, machines: Mapping[str, MachineKind]) -> list[Problem]:
    slow = [name for name, kind in machines.items() if kind.steps_per_s is None and kind.flops is None]
    help = "give steps_per_s (`shoal plan FILE --measure` on that machine tells it) or flops"
    return [Problem("missing-key", f"`{name}` does not say how fast it is", (Label(root.value[name].key),), name, help) for name in slow]


def _problem(fault: Fault) -> Problem:
    """A fault, at the place of the file where it stands."""
    path = ".".join(str(step) for step in fault.path)
    message = fault.message if fault.code == "unknown-key" else f"`{path}`: {fault.message}"
    nested = fault.code == "unknown-key" and fault.path[:1] == ("machines",)
    help = "the names of machines are the file's own keys: leave `machines:` out" if nested else fault.help
    return Problem(fault.code, message, (Label(_span(fault)),), path, help)


def _span(fault: Fault) -> Span:
    assert isinstance(fault.at, YamlNode)  # everything here was read from a file
    entry = fault.at.value.get(fault.key) if fault.key and isinstance(fault.at.value, dict) else None
    span: Span = entry.key if entry is not None else fault.at.span
    return span
