"""Workers that give way to the user of their computer: conditions, what the system reports, limits, and the process that watches."""
