"""File descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

_FD_SETSIZE = 1024  # `select` takes smaller descriptors only


@contextlib.contextmanager
def soft_limit(n: int) -> Iterator[None]:
    """Set this process's soft limit of open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def only_large_descriptors() -> Iterator[None]:
    """Let this process open only descriptors that are too large for `select`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FD_SETSIZE + 200
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"the hard limit of open files is {hard}")
    with soft_limit(needed):
        taken = [os.open(os.devnull, os.O_RDONLY)]
        try:
            while taken[-1] < _FD_SETSIZE:
                taken.append(os.dup(taken[0]))
            yield
        finally:
            for fd in taken:
                os.close(fd)
