"""This process's limit of open files."""

from __future__ import annotations

import resource

_RESERVE = 256  # files for other uses than connections


def files_for(n_connections: int) -> int:
    """Return the limit of open files that a process with these connections needs."""
    return n_connections + _RESERVE


def allow_connections(n: int) -> str:
    """Raise the soft limit, if it may not suffice for `n` connections.

    Returns "", or how the hard limit must be raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_for(n)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return "" if allowed == needed else f"this process may open {hard} files: ulimit -n {needed}, or more"
