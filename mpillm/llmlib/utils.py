"""The progress of a server."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping

from mpillm.report.console import Console, LoadProgress


class LLMServerProgressDisplay:
    """Counts the cores' answers, and draws the progress. Cores call it from their threads."""

    def __init__(self, total: int = 0, enable_render: bool = True, *, steady: bool = False) -> None:
        """`steady`: also draw the rates of the last seconds."""
        self.total = total
        self.completed = 0
        # number and sum of the values of each additional unit
        self.units: dict[str, tuple[int, float]] = {}
        self._steady = steady
        self._started = time.perf_counter()
        self._console = Console(sys.stdout, sys.stderr) if enable_render else None
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        """Tokens of the answers so far."""
        return int(self.units.get("tokens/s", (0, 0.0))[1])

    def update_total(self, total: int) -> None:
        """Set the number of samples so far."""
        self.total = total

    def update(
        self, completed: int, additional_unit_updates: Mapping[str, float | Iterable[float]] | None = None
    ) -> None:
        """Count answered samples, and add one or several values to each unit."""
        with self._lock:
            self.completed += completed
            for name, values in (additional_unit_updates or {}).items():
                added = (
                    [float(values)]
                    if isinstance(values, (int, float))
                    else [float(value) for value in values]
                )
                n, total = self.units.get(name, (0, 0.0))
                self.units[name] = n + len(added), total + sum(added)
            if self._console is not None:
                elapsed = time.perf_counter() - self._started
                now = LoadProgress(self.completed, self.total, self.tokens, elapsed)
                self._console.progress(now, steady=self._steady)

    def finish(self) -> None:
        """Print the last line."""
        with self._lock:
            if self._console is not None:
                self._console.line(f"  {self.completed} of {self.total} samples, {self.tokens} tokens")
                self._console = None
