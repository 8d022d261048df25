"""The folder of a run: checkpoints, reading its files back, and repair."""
