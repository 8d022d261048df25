"""Records of a running run: metrics, status, history."""
