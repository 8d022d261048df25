"""PostgreSQL as the meeting place: machines that cannot reach each other all reach the database."""
