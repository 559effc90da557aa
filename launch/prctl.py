"""Linux settings (prctl) of a process and its children."""

from __future__ import annotations

import ctypes
import sys

KEEPER = "mpillm-kept"
"""Name of a process that has a rank's command line, but is not a rank (`comms.connection_holder`)."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, so that it can find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int) -> None:
    """Let this process get signal `number` when its parent exits. Call this in a child before exec."""
    _prctl(_PR_SET_PDEATHSIG, number)


def name_process(name: str) -> None:
    """Set this process's name, at most 15 characters."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    """Call prctl on Linux. On other systems, only `mpirun` ends the ranks of a killed launcher."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
