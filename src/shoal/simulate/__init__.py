"""Runs in virtual time: thousands of simulated workers on one machine, with any speeds, links and outages."""

from shoal.simulate.machines import SimulatedMachine, weather_named, weather_of
from shoal.simulate.report import SimulationReport
from shoal.simulate.simulation import simulate
from shoal.simulate.virtual_run import VirtualRun

__all__ = [
    "SimulatedMachine",
    "SimulationReport",
    "VirtualRun",
    "simulate",
    "weather_named",
    "weather_of",
]
