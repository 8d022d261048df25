"""Rounds: contributions that arrive, when a round closes, and the weights that it publishes."""
