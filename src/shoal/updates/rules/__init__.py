"""Aggregation rules over a stack of contributions."""
