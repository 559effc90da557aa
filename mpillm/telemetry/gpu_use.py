"""Which processes computed on a run's GPUs besides its ranks: looked at when its test starts and ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpillm.telemetry.cpu_use import descendants
from mpillm.telemetry.gpu_meter import GpuMeter


class GpuUse(NamedTuple):
    """What one rank says of its GPU."""

    uuid: str
    seen: frozenset[int]  # processes on it
    own: frozenset[int]  # this rank's: itself, and what it has started


class GpuWatch:
    """Looks for the first time when it is made."""

    def __init__(self, uuid: str, meter: GpuMeter) -> None:
        self._uuid, self._meter = uuid, meter
        self._first = meter.processes()
        self._own = _own()

    def read(self) -> GpuUse | None:
        """Look again; return what was there either time. None: the driver does not say."""
        if self._first is None or (last := self._meter.processes()) is None:
            return None
        return GpuUse(self._uuid, self._first | last, self._own | _own())


def other_processes(host: str, ranks: Sequence[GpuUse]) -> list[dict[str, Any]]:
    """Return for `result.json` the GPUs of a node on which others computed, too, and their processes' ids.

    A GPU on which the driver shows none of the ranks' processes is left out: its ids are not ours to read, as
    in a container.
    """
    own = frozenset[int]().union(*(rank.own for rank in ranks))
    on: dict[str, frozenset[int]] = {}
    for rank in ranks:
        on[rank.uuid] = on.get(rank.uuid, frozenset()) | rank.seen
    return [
        {"host": host, "gpu": uuid, "pids": sorted(seen - own)}
        for uuid, seen in on.items()
        if seen & own and seen - own
    ]


def _own() -> frozenset[int]:
    return frozenset({os.getpid(), *descendants("self")})
