"""Machines for `shoal plan`: a YAML file with their names and capabilities.

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
    """One or more equal machines."""

    count: PositiveInt = 1
    """Number of machines."""
    memory_gb: PositiveFloat | None = None
    """Memory for training of one machine, or of one of its devices; null: unlimited."""
    steps_per_s: PositiveFloat | None = None
    """Measured training speed, in batches of the configured size per second."""
    flops: PositiveFloat | None = None
    """Floating-point operations per second while training; used if steps_per_s is null."""
    devices: PositiveInt = 1
    """Devices per machine, which form one worker. Memory and speed are those of one device."""
    device_mbps: PositiveFloat = 100_000.0
    """Bandwidth between two devices, in Mbit/s."""
    bandwidth_mbps: PositiveFloat = 1000.0
    """Bandwidth to the coordinator, in Mbit/s each way."""
    latency_ms: NonNegativeFloat = 0.5
    """Round-trip time to the coordinator."""
    price_per_hour: NonNegativeFloat = 0.0
    """Price of one machine, in any currency."""


def read_machines(path: str) -> Mapping[str, MachineKind]:
    """The machines of a file, by name. Raises ConfigError with every problem at its place."""
    problems: list[Problem] = []
    root, faults = read(path, problems.append), Faults()
    found: Any = INVALID if root is None else MappingType(SectionType(MachineKind)).check(root, (), faults)
    problems += [_problem(fault) for fault in faults]
    if root is not None and not faults:
        problems += _without_speed(root, found)
    if errors(problems):
        raise ConfigError(problems)
    return found


def _without_speed(root: YamlNode, machines: Mapping[str, MachineKind]) -> list[Problem]:
    slow = [name for name, kind in machines.items() if kind.steps_per_s is None and kind.flops is None]
    help = "give steps_per_s (`shoal plan FILE --measure` on that machine tells it) or flops"
    return [Problem("missing-key", f"`{name}` does not say how fast it is", (Label(root.value[name].key),), name, help) for name in slow]


def _problem(fault: Fault) -> Problem:
    """The problem for a fault, at its place in the file."""
    path = ".".join(str(step) for step in fault.path)
    message = fault.message if fault.code == "unknown-key" else f"`{path}`: {fault.message}"
    nested = fault.code == "unknown-key" and fault.path[:1] == ("machines",)
    help = "the names of machines are the file's own keys: leave `machines:` out" if nested else fault.help
    return Problem(fault.code, message, (Label(_span(fault)),), path, help)


def _span(fault: Fault) -> Span:
    assert isinstance(fault.at, YamlNode)  # everything here was read from a file
    entry = fault.at.value.get(fault.key) if fault.key and isinstance(fault.at.value, dict) else None
    return entry.key if entry is not None else fault.at.span
