"""Configuration: from YAML text to a frozen `Run`. Imports neither torch nor NumPy."""

from shoal.config.load import load
from shoal.config.problems import ConfigError, Problem
from shoal.config.schema import Run

__all__ = ["ConfigError", "Problem", "Run", "load"]
