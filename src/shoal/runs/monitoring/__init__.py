"""What is recorded of a run while it goes on: metrics, status, history."""
