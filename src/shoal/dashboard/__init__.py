"""`shoal watch`: the dashboard of runs in a browser."""
