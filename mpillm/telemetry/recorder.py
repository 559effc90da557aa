"""Spans of a rank's computation, recorded in constant memory."""

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

    A size consists of the numbers of context tokens and of generating sequences, each rounded to an eighth,
    and of the tokens that the sequences attend to, rounded to a quarter. Responses that begin together grow
    together, so only steps with an equal number of sequences show the cost of their length. A step that
    immediately follows another one counts from the end of that step. So it includes the time between steps.
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
Clock = Callable[[], float]
KINDS: tuple[Kind, ...] = ("context", "decode", "mixed", "busy", "handoff")
"""Steps with contexts, with generating sequences, or with both (or merged). "busy": open requests in a core
that does not report its steps. "handoff": KV caches in transfer."""

_MIXED = KINDS.index("mixed")
_SPAN = np.dtype([("start", "f8"), ("end", "f8"), ("busy", "f4"), ("n", "u4"), ("kind", "u1")])
_MAX_SPANS = 4096
_MAX_OF_ALL_RANKS = 400_000


class SpanTrack:
    """Spans in their order. A full track merges neighboring spans, and keeps their total busy time."""

    def __init__(self, max_spans: int = _MAX_SPANS) -> None:
        self._rows = np.zeros(max_spans, _SPAN)
        self._n = 0
        self._bin_s = 0.0  # spans that start in the same bin are merged; 0: none are

    def __len__(self) -> int:
        return self._n

    def add(self, kind: Kind, start: float, end: float) -> None:
        """Add a span. It must not start before the last one."""
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
            self._condense(len(self._rows) // 2)
        self._rows[self._n] = start, end, end - start, 1, KINDS.index(kind)
        self._n += 1

    def _condense(self, max_spans: int) -> None:
        rows = self._rows[: self._n]
        self._bin_s = max(2 * self._bin_s, (rows["end"][-1] - rows["start"][0]) / max_spans / 2, 1e-6)
        while (merged := _merged(rows, self._bin_s)) is None or len(merged) > max_spans:
            self._bin_s *= 2
        self._n = len(merged)
        self._rows[: self._n] = merged

    def to_json(self, since: float, max_spans: int = _MAX_SPANS) -> dict[str, list[Any]]:
        """Return columns: start and end in seconds after `since`, busy seconds, steps, kind (of `KINDS`)."""
        if self._n > max_spans:
            self._condense(max_spans)
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
    first, last = np.minimum.reduceat(rows["kind"], starts), np.maximum.reduceat(rows["kind"], starts)
    merged["kind"] = np.where(first == last, first, _MIXED)
    return merged


class SpanTracker:
    """Converts the periods of a state to spans."""

    def __init__(self, ended: Callable[[float, float], None]) -> None:
        """`ended(start, end)` receives each span."""
        self._ended = ended
        self._since: float | None = None

    def update(self, holds: bool, now: float) -> None:
        """Note whether the state holds now."""
        if holds != (self._since is not None):
            if self._since is not None:
                self._ended(self._since, now)
            self._since = now if holds else None

    def flush(self, now: float) -> None:
        """End a span now, if the state holds, and start the next one."""
        if self._since is not None:
            self._ended(self._since, now)
            self._since = now


class Recorder:
    """Record of one rank, in constant memory. Times are of `clock`."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self.steps, self.handoffs = SpanTrack(), SpanTrack()
        self.costs = StepSums()  # on root ranks whose core reports its steps
        self.phases: list[tuple[str, float, float]] = []
        self.context_s = self.decode_s = self.busy_s = self.handoff_s = 0.0
        self.has_steps = False
        self._trackers: list[SpanTracker] = []

    def track(self, ended: Callable[[float, float], None]) -> SpanTracker:
        """Return a tracker. `to_json` also includes its unfinished span."""
        self._trackers.append(SpanTracker(ended))
        return self._trackers[-1]

    def step(self, start: float, end: float, contexts: int, generations: int, context_tokens: int) -> None:
        """Add a step of the engine, with its numbers of sequences and of context tokens.

        The time of a mixed step is divided between the phases by their tokens.
        """
        self.has_steps = True
        share = context_tokens / ((context_tokens + generations) or 1)
        self.context_s += share * (end - start)
        self.decode_s += (1 - share) * (end - start)
        kind: Kind = "decode" if not contexts else "mixed" if generations else "context"
        self.steps.add(kind, start, end)

    def busy(self, kind: Kind, start: float, end: float) -> None:
        """Add a time with open requests in a core that does not report its steps."""
        if kind == "context":
            self.context_s += end - start
        elif kind == "decode":
            self.decode_s += end - start
        else:
            self.busy_s += end - start
        self.steps.add(kind, start, end)

    def handoff(self, start: float, end: float) -> None:
        """Add a time with KV caches in transfer."""
        self.handoff_s += end - start
        self.handoffs.add("handoff", start, end)

    def to_json(self, since: float, n_ranks: int) -> dict[str, Any]:
        """Return the record, in seconds after `since`. With many ranks, there are fewer spans of each."""
        now = self._clock()
        for tracker in self._trackers:  # of a stopped test
            tracker.flush(now)
        max_spans = max(64, min(_MAX_SPANS, _MAX_OF_ALL_RANKS // n_ranks))
        phases = [[name, round(start - since, 4), round(end - since, 4)] for name, start, end in self.phases]
        tracks = {
            "steps": self.steps.to_json(since, max_spans),
            "handoffs": self.handoffs.to_json(since, max_spans),
        }
        common = {"phases": phases, "knows_steps": self.has_steps}
        return common | tracks | {"costs": self.costs.to_json()}
