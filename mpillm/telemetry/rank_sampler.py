"""Samples of a rank's process and its GPU, twice a second, with the heartbeat."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mpillm.telemetry.gpu_meter import GPU_COLUMNS, GpuMeter
from mpillm.telemetry.recorder import Recorder
from mpillm.telemetry.series import Series

_MAX_ROWS = 1200  # ten minutes at the rate of the heartbeat, then half the rate
_MAX_OF_ALL_RANKS = 200_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WORK = ("context_s", "decode_s", "busy_s", "handoff_s")
COLUMNS = ("seconds", "cpu_s", "rss_bytes", "threads", "open_files", *_WORK)


class RankSampler:
    """Sampler of this process. One thread calls `sample`, which takes 40 us, or more with a GPU."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._own = Series(COLUMNS, _MAX_ROWS)
        self._gpu = Series(("seconds", *GPU_COLUMNS), _MAX_ROWS)
        self.meter: GpuMeter | None = None

    def sample(self) -> None:
        """Add a row. Never raises: the heartbeat's thread calls this."""
        now, r = time.perf_counter(), self._recorder
        process = time.process_time(), _rss(), _entries("task"), _entries("fd")
        self._own.add(now, *process, r.context_s, r.decode_s, r.busy_s, r.handoff_s)
        if self.meter is not None:
            self._gpu.add(now, *self.meter.read())

    def to_json(self, since: float, n_ranks: int) -> dict[str, Any]:
        """Return the rows as columns, with `seconds` after `since`. With many ranks, there are fewer rows.

        A rank with a GPU also has ``gpu``, with None for values that its driver does not report.
        """
        max_rows = max(20, min(_MAX_ROWS, _MAX_OF_ALL_RANKS // n_ranks))
        own = self._own.to_json(since, max_rows)
        return own | ({"gpu": self._gpu.to_json(since, max_rows)} if len(self._gpu) else {})


def _rss() -> float:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return float("nan")


def _entries(folder: str) -> float:
    """Count this process's threads (``task``) or file descriptors (``fd``, including the counting one)."""
    try:
        return len(os.listdir(f"/proc/self/{folder}"))  # noqa: PTH208 - a third of iterdir's time
    except OSError:
        return float("nan")
