"""How long a step takes by what it holds, and how instances on the same cores slow each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEATURES = ("contexts", "context_tokens", "context_pairs", "generations", "generation_pairs")
"""Columns of `StepSums` that a step's time is linear in, besides a constant."""
_ROUNDS = 5  # of reweighting: errors relative to what was measured would favour steps that took too short


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of one layout: a constant, and so much for each of `FEATURES`.

    Of several stages, which compute a step each, from the end of one step to that of the next.
    """

    coefficients: tuple[float, ...]
    alone: float = 1.0
    """A factor on steps that begin while no other is in flight: they pass all stages before the next one."""

    def seconds(self, held: Sequence[float]) -> float:
        """Return the time of a step that holds this much: the values of `FEATURES`."""
        constant, *slopes = self.coefficients
        return constant + sum(slope * value for slope, value in zip(slopes, held, strict=True))


def fit(costs: Iterable[Mapping[str, Any]]) -> StepTimes:
    """Return what fits the `StepSums` of some runs best.

    The least squares of errors relative to the fit, with coefficients of at least 0; a size counts by its
    steps.
    """
    x, seconds, n = _rows(costs)
    expected = seconds
    for _ in range(_ROUNDS):
        weights = np.sqrt(n) / expected
        found = _not_negative(x * weights[:, None], seconds * weights)
        expected = np.maximum(x @ found, 1e-9)
    return StepTimes(tuple(found.tolist()))


def slowdown(times: StepTimes, costs: Iterable[Mapping[str, Any]]) -> float:
    """Return how many times as long the steps in `costs` took as `times` says; at least 1."""
    x, seconds, n = _rows(costs)
    expected = float((x @ np.array(times.coefficients) * n).sum())
    return max(1.0, float((seconds * n).sum()) / expected)


def _rows(
    costs: Iterable[Mapping[str, Any]],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return a constant and `FEATURES` per step, seconds per step, and how many steps, by size."""
    tables = [np.array([one[name] for name in ("n", "seconds", *FEATURES)], np.float64).T for one in costs]
    rows = np.concatenate([table for table in tables if len(table)])
    n = rows[:, 0]
    return np.column_stack([np.ones(len(n)), rows[:, 2:] / n[:, None]]), rows[:, 1] / n, n


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
