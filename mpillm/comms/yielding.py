"""Whether Open MPI gives the core to others when a look at it finds nothing.

With more ranks than cores it does (its parameter `mpi_yield_when_idle`), so that who waits in MPI lets others
come. An event loop only looks, and sleeps elsewhere: there every look that finds nothing, some five per
query, would cost a turn of everybody else on the core. MPI_Init reads the parameter, once; what is called
here is what it calls then, in Open MPI's library libopen-pal. MPICH gives way only where it waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from mpillm.comms.pmix import loaded

_usual = False  # what MPI_Init has chosen


@contextmanager
def never_waiting() -> Iterator[None]:
    """Keep the core, as long as the block lasts, when a look finds nothing."""
    global _usual
    before = _usual = _set()(False)
    try:
        yield
    finally:
        _set()(before)


@contextmanager
def waiting() -> Iterator[None]:
    """Give way as MPI_Init has chosen while the block waits in MPI, in an event loop, too."""
    before = _set()(_usual)
    try:
        yield
    finally:
        _set()(before)


@cache
def _set() -> Callable[[bool], bool]:
    """Return what sets whether to give way and returns how it was; call it once MPI is there."""
    try:
        found = loaded("libopen-pal.so").opal_progress_set_yield_when_idle
    except (OSError, AttributeError):  # not Linux, not Open MPI, or one without it
        return lambda on: False
    found.argtypes, found.restype = [ctypes.c_bool], ctypes.c_bool
    return found
