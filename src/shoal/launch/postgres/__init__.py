"""The PostgreSQL server that a run starts for itself."""
