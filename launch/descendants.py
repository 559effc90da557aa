"""Search for new descendants of a process, at a cost that depends neither on its threads nor on its age.

/proc/PID/task/TID/children lists the children of one thread, so it takes a read for each thread.
"""

from __future__ import annotations

import os


class Descendants:
    """The processes below a process. It must adopt orphans, or its descendants may leave it unnoticed."""

    def __init__(self, pid: int) -> None:
        self._below = {pid}  # the process and its descendants
        self._young: set[int] = set()  # other processes that were examined once
        self._others: set[int] = set()

    def new(self) -> list[int]:
        """Return the descendants that have started since the last call, parents before their children.

        A process is examined in two calls: in the first, its parent may just have exited. Raises OSError, for
        example if no file descriptor is free.
        """
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208 - names
        unknown = pids - self._below - self._others
        children: dict[int, list[int]] = {}
        for pid in sorted(unknown):
            children.setdefault(_parent(pid), []).append(pid)
        new = [pid for parent in self._below for pid in children.get(parent, ())]
        for pid in new:  # the list grows during the loop
            new += children.get(pid, ())
        self._below = (self._below & pids).union(new)
        self._others = (self._others | self._young) & pids - self._below
        self._young = unknown - self._below - self._others
        return new


def _parent(pid: int) -> int:
    """Return the id of a process's parent; -1 if the process has exited."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib takes as long again
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1
