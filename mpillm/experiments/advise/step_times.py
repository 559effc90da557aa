"""Model of a step's time by its contents, and of the slowdown of instances that share CPU cores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEATURES = ("contexts", "context_tokens", "context_pairs", "generation_pairs")
"""Columns of `StepSums` in which a step's time is linear. The number of generating sequences is separate."""
_COUNTED = ("generations", *FEATURES)
_ROUNDS = 5  # of reweighting by the fit; weights by the measurement would favor steps that are too short
_MIN_STEPS = 10  # measured near a node


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of one layout. With several stages: from the end of one step to the end of the next.

    The time for generating sequences is piecewise linear in their number, with kinks at `nodes`: for example,
    matrix products of 4 and of 16 rows may take the same time, twice that of one row. The remaining time is
    linear in `FEATURES`.
    """

    nodes: tuple[int, ...]  # numbers of generating sequences
    at_nodes: tuple[float, ...]  # seconds
    slopes: tuple[float, ...]  # seconds for each of FEATURES
    alone: float = 1.0
    """Factor for steps that start while no other step is in flight, and so pass all stages first."""

    def seconds(self, contents: Sequence[float]) -> float:
        """Return the time of a step. `contents`: number of generating sequences, then `FEATURES`."""
        seconds = float(np.interp(contents[0], self.nodes, self.at_nodes))
        return seconds + sum(slope * value for slope, value in zip(self.slopes, contents[1:], strict=True))

    def scaled(self, factor: float) -> StepTimes:
        """Return the times with each step `factor` times as long."""
        at_nodes, slopes = (tuple(factor * x for x in times) for times in (self.at_nodes, self.slopes))
        return replace(self, at_nodes=at_nodes, slopes=slopes)


def fit(costs: Iterable[Mapping[str, Any]]) -> StepTimes:
    """Fit step times to the `StepSums` of some runs.

    Minimizes the squared errors relative to the fit, weighted by numbers of steps, without negative times.
    """
    contents, seconds, n = _rows(costs)
    nodes = _nodes(contents[:, 0], n)
    x = _columns(contents, nodes)
    expected = seconds
    for _ in range(_ROUNDS):
        weights = np.sqrt(n) / expected
        times = _not_negative(x * weights[:, None], seconds * weights)
        expected = np.maximum(x @ times, 1e-9)
    return StepTimes(nodes, tuple(times[: len(nodes)].tolist()), tuple(times[len(nodes) :].tolist()))


def _nodes(generations: NDArray[np.float64], n: NDArray[np.float64]) -> tuple[int, ...]:
    """Return the minimum and maximum sequences, and the powers of two with enough measured steps."""
    ends = math.floor(generations.min()), math.ceil(generations.max())
    powers = (2**i for i in range(ends[1].bit_length()))
    seen = (node for node in powers if n[abs(generations - node) <= node / 4].sum() >= _MIN_STEPS)
    return tuple(sorted({*ends, *seen}))


def _columns(contents: NDArray[np.float64], nodes: Sequence[int]) -> NDArray[np.float64]:
    """Return `contents` with its first column as interpolation weights of the nodes."""
    shares = [np.interp(contents[:, 0], nodes, node) for node in np.eye(len(nodes))]
    return np.column_stack([*shares, contents[:, 1:]])


def slowdown(times: StepTimes, costs: Iterable[Mapping[str, Any]]) -> float:
    """Return the ratio of the steps' measured time in `costs` to their time by `times`."""
    contents, seconds, n = _rows(costs)
    x = _columns(contents, times.nodes)
    expected = float((x @ np.array([*times.at_nodes, *times.slopes]) * n).sum())
    return float((seconds * n).sum()) / expected


def _rows(
    costs: Iterable[Mapping[str, Any]],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the contents per step (`_COUNTED`), seconds per step, and number of steps, by size."""
    tables = [np.array([one[name] for name in ("n", "seconds", *_COUNTED)], np.float64).T for one in costs]
    rows = np.concatenate([table for table in tables if len(table)])
    n = rows[:, 0]
    return rows[:, 2:] / n[:, None], rows[:, 1] / n, n


def _not_negative(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a least-squares solution without negative coefficients, by removing the most negative first."""
    scale = np.abs(x).max(axis=0)
    used = [i for i in range(x.shape[1]) if scale[i] > 0]
    coefficients = np.zeros(x.shape[1])
    while used:
        part = np.linalg.lstsq(x[:, used] / scale[used], y, rcond=None)[0]
        if part.min() >= 0:
            coefficients[used] = part / scale[used]
            break
        del used[int(part.argmin())]
    return coefficients


@dataclass(frozen=True)
class CoreSharing:
    """Slowdown of a rank's steps while other ranks compute on the same CPU cores."""

    max_ranks: int = 1  # ranks that computed concurrently in the calibration
    factor: float = 1.0  # with `max_ranks`

    def slowdown(self, busy: int, own: int) -> float:
        """Return the factor for the steps of an instance of `own` ranks while `busy` ranks compute.

        It is linear in the number of ranks.
        """
        return self._of(busy) / self._of(own)

    def _of(self, ranks: int) -> float:
        if self.max_ranks <= 1:
            return 1.0
        return 1 + (self.factor - 1) * (ranks - 1) / (self.max_ranks - 1)


ALONE = CoreSharing()


def shared(times: StepTimes, ranks: int, costs: Iterable[Mapping[str, Any]]) -> tuple[StepTimes, CoreSharing]:
    """Return the times of one rank alone, and the slowdown by `ranks` concurrent ranks.

    Ranks on the same CPU cores cannot make a rank faster. If the measurements show this, the machine was
    slower while one rank ran alone, and the concurrent steps determine its times.

    `times`: of one rank alone. `costs`: of all ranks together.
    """
    factor = slowdown(times, costs)
    return times.scaled(min(1.0, factor)), CoreSharing(ranks, max(1.0, factor))


@dataclass(frozen=True)
class LinearTime:
    """Seconds as a linear function of a number of tokens."""

    constant: float
    per_token: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.constant + self.per_token * tokens

    @staticmethod
    def through(tokens: Sequence[float], seconds: Sequence[float]) -> LinearTime:
        """Fit points with the median slope between any two points and the median intercept, neither negative.

        Robust against a few disturbed points (Theil 1950, Sen 1968).
        """
        x, y = np.array(tokens, np.float64), np.array(seconds, np.float64)
        i, j = np.nonzero(x[:, None] < x[None, :])
        slope = max(0.0, float(np.median((y[j] - y[i]) / (x[j] - x[i])))) if len(i) else 0.0
        return LinearTime(max(0.0, float(np.median(y - slope * x))), slope)


NO_TIME = LinearTime(0.0)
