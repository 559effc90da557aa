"""Search for the highest rate at which a Server test is VALID. `rate_tests` runs the tests.

Short tests bracket the rate and halve the bracket. Then full-length tests decide, because a short test ends
before a slow overload fills the queue. The result is bracketed at full length: a VALID rate, and a rate at
most `tolerance` higher that is not VALID. LoadGen scales one arrival sequence to every rate, so tests only
differ by their rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.errors import StageError
from mpillm.experiments.table import figure
from mpillm.files import as_written, read_object, write_json

_WIDEN = 2.0
_MAX_HALVINGS = 14


@dataclass(frozen=True)
class RateTrial:
    """A test at a rate."""

    rate: float
    full: bool  # full length
    valid: bool
    why: str = ""  # if not VALID: LoadGen's reasons, or why the test was stopped
    completed: float = 0.0  # answers per second
    folder: str = ""
    figures: dict[str, float] = field(default_factory=dict)  # of result.json; empty if the test was stopped
    doubts: list[str] = field(default_factory=list)


Test = Callable[[float, bool], RateTrial]
"""Runs a test at a rate, full-length or short."""


@dataclass(frozen=True)
class SearchResult:
    """The confirming test, and the lowest rate at which a full-length test was not VALID."""

    best: RateTrial
    too_high: float


def find_max_rate(test: Test, start: float, tolerance: float) -> SearchResult:
    """Search from the rate `start`. Raises StageError if no rate is VALID."""
    return _confirm(test, _valid(test, start, tolerance), tolerance)


def forecast(tests: Sequence[RateTrial], tolerance: float) -> tuple[int, int] | None:
    """Return the remaining short and full-length tests of a search; None if still unknown.

    A full-length test that contradicts the short tests requires more.
    """
    short = _halvings([one for one in tests if not one.full], tolerance)
    full = _halvings([one for one in tests if one.full], tolerance)
    if any(one.full for one in tests):
        return 0, 1 if full is None else full
    return None if short is None else (short, 2)


def _halvings(tests: Sequence[RateTrial], tolerance: float) -> int | None:
    """Return the remaining halvings of the tests' bracket; None if they have none."""
    low = max((one.rate for one in tests if one.valid), default=0.0)
    high = min((one.rate for one in tests if not one.valid), default=math.inf)
    if not 0 < low < high < math.inf:
        return None
    wide = math.log(high / low) / math.log(1 + tolerance)
    return max(0, math.ceil(math.log2(wide) - 0.01))


def _valid(test: Test, start: float, tolerance: float) -> float:
    """Return a VALID rate at most `tolerance` below a rate that is not VALID, by short tests."""
    low, high = 0.0, math.inf
    rate = start
    for _ in range(2 * _MAX_HALVINGS):
        last = test(rate, False)
        if last.valid:
            low = rate
        else:
            high = rate
        if low and high < math.inf:
            break
        if low:
            rate = _WIDEN * low
        else:
            # An overloaded system completes requests at its capacity.
            overloaded = 0.05 * rate < last.completed < 0.97 * rate
            rate = last.completed if overloaded else rate / _WIDEN
        if rate < start / 2**_MAX_HALVINGS:
            raise StageError(f"no rate is VALID, not even {figure(high, 4)} per second: {last.why}")
    if not low or high == math.inf:
        raise StageError(f"no limit was found: {figure(low, 4)} per second and all lower rates are VALID")
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        if test(middle, False).valid:
            low = middle
        else:
            high = middle
    return low


def _confirm(test: Test, rate: float, tolerance: float) -> SearchResult:
    """Bracket the rate by full-length tests, starting at `rate`."""
    best: RateTrial | None = None
    high = math.inf
    step = 1 + tolerance
    for _ in range(2 * _MAX_HALVINGS):
        last = test(rate, True)
        if last.valid:
            best = last
        else:
            high = last.rate
        if best is not None and high / best.rate <= 1 + 1.001 * tolerance:
            return SearchResult(best, high)
        if best is None:
            rate = high / step
        elif high == math.inf:
            rate = best.rate * step
        else:
            rate = math.sqrt(best.rate * high)
        if best is None or high == math.inf:
            step = min(step**2, _WIDEN)
    if best is None:
        raise StageError(
            f"no test of full length is VALID, not even at {figure(high, 4)} per second: {last.why}"
        )
    return SearchResult(best, high)


class SearchRecord:
    """Tests of a search, written to a file after each test."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Read the record of an earlier search in `folder`. Raises ConfigError.

        `about`: settings that must be equal.
        """
        self._path = folder / "search.json"
        self._about = dict(about)
        self.start: float | None = None  # initial rate
        self.tests: list[RateTrial] = []
        if self._path.exists():
            record = read_object(self._path)
            with as_written(self._path):
                self.start = record["start"]
                self.tests = [RateTrial(**one) for one in record["tests"]]
            if record["about"] != self._about:
                raise ConfigError(
                    f"--log_dir {folder}: a search with other options began there ({self._path.name} lists"
                    " them); name another folder"
                )

    def begin(self, start: float) -> None:
        self.start = start
        self._write()

    def known(self, rate: float, full: bool) -> RateTrial | None:
        """Return the completed test at a rate, if any."""
        return next((one for one in self.tests if (one.rate, one.full) == (rate, full)), None)

    def add(self, trial: RateTrial) -> None:
        self.tests.append(trial)
        self._write()

    def best(self) -> RateTrial | None:
        """Return the VALID test with the highest rate; full-length tests take precedence over short ones."""
        valid = [one for one in self.tests if one.valid]
        return max(valid, key=lambda one: (one.full, one.rate), default=None)

    def _write(self) -> None:
        tests = [asdict(one) for one in self.tests]
        write_json(self._path, {"about": self._about, "start": self.start, "tests": tests})
