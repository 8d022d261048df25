"""The worker: what takes part in a run that somebody coordinates."""
