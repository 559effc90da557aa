"""What cores share whose ranks are clients of servers elsewhere: the split of servers, the answers' queue."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from launch.first_failure import failing_lines
from mpillm.comms.messages import RESPONSE, Batch
from mpillm.cores.base import CoreConfig, LLMCore
from mpillm.errors import Failure, RunError

MOST_AT_ONCE = 1024
"""Requests at a server for which no limit is stated: more than any server runs at once."""

EARLIER = 0.9
"""Of rank 0's deadline: a rank that gives up earlier names the server in its message."""

_OWNER_S = 1.5
_LOOK_S = 0.05


def hear_owner(core: LLMCore, message: str = "", server: int | None = None) -> str:
    """Before a client says that its server fails: if it belongs to the run, have its owner say why.

    The owner knows how it has ended a moment later than who waits for its answer that there will be none.

    Args:
        message: The client's own.
        server: Index of the server in the run; None: the client's.

    Returns:
        The message, with the lines of the server's log that name failures.
    """
    end = time.monotonic() + (0.0 if core.config.client.server is None else _OWNER_S)
    while time.monotonic() < end:
        core.meanwhile()
        time.sleep(_LOOK_S)
    index = core.config.client.server if server is None else server
    log = core.server_log(index) if index is not None else None
    if log is None or not (lines := failing_lines(log)):
        return message
    return "\n".join([message, f"failures in {log}, the first ones:", *(f"  | {line}" for line in lines)])


def longest_wait_s(config: CoreConfig, load_deadline_s: float) -> float:
    """Return for how long a client waits for a server that it does not own."""
    return EARLIER * min(load_deadline_s, config.client.server_wait_s or load_deadline_s)


def longest_first_token_s(config: CoreConfig, limit_s: float) -> float:
    """Return for how long a client waits for the first token of a server that is up, `limit_s` at most."""
    wait_s = config.client.first_token_wait_s
    return limit_s if wait_s is None else min(limit_s, EARLIER * wait_s)


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


def allow_files(n_connections: int) -> None:
    """Raise this process's limit of open files, if there may be too many connections for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n_connections + 256
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        raise RunError(
            Failure(
                f"{n_connections} connections need more open files than this process may have ({hard}): raise"
                " ulimit -n, or lower max_concurrency"
            )
        )


class Answers:
    """Rows of answers on their way from a client's threads to the rank's main thread, in order."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, int, int, Sequence[int]]] = deque()  # id, n tokens, flags, tokens

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, id_: int, flags: int, tokens: Sequence[int]) -> int:
        """Add a row; `flags`: of `ResponseFlag`. Return how many wait now, with this one."""
        self._rows.append((id_, len(tokens), int(flags), tokens))
        return len(self._rows)

    def take(self) -> Batch | None:
        """Return all that are there; None if there are none."""
        ready = [self._rows.popleft() for _ in range(len(self._rows))]
        if not ready:
            return None
        rows = np.array([row[:3] for row in ready], RESPONSE)
        return Batch(rows, np.array([token for row in ready for token in row[3]], np.int32))
