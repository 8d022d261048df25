"""Helpers of the tests: processes, small clusters, servers, faults, and `eventually`."""
