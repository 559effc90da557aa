"""Default paths of files."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("mpillm-runs")
"""The folder of run directories, and of what servers print: in the current folder, for a user to find."""

SERVERS = RUNS / "servers"
"""A folder in it for each start of servers without a run."""
