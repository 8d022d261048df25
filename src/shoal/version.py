"""The version of this program. Coordinators and workers compare it."""

__version__ = "0.1.0"
