"""Output and records of a run: console, logs, result.json, the run directory."""
