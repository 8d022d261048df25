"""Runs in virtual time: thousands of simulated workers on one machine, with any speeds, links and outages."""

from shoal.simulate.machines import SimulatedMachine, Weather, weather_named, weather_of
from shoal.simulate.report import SimulationReport
from shoal.simulate.simulation import measured_step_s, simulate, to_be_timed
from shoal.simulate.virtual_run import Scenario, VirtualRun

__all__ = [
    "Scenario",
    "SimulatedMachine",
    "SimulationReport",
    "VirtualRun",
    "Weather",
    "measured_step_s",
    "simulate",
    "to_be_timed",
    "weather_named",
    "weather_of",
]
