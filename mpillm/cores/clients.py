"""What cores share whose ranks are clients of servers elsewhere: the split of servers, and common limits."""

from __future__ import annotations

from collections.abc import Sequence

MOST_AT_ONCE = 1024
"""Requests at a server for which no limit is stated: more than any server runs at once."""

EARLIER = 0.9
"""Of rank 0's deadline: a rank that gives up earlier names the server in its message."""


def until_when(deadline_s: float) -> str:
    """Return for how long a client waits for a server that somebody else starts, and what to do."""
    return (
        f"it waits at most {deadline_s:,.0f} s (--load_deadline) for a server that somebody else starts;"
        " with --server a run starts its own"
    )


def share_of(urls: Sequence[str], at_once: int, index: int, n_clients: int) -> tuple[list[str], int]:
    """Return the servers of one of `n_clients` clients, and how many requests it may have at each at once.

    Together the clients of a server have `at_once` there, or one each if that is more.
    """
    if n_clients <= len(urls):
        return list(urls[index::n_clients]), at_once
    server = index % len(urls)
    clients = len(range(server, n_clients, len(urls)))  # of this server
    mine = index // len(urls)
    return [urls[server]], max(1, at_once // clients + (mine < at_once % clients))
