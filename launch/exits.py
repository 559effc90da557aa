"""Exits of processes: the sentences that report them, and detection of exits on this host."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

_MAX_NAMED = 8
_Key = TypeVar("_Key")


class RankExit(NamedTuple):
    """The exit of a rank's process, as far as it is known."""

    rank: int
    host: str = ""
    pid: int = 0
    how: str = "has ended"
    at: float = 0.0  # time.monotonic


def sentence(exits: Iterable[RankExit]) -> str:
    """Return `rank 2 on h2 (pid 7) has ended, rank 3 …`, in the ranks' order; "" without exits."""
    texts = [
        f"rank {rank}{f' on {host}' if host else ''}{f' (pid {pid})' if pid else ''} {how}"
        for rank, host, pid, how, _ in sorted(exits)
    ]
    texts[_MAX_NAMED:] = [f"and {len(texts) - _MAX_NAMED} more"] * (len(texts) > _MAX_NAMED)
    return ", ".join(texts)


def how_ended(status: int) -> str:
    """Return how a process ended: by its exit code, or by a signal if `status` is negative."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was ended by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"was ended by signal {-status}"


class Exits(Generic[_Key]):
    """Watches processes of this host by pidfds (Linux 5.3). For `select`, it is readable after an exit."""

    def __init__(self) -> None:
        self._keys: dict[int, _Key] = {}  # by pidfd
        self._events = select.epoll()  # `select` does not support descriptors above 1,023
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._events.fileno()

    def watch(self, key: _Key, pid: int) -> bool:
        """Watch a process. Return False if it has ended, or if no pidfd can be opened."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # such as in a sandbox, or without free file descriptors
            return False
        try:
            self._events.register(pidfd, select.EPOLLIN)
        except OSError:  # the user's limit of watched descriptors
            os.close(pidfd)
            return False
        self._keys[pidfd] = key
        return True

    def look(self) -> list[_Key]:
        """Return the keys of the processes that exited since the last call. Any thread may call this."""
        with self._lock:
            return [self._release(pidfd) for pidfd, _ in self._events.poll(0)]

    def close(self) -> None:
        """Watch no process any more."""
        for pidfd in [*self._keys]:
            self._release(pidfd)

    def _release(self, pidfd: int) -> _Key:
        self._events.unregister(pidfd)
        os.close(pidfd)
        return self._keys.pop(pidfd)
