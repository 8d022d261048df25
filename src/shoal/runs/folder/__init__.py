"""The folder of a run: checkpoints, what is read back from it, and repair."""
