"""Continuous batching: many requests go through one model together."""
