"""What limits a rate: the server, its clients, the machine, or none of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import psutil

_BUSY = 0.85
"""Of a core: who has more of it can't do much more."""


class Busy(NamedTuple):
    """Processor time of a measurement, in cores."""

    server: float  # with its models' processes
    server_thread: float  # the busiest of theirs
    clients: float
    client: float  # the busiest process of theirs, which runs Python in one thread at a time
    instances: float = 0.0  # part of the time in which the server's model instances had requests, on average

    def limit(self, n_cores: int) -> str:
        """Return what keeps the rate from growing, as far as processor time tells."""
        if self.server + self.clients >= _BUSY * n_cores:
            return f"the machine: server and clients use {self.server + self.clients:.2f} of {n_cores} cores"
        if self.server_thread >= _BUSY:
            return f"the server: one of its threads uses {self.server_thread:.2f} of a core"
        if self.client >= _BUSY:
            return f"the clients: a process uses {self.client:.2f} of a core"
        if self.instances >= _BUSY:
            return f"the server: its model's instances have requests {100 * self.instances:.0f} % of the time"
        return (
            f"waits: of a core the server's busiest thread uses {self.server_thread:.2f}, a client"
            f" {self.client:.2f}; its model's instances have requests {100 * self.instances:.0f} % of the"
            " time"
        )


def median(of: Sequence[Busy]) -> Busy:
    """Return the median of each number."""
    return Busy(*(statistics.median(column) for column in zip(*of, strict=True)))


def thread_times(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """Return the processor time so far of each thread, in seconds."""
    times: dict[int, float] = {}
    for process in processes:
        times |= {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    return times


def cores(before: Mapping[int, float], after: Mapping[int, float], seconds: float) -> tuple[float, float]:
    """Return the cores that the threads used between two looks: all together, and the busiest."""
    used = [(time - before.get(id_, 0.0)) / seconds for id_, time in after.items()]
    return sum(used), max(used, default=0.0)
