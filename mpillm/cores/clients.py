"""Helpers of cores whose ranks are clients of servers elsewhere: the split of servers, an answer queue."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from launch.first_failure import failing_lines
from launch.open_files import allow_connections
from mpillm.comms.messages import RESPONSE, Batch
from mpillm.cores.base import CoreConfig, LLMCore
from mpillm.errors import Failure, RunError

MAX_PER_SERVER = 1024
"""Default limit of requests at a server: more than any server runs simultaneously."""

DEADLINE_SHARE = 0.9
"""Share of rank 0's deadline for a client, which then fails first, with a message that names the server."""

_OWNER_S = 1.5
_LOOK_S = 0.05


def with_owner_failures(core: LLMCore, message: str = "", server: int | None = None) -> str:
    """Add the failures in the server's log to a client's message, after a wait for the server's owner.

    If a rank of the run owns the server, that rank detects the server's exit a moment later than a client
    that waits for an answer.

    Args:
        message: The client's message.
        server: Index of the server in the run; None: the client's server.

    Returns:
        The message, with the lines of the server's log that name failures.
    """
    end = time.monotonic() + (0.0 if core.config.client.server is None else _OWNER_S)
    while time.monotonic() < end:
        core.check_run()
        time.sleep(_LOOK_S)
    index = core.config.client.server if server is None else server
    log = core.server_log(index) if index is not None else None
    if log is None or not (lines := failing_lines(log)):
        return message
    return "\n".join([message, f"failures in {log}, the first ones:", *(f"  | {line}" for line in lines)])


def longest_wait_s(config: CoreConfig, load_deadline_s: float) -> float:
    """Return how long a client waits for a server outside the run."""
    return DEADLINE_SHARE * min(load_deadline_s, config.client.server_wait_s or load_deadline_s)


def longest_first_token_s(config: CoreConfig, limit_s: float) -> float:
    """Return how long a client waits for the first token of a server that is up, at most `limit_s`."""
    wait_s = config.client.first_token_wait_s
    return limit_s if wait_s is None else min(limit_s, DEADLINE_SHARE * wait_s)


def until_when(deadline_s: float) -> str:
    """Return a note on how long a client waits for a server outside the run, with advice."""
    return (
        f"it waits at most {deadline_s:,.0f} s (--load_deadline) for a server outside the run;"
        " with --server a run starts its own"
    )


def share_of(urls: Sequence[str], at_once: int, index: int, n_clients: int) -> tuple[list[str], int]:
    """Return the servers of one of `n_clients` clients, and its simultaneous requests at each server.

    Together, the clients of a server have `at_once` requests there, but at least one per client.
    """
    if n_clients <= len(urls):
        return list(urls[index::n_clients]), at_once
    server = index % len(urls)
    clients = len(range(server, n_clients, len(urls)))  # of this server
    index_at_server = index // len(urls)
    return [urls[server]], max(1, at_once // clients + (index_at_server < at_once % clients))


def allow_files(n_connections: int) -> None:
    """Raise this process's limit of open files, if the connections may exceed it."""
    if problem := allow_connections(n_connections):
        raise RunError(
            Failure(f"{n_connections} connections need more open files: {problem}; or lower max_concurrency")
        )


class Answers:
    """Queue of answer rows from a client's threads to the rank's main thread."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, int, int, Sequence[int]]] = deque()  # id, n tokens, flags, tokens

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, id_: int, flags: int, tokens: Sequence[int]) -> int:
        """Add a row; `flags`: of `ResponseFlag`. Return the number of queued rows."""
        return self.add_rows(id_, [(flags, tokens)])

    def add_rows(self, id_: int, rows: Sequence[tuple[int, Sequence[int]]]) -> int:
        """Add rows of one request (flags, tokens), and return the number of queued rows."""
        self._rows.extend([(id_, len(tokens), int(flags), tokens) for flags, tokens in rows])
        return len(self._rows)

    def take(self) -> Batch | None:
        """Return all queued rows as a batch; None if there are none."""
        ready = [self._rows.popleft() for _ in range(len(self._rows))]
        if not ready:
            return None
        rows = np.array([row[:3] for row in ready], RESPONSE)
        return Batch(rows, np.array([token for row in ready for token in row[3]], np.int32))
