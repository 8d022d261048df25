"""Triton kernels and packed CPU matrices."""
