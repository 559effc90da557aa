"""How long a step takes by what it holds, and how instances on the same cores slow each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEATURES = ("contexts", "context_tokens", "context_pairs", "generation_pairs")
"""Columns of `StepSums` that a step's time is linear in; its number of generating sequences comes besides."""
_COUNTED = ("generations", *FEATURES)
_ROUNDS = 5  # of reweighting: errors relative to what was measured would favour steps that took too short
_FEW = 10  # steps: so many must have been seen about a number of sequences


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of one layout.

    What its number of generating sequences takes lies on straight lines between the `nodes`, which are such
    numbers: matrix products of 4 and of 16 rows can take the same time, and twice that of one row. The rest
    is so much for each of `FEATURES`. Of several stages, which compute a step each, from the end of one step
    to that of the next.
    """

    nodes: tuple[int, ...]
    at_nodes: tuple[float, ...]  # seconds
    slopes: tuple[float, ...]  # seconds for each of FEATURES
    alone: float = 1.0
    """A factor on steps that begin while no other is in flight: they pass all stages before the next one."""

    def seconds(self, held: Sequence[float]) -> float:
        """Return the time of a step that holds this much: generating sequences, then `FEATURES`."""
        seconds = float(np.interp(held[0], self.nodes, self.at_nodes))
        return seconds + sum(slope * value for slope, value in zip(self.slopes, held[1:], strict=True))

    def scaled(self, factor: float) -> StepTimes:
        """Return the times of a machine on which each step takes `factor` times as long."""
        at_nodes, slopes = (tuple(factor * x for x in times) for times in (self.at_nodes, self.slopes))
        return replace(self, at_nodes=at_nodes, slopes=slopes)


def fit(costs: Iterable[Mapping[str, Any]]) -> StepTimes:
    """Return what fits the `StepSums` of some runs best.

    The least squares of errors relative to the fit, with no negative time; a size counts by its steps.
    """
    held, seconds, n = _rows(costs)
    nodes = _nodes(held[:, 0], n)
    x = _columns(held, nodes)
    expected = seconds
    for _ in range(_ROUNDS):
        weights = np.sqrt(n) / expected
        found = _not_negative(x * weights[:, None], seconds * weights)
        expected = np.maximum(x @ found, 1e-9)
    return StepTimes(nodes, tuple(found[: len(nodes)].tolist()), tuple(found[len(nodes) :].tolist()))


def _nodes(generations: NDArray[np.float64], n: NDArray[np.float64]) -> tuple[int, ...]:
    """Return the fewest sequences, the powers of two about which steps were seen, and the most sequences."""
    ends = math.floor(generations.min()), math.ceil(generations.max())
    powers = (2**i for i in range(ends[1].bit_length()))
    seen = (node for node in powers if n[abs(generations - node) <= node / 4].sum() >= _FEW)
    return tuple(sorted({*ends, *seen}))


def _columns(held: NDArray[np.float64], nodes: Sequence[int]) -> NDArray[np.float64]:
    """Return `held` with its first column as shares of the two nodes that it lies between."""
    shares = [np.interp(held[:, 0], nodes, node) for node in np.eye(len(nodes))]
    return np.column_stack([*shares, held[:, 1:]])


def slowdown(times: StepTimes, costs: Iterable[Mapping[str, Any]]) -> float:
    """Return how many times as long the steps in `costs` took as `times` says."""
    held, seconds, n = _rows(costs)
    x = _columns(held, times.nodes)
    expected = float((x @ np.array([*times.at_nodes, *times.slopes]) * n).sum())
    return float((seconds * n).sum()) / expected


def _rows(
    costs: Iterable[Mapping[str, Any]],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return what steps held, `_COUNTED` per step, their seconds, and how many they were, by size."""
    tables = [np.array([one[name] for name in ("n", "seconds", *_COUNTED)], np.float64).T for one in costs]
    rows = np.concatenate([table for table in tables if len(table)])
    n = rows[:, 0]
    return rows[:, 2:] / n[:, None], rows[:, 1] / n, n


def _not_negative(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least squares solution without negative coefficients: the most negative one goes first."""
    scale = np.abs(x).max(axis=0)
    used = [i for i in range(x.shape[1]) if scale[i] > 0]
    found = np.zeros(x.shape[1])
    while used:
        part = np.linalg.lstsq(x[:, used] / scale[used], y, rcond=None)[0]
        if part.min() >= 0:
            found[used] = part / scale[used]
            break
        del used[int(part.argmin())]
    return found


@dataclass(frozen=True)
class Sharing:
    """How much longer a rank's steps take while others compute beside it on the same cores."""

    most: int = 1  # ranks that computed at once in the calibration
    factor: float = 1.0  # then

    def slowdown(self, busy: int, own: int) -> float:
        """Return the factor on the steps of an instance of `own` ranks while `busy` ranks compute.

        Between one rank and `most` it grows by the same amount with each.
        """
        return self._of(busy) / self._of(own)

    def _of(self, ranks: int) -> float:
        if self.most <= 1:
            return 1.0
        return 1 + (self.factor - 1) * (ranks - 1) / (self.most - 1)


ALONE = Sharing()


def shared(times: StepTimes, ranks: int, beside: Iterable[Mapping[str, Any]]) -> tuple[StepTimes, Sharing]:
    """Return the times of one rank alone, and of `ranks` at once, from its own and from steps of all at once.

    Nobody gets faster by others on its cores. Where it seems so, the machine was slower while one ran alone:
    then its steps are those of all at once.
    """
    factor = slowdown(times, beside)
    return times.scaled(min(1.0, factor)), Sharing(ranks, max(1.0, factor))


@dataclass(frozen=True)
class Line:
    """A time that grows with a number of tokens: seconds."""

    constant: float
    per_token: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.constant + self.per_token * tokens

    @staticmethod
    def through(tokens: Sequence[float], seconds: Sequence[float]) -> Line:
        """Return the line that half of the points are above, with the median slope between any two.

        A few disturbed points do not move it (Theil 1950, Sen 1968). Neither part is negative.
        """
        x, y = np.array(tokens, np.float64), np.array(seconds, np.float64)
        i, j = np.nonzero(x[:, None] < x[None, :])
        slope = max(0.0, float(np.median((y[j] - y[i]) / (x[j] - x[i])))) if len(i) else 0.0
        return Line(max(0.0, float(np.median(y - slope * x))), slope)


NO_TIME = Line(0.0)
