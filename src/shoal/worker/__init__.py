"""The worker: computes contributions for a run, and sends them to the coordinator."""
