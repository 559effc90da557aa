"""What the ranks of a run used of a node's cores in its test, and what others used."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_MOST = {"others": 0.05, "stolen": 0.01}
"""What other processes and a virtual machine's host may take of a node's cores before a test is doubtful."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LEAST_S = 0.5  # CPU time of others that is too little to tell: the kernel counts in steps of 10 ms


class CpuUse(NamedTuple):
    """What one rank says of a test."""

    lasted_s: float
    own_s: float  # CPU time of its process and of its descendants
    allowed: tuple[int, ...]  # the cores that it may run on
    cores: Mapping[int, tuple[float, float]] | None
    """Of the first rank of a node: CPU seconds of all processes on each core, and those that the host of this
    virtual machine gave to others. None where the system does not say."""

    @property
    def mean_cores(self) -> float:
        return self.own_s / max(self.lasted_s, 1e-9)


class CpuMeter:
    """Counts from its making on."""

    def __init__(self, *, of_node: bool = False) -> None:
        self._since, self._own_s, self._cores = time.perf_counter(), _own_s(), _cores() if of_node else None

    def read(self) -> CpuUse:
        """Return what was used until now."""
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
    """Return for `result.json` what others used of a node's cores, of which `ranks` may run on some.

    All in cores on average; `cores` is how many the ranks may use. Interrupts count for nobody. None: the
    node does not say.
    """
    seen = next((rank for rank in ranks if rank.cores), None)
    if seen is None or seen.cores is None:
        return None
    ours = {core for rank in ranks for core in rank.allowed} & {*seen.cores}
    busy_s, stolen_s = (sum(seen.cores[core][i] for core in ours) for i in (0, 1))
    own_s, lasted = sum(rank.own_s for rank in ranks), max(seen.lasted_s, 1e-9)
    others_s = max(0.0, busy_s - own_s)
    return {
        "host": host,
        "cores": len(ours),
        "ranks": round(own_s / lasted, 3),
        "others": round(others_s / lasted, 3),
        "stolen": round(stolen_s / lasted, 3),
        "disturbed_by": [
            by
            for by, used_s in (("others", others_s), ("stolen", stolen_s))
            if used_s > max(_LEAST_S, _MOST[by] * len(ours) * lasted)
        ],
    }


def _own_s() -> float:
    """Return the CPU seconds of this process, of its children that have ended, and of its descendants."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(map(_used_s, _children("self")))


def _used_s(pid: str) -> float:
    """Return the CPU seconds of a process and its descendants, ended or not."""
    try:
        _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:  # it has ended; its parent's figure has it
        return 0.0
    return sum(map(int, fields.split()[11:15])) / _TICKS_PER_S + sum(map(_used_s, _children(pid)))


def _children(pid: str) -> list[str]:
    """Return the ids of a process's children: without a look at every process of the node."""
    found = []
    with contextlib.suppress(OSError):  # it has ended, or this kernel does not say
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += (task / "children").read_text().split()
    return found


def descendants(pid: str) -> list[int]:
    """Return the ids of a process's living descendants."""
    return [one for child in _children(pid) for one in (int(child), *descendants(child))]


def _cores() -> dict[int, tuple[float, float]]:
    """Return the CPU seconds of processes on each core, and what was stolen from it; {}: unknown."""
    try:
        text = Path("/proc/stat").read_text()
    except OSError:
        return {}
    found = {}
    for number, times in re.findall(r"^cpu(\d+) (.*)$", text, re.MULTILINE):
        user, nice, system, *_, steal = [int(ticks) / _TICKS_PER_S for ticks in times.split()[:8]]
        found[int(number)] = (user + nice + system, steal)
    return found
