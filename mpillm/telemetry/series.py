"""Rows of numbers over time, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Series:
    """Rows whose first column is a time. A full series drops every other row, and halves its rate."""

    def __init__(self, columns: Sequence[str], max_rows: int) -> None:
        self.columns = tuple(columns)
        self._rows = np.zeros((max_rows, len(self.columns)))
        self._n = self._skipped = 0
        self._stride = 1

    def __len__(self) -> int:
        return self._n

    def add(self, *row: float) -> None:
        """Add a row: a number for each column."""
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        if self._n == len(self._rows):
            thinned = self._rows[1::2].copy()
            self._rows[: len(thinned)] = thinned
            self._n, self._skipped = len(thinned), self._stride
            self._stride *= 2
            return  # this row is dropped also
        self._rows[self._n] = row
        self._n += 1

    def to_json(self, since: float, max_rows: int = 1 << 30, digits: int = 3) -> dict[str, list[Any]]:
        """Return each column, with None for NaN. `since`: start of the times."""
        step = max(1, -(-self._n // max_rows))
        rows = self._rows[: self._n][(self._n - 1) % step :: step].copy() if self._n else self._rows[:0]
        rows[:, 0] -= since
        return {
            name: [None if value != value else value for value in np.round(column, digits).tolist()]
            for name, column in zip(self.columns, rows.T, strict=True)
        }
