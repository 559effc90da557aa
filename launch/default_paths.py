"""Default paths of files."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("mpillm-runs")
"""Folder of run directories and of server logs, in the current folder."""

SERVERS = RUNS / "servers"
"""Folder with a folder for each start of servers outside a run."""
