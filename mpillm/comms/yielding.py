"""Control of Open MPI's yielding: whether a poll without a result gives the CPU core to other processes.

With more ranks than CPU cores, Open MPI yields (its parameter `mpi_yield_when_idle`), so that a rank which
waits in MPI lets other ranks run. An event loop only polls in MPI, and sleeps elsewhere. With yielding, each
poll without a result, about five per query, would cost a time slice of the other processes on the core.
MPI_Init reads the parameter once, and passes it to a function of Open MPI's library libopen-pal. This module
calls the same function. MPICH yields only in waiting calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from mpillm.comms.pmix import loaded

_default = False  # MPI_Init's choice


@contextmanager
def never_yielding() -> Iterator[None]:
    """Do not yield in the block."""
    global _default
    before = _default = _set()(False)
    try:
        yield
    finally:
        _set()(before)


@contextmanager
def yielding_while_waiting() -> Iterator[None]:
    """Yield as MPI_Init has chosen, even inside an event loop: for a block that waits in MPI."""
    before = _set()(_default)
    try:
        yield
    finally:
        _set()(before)


@cache
def _set() -> Callable[[bool], bool]:
    """Return a function that sets whether to yield, and returns the previous value. MPI must have started."""
    try:
        function = loaded("libopen-pal.so").opal_progress_set_yield_when_idle
    except (OSError, AttributeError):  # not Linux, or no Open MPI with this function
        return lambda on: False
    function.argtypes, function.restype = [ctypes.c_bool], ctypes.c_bool
    return function
