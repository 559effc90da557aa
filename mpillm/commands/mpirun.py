"""``python -m mpillm mpirun``: `launch.mpirun`, which is independent of run directories."""

from __future__ import annotations

from launch import mpirun
from mpillm.report.postmortem import amend


def main(argv: list[str]) -> int:
    """Run `launch.mpirun.main`, and amend the run directory after a failure."""
    return mpirun.main(argv, amend=amend)
