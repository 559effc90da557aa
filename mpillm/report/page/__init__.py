"""A run's HTML report and its trace."""
