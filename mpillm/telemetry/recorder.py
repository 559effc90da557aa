"""When a rank computed, and what: spans of time, in constant memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

COLUMNS = (
    "n",  # steps
    "seconds",  # of all of them
    "contexts",  # sequences that computed context, summed over the steps
    "context_tokens",
    "context_pairs",  # pairs of a context's token and one that it attends to
    "generations",  # sequences that generated a token
    "generation_pairs",
)


class StepSums:
    """Sums over steps, a row of `COLUMNS` for each size.

    A size is the number of contexts' tokens and of generating sequences, each to about an eighth, and of
    what these attend to, to about a quarter: answers that begin together grow together, and only the steps of
    one number of sequences tell what their length costs. A step that follows another at once counts from that
    one's end, so that what is done between steps is in it.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, int], list[float]] = {}

    def add(
        self,
        seconds: float,
        contexts: int,
        generations: int,
        context_tokens: int,
        context_pairs: int,
        generation_pairs: int,
    ) -> None:
        """Add a step."""
        size = _size(context_tokens), _size(generations), _size(generation_pairs, bits=3)
        row = self._rows.get(size)
        if row is None:
            row = self._rows[size] = [0.0] * len(COLUMNS)
        row[0] += 1
        row[1] += seconds
        row[2] += contexts
        row[3] += context_tokens
        row[4] += context_pairs
        row[5] += generations
        row[6] += generation_pairs

    def to_json(self) -> dict[str, list[float]]:
        """Return the rows as columns, by name."""
        rows = [self._rows[size] for size in sorted(self._rows)]
        return {name: [round(row[i], 6) for row in rows] for i, name in enumerate(COLUMNS)}


def _size(n: int, bits: int = 4) -> int:
    """Return the first `bits` bits: the same for counts that differ by less than an eighth, or a quarter."""
    shift = max(0, n.bit_length() - bits)
    return n >> shift << shift


Kind = Literal["context", "decode", "mixed", "busy", "handoff"]
KINDS: tuple[Kind, ...] = ("context", "decode", "mixed", "busy", "handoff")
"""A step with contexts only, with generating sequences only, or with both (or such steps together); requests
in a core that does not tell its steps; KV caches under way."""

_MIXED = KINDS.index("mixed")
_SPAN = np.dtype([("start", "f8"), ("end", "f8"), ("busy", "f4"), ("n", "u4"), ("kind", "u1")])
_MOST_SPANS = 4096
_MOST_OF_ALL_RANKS = 400_000


class Lane:
    """Spans in their order. Once full, neighbours become one, which keeps how long they were busy."""

    def __init__(self, most: int = _MOST_SPANS) -> None:
        self._rows = np.zeros(most, _SPAN)
        self._n = 0
        self._bin_s = 0.0  # spans that start in the same bin are one; 0: each is its own

    def __len__(self) -> int:
        return self._n

    def add(self, kind: Kind, start: float, end: float) -> None:
        """Add a span that starts no earlier than the last one."""
        if self._bin_s and self._n:
            last = self._rows[self._n - 1]
            if int(last["start"] / self._bin_s) == int(start / self._bin_s):
                last["end"] = max(last["end"], end)
                last["busy"] += end - start
                last["n"] += 1
                if last["kind"] != KINDS.index(kind):
                    last["kind"] = _MIXED
                return
        if self._n == len(self._rows):
            self._halve(len(self._rows) // 2)
        self._rows[self._n] = start, end, end - start, 1, KINDS.index(kind)
        self._n += 1

    def _halve(self, most: int) -> None:
        rows = self._rows[: self._n]
        self._bin_s = max(2 * self._bin_s, (rows["end"][-1] - rows["start"][0]) / most / 2, 1e-6)
        while (merged := _merged(rows, self._bin_s)) is None or len(merged) > most:
            self._bin_s *= 2
        self._n = len(merged)
        self._rows[: self._n] = merged

    def to_json(self, since: float, most: int = _MOST_SPANS) -> dict[str, list[Any]]:
        """Return columns: start and end in seconds after `since`, busy seconds, steps, kind (of `KINDS`)."""
        if self._n > most:
            self._halve(most)
        rows = self._rows[: self._n]
        return {
            "start": np.round(rows["start"] - since, 5).tolist(),
            "end": np.round(rows["end"] - since, 5).tolist(),
            "busy_s": np.round(rows["busy"].astype(np.float64), 5).tolist(),
            "n": rows["n"].tolist(),
            "kind": rows["kind"].tolist(),
        }


def _merged(rows: NDArray[np.void], bin_s: float) -> NDArray[np.void]:
    bins = (rows["start"] / bin_s).astype(np.int64)
    starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
    merged: NDArray[np.void] = rows[starts].copy()
    merged["end"] = np.maximum.reduceat(rows["end"], starts)
    merged["busy"] = np.add.reduceat(rows["busy"], starts)
    merged["n"] = np.add.reduceat(rows["n"], starts)
    least, greatest = np.minimum.reduceat(rows["kind"], starts), np.maximum.reduceat(rows["kind"], starts)
    merged["kind"] = np.where(least == greatest, least, _MIXED)
    return merged


class Spell:
    """A state that comes and goes; each time it held becomes a span."""

    def __init__(self, ended: Callable[[float, float], None]) -> None:
        """`ended(start, end)` takes it."""
        self._ended = ended
        self._since: float | None = None

    def see(self, holds: bool, now: float) -> None:
        """Note whether it holds now."""
        if holds != (self._since is not None):
            if self._since is not None:
                self._ended(self._since, now)
            self._since = now if holds else None

    def cut(self, now: float) -> None:
        """Make a span of the time until now, if it holds."""
        if self._since is not None:
            self._ended(self._since, now)
            self._since = now


class Recorder:
    """What one rank did; its memory does not grow with the test. Times are of `time.perf_counter`."""

    def __init__(self) -> None:
        self.steps, self.handoffs = Lane(), Lane()
        self.costs = StepSums()  # on ranks that lead an instance whose core tells its steps
        self.phases: list[tuple[str, float, float]] = []
        self.context_s = self.decode_s = self.busy_s = self.handoff_s = 0.0
        self.knows_steps = False
        self._spells: list[Spell] = []

    def spell(self, ended: Callable[[float, float], None]) -> Spell:
        """Return a spell whose last span counts, too, if it goes on when this rank tells what it did."""
        self._spells.append(Spell(ended))
        return self._spells[-1]

    def step(self, start: float, end: float, contexts: int, generations: int, context_tokens: int) -> None:
        """Note a step of the engine: how many sequences it held, and how many tokens of contexts.

        The time of a mixed step counts for each by its tokens.
        """
        self.knows_steps = True
        share = context_tokens / ((context_tokens + generations) or 1)
        self.context_s += share * (end - start)
        self.decode_s += (1 - share) * (end - start)
        kind: Kind = "decode" if not contexts else "mixed" if generations else "context"
        self.steps.add(kind, start, end)

    def busy(self, kind: Kind, start: float, end: float) -> None:
        """Note when requests were open in a core that does not tell its steps."""
        if kind == "context":
            self.context_s += end - start
        elif kind == "decode":
            self.decode_s += end - start
        else:
            self.busy_s += end - start
        self.steps.add(kind, start, end)

    def handoff(self, start: float, end: float) -> None:
        """Note when KV caches were under way."""
        self.handoff_s += end - start
        self.handoffs.add("handoff", start, end)

    def to_json(self, since: float, n_ranks: int) -> dict[str, Any]:
        """Return all of it, in seconds after `since`; less of each rank where there are many."""
        now = time.perf_counter()
        for spell in self._spells:  # of a test that was stopped
            spell.cut(now)
        most = max(64, min(_MOST_SPANS, _MOST_OF_ALL_RANKS // n_ranks))
        phases = [[name, round(start - since, 4), round(end - since, 4)] for name, start, end in self.phases]
        lanes = {"steps": self.steps.to_json(since, most), "handoffs": self.handoffs.to_json(since, most)}
        known = {"phases": phases, "knows_steps": self.knows_steps}
        return known | lanes | {"costs": self.costs.to_json()}
