"""The highest rate at which a Server test is VALID: the search, apart from how a test is run.

Short tests bracket the rate and halve the bracket; then tests of full length decide, because a short test is
over before a slow overload has filled the queue. The answer is bracketed at full length: VALID at the rate
found, and not VALID at most `tolerance` above it. LoadGen draws the same arrivals for each test, only faster,
so that neighbouring rates differ by the rate alone.
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
_MOST_HALVINGS = 14


@dataclass(frozen=True)
class Tried:
    """A test at a rate."""

    rate: float
    full: bool  # of full length
    valid: bool
    why: str = ""  # not VALID: LoadGen's reasons, or why it was stopped
    completed: float = 0.0  # answers per second
    folder: str = ""
    figures: dict[str, float] = field(default_factory=dict)  # of result.json; empty: it was stopped
    doubts: list[str] = field(default_factory=list)


Test = Callable[[float, bool], Tried]
"""Run a test at a rate, of full length or not."""


@dataclass(frozen=True)
class Found:
    """The answer: the confirming test, and the lowest rate at which a test of full length was not VALID."""

    best: Tried
    too_high: float


def find_max_rate(test: Test, start: float, tolerance: float) -> Found:
    """Search from the rate `start`. Raises StageError if no rate is VALID."""
    return _confirm(test, _valid(test, start, tolerance), tolerance)


def forecast(tests: Sequence[Tried], tolerance: float) -> tuple[int, int] | None:
    """Return how many tests a search will still take, short and full ones; None: nobody can tell yet.

    A full test that contradicts the short ones takes more.
    """
    short = _halvings([one for one in tests if not one.full], tolerance)
    full = _halvings([one for one in tests if one.full], tolerance)
    if any(one.full for one in tests):
        return 0, 1 if full is None else full
    return None if short is None else (short, 2)


def _halvings(tests: Sequence[Tried], tolerance: float) -> int | None:
    """Return how often the bracket of these tests is halved; None: they have none."""
    low = max((one.rate for one in tests if one.valid), default=0.0)
    high = min((one.rate for one in tests if not one.valid), default=math.inf)
    if not 0 < low < high < math.inf:
        return None
    wide = math.log(high / low) / math.log(1 + tolerance)
    return max(0, math.ceil(math.log2(wide) - 0.01))


def _valid(test: Test, start: float, tolerance: float) -> float:
    """Return a VALID rate at most `tolerance` from one that is not, by short tests."""
    low, high = 0.0, math.inf
    rate = start
    for _ in range(2 * _MOST_HALVINGS):
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
            # An overloaded system answers at its capacity.
            overloaded = 0.05 * rate < last.completed < 0.97 * rate
            rate = last.completed if overloaded else rate / _WIDEN
        if rate < start / 2**_MOST_HALVINGS:
            raise StageError(f"no rate is VALID, not even {figure(high, 4)} per second: {last.why}")
    if not low or high == math.inf:
        raise StageError(f"no limit was found: {figure(low, 4)} per second is VALID, as all below")
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        if test(middle, False).valid:
            low = middle
        else:
            high = middle
    return low


def _confirm(test: Test, rate: float, tolerance: float) -> Found:
    """Bracket the rate by tests of full length, from `rate` on."""
    best: Tried | None = None
    high = math.inf
    step = 1 + tolerance
    for _ in range(2 * _MOST_HALVINGS):
        tried = test(rate, True)
        if tried.valid:
            best = tried
        else:
            high = tried.rate
        if best is not None and high / best.rate <= 1 + 1.001 * tolerance:
            return Found(best, high)
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
            f"no test of full length is VALID, not even at {figure(high, 4)} per second: {tried.why}"
        )
    return Found(best, high)


class SearchRecord:
    """The tests of a search, each written when it has ended."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Read what an earlier search left in `folder`. Raises ConfigError.

        `about`: what must be the same.
        """
        self._path = folder / "search.json"
        self._about = dict(about)
        self.start: float | None = None  # the rate that the search begins at
        self.tests: list[Tried] = []
        if self._path.exists():
            said = read_object(self._path)
            with as_written(self._path):
                self.start = said["start"]
                self.tests = [Tried(**one) for one in said["tests"]]
            if said["about"] != self._about:
                raise ConfigError(
                    f"--log_dir {folder}: a search with other options began there ({self._path.name} says"
                    " with which); name another folder"
                )

    def begin(self, start: float) -> None:
        self.start = start
        self._write()

    def known(self, rate: float, full: bool) -> Tried | None:
        """Return the test at a rate that has ended already."""
        return next((one for one in self.tests if (one.rate, one.full) == (rate, full)), None)

    def add(self, tried: Tried) -> None:
        self.tests.append(tried)
        self._write()

    def best(self) -> Tried | None:
        """Return the test that was VALID at the highest rate; one of full length wins over a short one."""
        valid = [one for one in self.tests if one.valid]
        return max(valid, key=lambda one: (one.full, one.rate), default=None)

    def _write(self) -> None:
        tests = [asdict(one) for one in self.tests]
        write_json(self._path, {"about": self._about, "start": self.start, "tests": tests})
