"""``python -m mpillm mpirun``: `launch.mpirun`, which itself knows nothing of run directories."""

from __future__ import annotations

from launch import mpirun
from mpillm.report.postmortem import amend


def main(argv: list[str]) -> int:
    """Do what `launch.mpirun.main` does."""
    return mpirun.main(argv, amend=amend)
