"""Runs in virtual time: ten thousand workers on one machine, in any weather."""

from shoal.simulate.machines import Machine, Weather, listed, weather_named
from shoal.simulate.report import Report
from shoal.simulate.simulation import measured_step_s, simulate, to_be_timed
from shoal.simulate.virtual_run import Scenario, World

__all__ = ["Machine", "Report", "Scenario", "Weather", "World", "listed", "measured_step_s", "simulate", "to_be_timed", "weather_named"]
