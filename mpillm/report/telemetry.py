"""`telemetry.json`: the ranks' telemetry, and rank 0's samples of the test's progress, over time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpillm.files import write_text
from mpillm.telemetry.recorder import KINDS
from mpillm.telemetry.series import Series

if TYPE_CHECKING:
    from mpillm.roles.harness import Totals

_MAX_ROWS = 2400  # four minutes at ten a second, then half as often


class RunTelemetry:
    """Rank 0's samples of a test's progress; constant size."""

    def __init__(self) -> None:
        self._progress = Series(("seconds", "issued", "samples", "tokens"), _MAX_ROWS)
        self._looked_at = 0.0
        self.ranks: Mapping[int, dict[str, Any]] = {}  # telemetry by rank, after the ranks have drained

    def look(self, totals: Totals) -> None:
        """Add a sample of the progress."""
        self._looked_at = time.perf_counter()
        self._progress.add(self._looked_at, totals.issued, totals.samples, totals.tokens)

    def write(self, path: Path, totals: Totals, *, ends: bool = True) -> None:
        """Write the file; docs/reference/report.md describes it. Raises OSError if the disk is full.

        `ends`: the test has ended, so no sample follows.
        """
        if ends and totals.started and totals.ended:
            ended = max(totals.ended, self._looked_at)
            self._progress.add(ended, totals.issued, totals.samples, totals.tokens)
        since = totals.started
        histograms = {"ttft": totals.ttft, "tpot": totals.tpot, "latency": totals.latency}
        value = {
            "format": 1,
            "started": time.time() - (time.perf_counter() - since) if since else None,
            "kinds": KINDS,
            "progress": self._progress.to_json(since),
            "cdf": {name: histogram.cdf_ms() for name, histogram in histograms.items()},
            "ranks": {str(rank): noted for rank, noted in sorted(self.ranks.items())},
        }
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        write_text(path, text + "\n", waits=ends)
