"""Training in one process group, without a coordinator."""
