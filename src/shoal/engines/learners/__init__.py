"""Learners, with which the coordinator applies contributions: an optimizer, an outer optimizer, or steps on rollouts."""
