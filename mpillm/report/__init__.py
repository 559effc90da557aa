"""What a person sees of a run, and what it leaves: console, logs, result.json, the run directory."""
