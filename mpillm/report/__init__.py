"""What the user sees of a run, and what stays of it: console, logs, result.json, the run directory."""
