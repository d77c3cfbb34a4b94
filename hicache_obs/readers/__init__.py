"""Every trace source as one sequence of records."""
