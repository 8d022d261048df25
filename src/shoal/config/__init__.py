"""Configuration: one path from text to a frozen Run. Imports nothing heavy."""

from shoal.config.load import load
from shoal.config.problems import ConfigError, Problem
from shoal.config.schema import Run

__all__ = ["ConfigError", "Problem", "Run", "load"]
