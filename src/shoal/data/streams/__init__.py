"""Text that is read while the run goes on and is never whole in memory."""
