"""The door for Python programs: `from shoal import train`."""
