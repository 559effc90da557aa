"""The dummy core's streamed answers: a token of each stream per step."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import RESPONSE, Batch, ResponseFlag

_FIRST, _FINAL = int(ResponseFlag.FIRST), int(ResponseFlag.FINAL)  # plain ints: enum flags are slower
_PARTIAL = int(ResponseFlag.PARTIAL)
_STREAM = np.dtype([("id", "<u4"), ("base", "<i8"), ("at", "<i8"), ("n", "<i8"), ("due", "<f8")])


class Streams:
    """All streams in one array, so that no Python code runs per token.

    Token j of an answer is the first token plus j, modulo `vocab_size`.
    """

    def __init__(self, vocab_size: int, gap_s: float) -> None:
        """`gap_s`: seconds between tokens of a stream."""
        self._vocab_size = vocab_size
        self._gap_s = gap_s
        self._rows = np.zeros(0, _STREAM)
        self._next_due = math.inf

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        ids: NDArray[np.uint32],
        first_tokens: NDArray[np.int32],
        lengths: NDArray[np.int64],
        n_sent: int,
        first_at: float,
    ) -> None:
        """Begin answers of `lengths` tokens (arrays of shape [n]).

        `n_sent` tokens of each answer are sent already. The next token is due at `first_at`.
        """
        rows = np.zeros(len(ids), _STREAM)
        rows["id"], rows["base"], rows["at"], rows["n"], rows["due"] = (
            ids,
            first_tokens,
            n_sent,
            lengths,
            first_at,
        )
        self._keep(np.concatenate([self._rows, rows]))

    def is_due(self, now: float) -> bool:
        """Return whether `step` has a token."""
        return self.next_due() <= now

    def next_due(self) -> float:
        """Return when `step` will have a token, in the time of `time.perf_counter`."""
        return self._next_due

    def step(self, now: float) -> Batch:
        """Return the next token of each due stream: rows FIRST, PARTIAL, or FINAL with the whole answer."""
        chosen = np.flatnonzero(self._rows["due"] <= now)
        rows = self._rows[chosen]
        at, final = rows["at"], rows["at"] == rows["n"] - 1
        out = np.zeros(len(rows), RESPONSE)
        out["id"], out["n_tokens"] = rows["id"], 1
        out["flags"] = np.where(at == 0, _FIRST, _PARTIAL)
        tokens = rows["base"] + at
        if final.any():
            out["flags"][final] = np.where(at[final] == 0, _FIRST | _FINAL, _FINAL)
            out["n_tokens"] = lengths = np.where(final, rows["n"], 1)
            place = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            tokens = np.repeat(rows["base"] + np.where(final, 0, at), lengths) + place
        self._rows["at"][chosen] += 1
        self._rows["due"][chosen] += self._gap_s
        self._keep(np.delete(self._rows, chosen[final]) if final.any() else self._rows)
        return Batch(out, (tokens % self._vocab_size).astype(np.int32))

    def remove(self, ids: Collection[int]) -> list[int]:
        """End the open streams among `ids`; return their ids."""
        matches = np.isin(self._rows["id"], list(ids))
        removed: list[int] = self._rows["id"][matches].tolist()
        self._keep(self._rows[~matches])
        return removed

    def _keep(self, rows: NDArray[np.void]) -> None:
        """Replace the streams, and cache the next due time, which is read far more often than it changes."""
        self._rows = rows
        self._next_due = float(rows["due"].min()) if len(rows) else math.inf
