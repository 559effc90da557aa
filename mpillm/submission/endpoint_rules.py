"""Rules of MLPerf Endpoints for a curve: points, regions, durations.

Source: MLCommons' endpoints-submission-cli 1.5.3, and the paragraphs of the rules in its checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError

ULTRA_LOW = 32
"""Maximum of a curve's lowest concurrency. Up to it, a point takes 600 s."""

MIN_POINTS = 7
"""Minimum points of a curve without a separate Offline run."""

MAX_POINTS = 32
"""Maximum points of a curve (§5.6)."""

OFFLINE_MARGIN = 0.98
"""Minimum throughput of a separate Offline run, relative to the last point's (§5.7.2)."""

DIVISIONS = ("Standardized", "Serviced", "RDI")
_SHORT_S, _LONG_S = 600.0, 1200.0


@dataclass(frozen=True)
class Regions:
    """Ends of a curve's regions; each region begins after the previous one."""

    low_latency: int
    low_concurrency: int
    med_concurrency: int
    high_concurrency: int

    @staticmethod
    def of(c_max: int, c_min: int) -> Regions:
        """Cut a curve into regions, by thirds of a logarithm (§5.5). Raises ConfigError out of range."""
        if c_max <= ULTRA_LOW:
            raise ConfigError(f"--max_supported_concurrency {c_max}: must be more than {ULTRA_LOW}")
        if not 1 <= c_min <= ULTRA_LOW:
            raise ConfigError(f"--concurrency: the lowest is {c_min}; must be 1 to {ULTRA_LOW}")
        third = math.log2(c_max - c_min) / 3
        return Regions(c_min, round(c_min + 2**third), round(c_min + 2 ** (2 * third)), c_max)

    def region(self, concurrency: int) -> str | None:
        """Return the name of a concurrency's region; None above the curve."""
        for name, end in vars(self).items():
            if concurrency <= end:
                return str(name)
        return None

    def uncovered(self, concurrencies: Sequence[int]) -> list[str]:
        """Return a line for each region without a point; a submission needs one in each (§5.3)."""
        covered, first, lines = {self.region(c) for c in concurrencies}, 1, []
        for name, end in vars(self).items():
            if name not in covered and first <= end:
                lines.append(f"no point in {name} (concurrency {first} to {end}): a submission needs one")
            first = end + 1
        return lines

    def accuracy_points(
        self,
        concurrencies: Sequence[int],
        offline_run: bool = False,
        scored: Set[int] = frozenset(),
    ) -> list[int]:
        """Return the points whose accuracy is measured, exactly one in each region (§4.3, §5.7.2).

        Without a separate Offline run, the last one is at the curve's end and also counts for Offline.

        Args:
            scored: Points that have an accuracy result. They are chosen.

        Raises: ConfigError if two of them are in one region.
        """
        elected = None if offline_run else max(concurrencies)
        chosen: dict[str | None, int] = {}
        for c in sorted(concurrencies):
            region = self.region(c)
            earlier = chosen.get(region)
            if c in scored and earlier in scored and c != elected:
                raise ConfigError(
                    f"r{earlier} and r{c} have accuracy results in {region}, and the rules (4.3) allow one:"
                    " remove the accuracy_results.json of one of them"
                )
            if earlier is None or (c in scored and earlier not in scored):
                chosen[region] = c
        if elected is not None:
            chosen[self.region(elected)] = elected
        return sorted(chosen.values())


def default_points(c_max: int) -> list[int]:
    """Return logarithmically spaced concurrencies in all regions."""
    return sorted({round(c) for c in np.geomspace(1, c_max, MIN_POINTS)})


def min_duration_s(concurrency: int) -> float:
    """Return the minimum duration of a point (§6.2)."""
    return _SHORT_S if concurrency <= ULTRA_LOW else _LONG_S


def warm_up_prompts(
    tokens: NDArray[np.int32], lengths: NDArray[np.int64], n: int, seed: int
) -> list[NDArray[np.int32]]:
    """Return `n` random prompts with lengths and tokens from a data set.

    The data set's own prompts are not allowed for warm-up (§6.3.1). Its tokens are in the model's vocabulary.
    """
    random = np.random.default_rng(seed)
    known = np.unique(tokens)
    return [random.choice(known, length) for length in random.choice(lengths, n)]


def sample_order(n: int, seed: int) -> Iterator[int]:
    """Yield the indices of all samples repeatedly, each time in another random order."""
    random = np.random.default_rng(seed)
    while True:
        yield from random.permutation(n).tolist()
