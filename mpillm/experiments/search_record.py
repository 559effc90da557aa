"""What a search for a rate has found so far: a file, with which it goes on after Ctrl-C."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.experiments.rate_search import Tried
from mpillm.files import as_written, read_object, write_json


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
