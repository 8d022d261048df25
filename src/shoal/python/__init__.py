"""The Python API: `shoal.train`."""
