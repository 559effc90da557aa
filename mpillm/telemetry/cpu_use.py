"""CPU time of a node in a test: of the ranks, and of other processes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_MAX_SHARES = {"others": 0.05, "stolen": 0.01}
"""Shares of a node's CPU cores that other processes and a virtual machine's host may use in a valid test."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MIN_S = 0.5  # CPU time of others that can be measured: the kernel counts in steps of 10 ms


class CpuUse(NamedTuple):
    """CPU time of one rank in a test."""

    lasted_s: float
    own_s: float  # CPU time of its process and of its descendants
    allowed: tuple[int, ...]  # CPU cores that it may run on
    cores: Mapping[int, tuple[float, float]] | None
    """Only from a node's first rank: CPU seconds of all processes on each core, and seconds that the host of
    this virtual machine gave to others. None if unknown."""

    @property
    def mean_cores(self) -> float:
        return self.own_s / max(self.lasted_s, 1e-9)


class CpuMeter:
    """Meter that starts when it is created."""

    def __init__(self, *, of_node: bool = False) -> None:
        self._since, self._own_s, self._cores = time.perf_counter(), _own_s(), _cores() if of_node else None

    def read(self) -> CpuUse:
        """Return the use until now."""
        before, cores = self._cores, None
        if before is not None:
            cores = {
                core: (used[0] - before[core][0], used[1] - before[core][1])
                for core, used in _cores().items()
                if core in before
            }
        lasted = time.perf_counter() - self._since
        return CpuUse(lasted, _own_s() - self._own_s, tuple(sorted(os.sched_getaffinity(0))), cores)


def other_load(host: str, ranks: Sequence[CpuUse]) -> dict[str, Any] | None:
    """Return for `result.json` the use of a node's CPU cores on which `ranks` may run; None if unknown.

    All values are average numbers of cores; `cores` is the number that the ranks may use. Interrupts do not
    count.
    """
    node = next((rank for rank in ranks if rank.cores), None)
    if node is None or node.cores is None:
        return None
    allowed = {core for rank in ranks for core in rank.allowed} & {*node.cores}
    busy_s, stolen_s = (sum(node.cores[core][i] for core in allowed) for i in (0, 1))
    own_s, lasted = sum(rank.own_s for rank in ranks), max(node.lasted_s, 1e-9)
    others_s = max(0.0, busy_s - own_s)
    return {
        "host": host,
        "cores": len(allowed),
        "ranks": round(own_s / lasted, 3),
        "others": round(others_s / lasted, 3),
        "stolen": round(stolen_s / lasted, 3),
        "disturbed_by": [
            by
            for by, used_s in (("others", others_s), ("stolen", stolen_s))
            if used_s > max(_MIN_S, _MAX_SHARES[by] * len(allowed) * lasted)
        ],
    }


def _own_s() -> float:
    """Return the CPU seconds of this process, of its exited children, and of its descendants."""
    usages = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(map(_used_s, _children("self")))


def _used_s(pid: str) -> float:
    """Return the CPU seconds of a process and its descendants, including exited ones."""
    try:
        _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:  # it has exited; its parent's time includes it
        return 0.0
    return sum(map(int, fields.split()[11:15])) / _TICKS_PER_S + sum(map(_used_s, _children(pid)))


def _children(pid: str) -> list[str]:
    """Return the ids of a process's children, without reading every process of the node."""
    pids = []
    with contextlib.suppress(OSError):  # it has exited, or this kernel lacks the file
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += (task / "children").read_text().split()
    return pids


def descendants(pid: str) -> list[int]:
    """Return the ids of a process's living descendants."""
    return [one for child in _children(pid) for one in (int(child), *descendants(child))]


def _cores() -> dict[int, tuple[float, float]]:
    """Return the CPU seconds of processes on each core, and the stolen seconds; {}: unknown."""
    try:
        text = Path("/proc/stat").read_text()
    except OSError:
        return {}
    cores = {}
    for number, times in re.findall(r"^cpu(\d+) (.*)$", text, re.MULTILINE):
        user, nice, system, *_, steal = [int(ticks) / _TICKS_PER_S for ticks in times.split()[:8]]
        cores[int(number)] = (user + nice + system, steal)
    return cores
