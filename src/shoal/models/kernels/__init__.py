"""Triton kernels and packed CPU matrices."""

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
