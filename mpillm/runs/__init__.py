"""Whole runs as child processes: `whole_runs` starts them, `from_python` is the API for programs."""
