"""Points of a curve that MLCommons' client measures: the number of its requests, and their times."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mpillm.errors import StageError
from mpillm.programs.load_clients.inference_endpoint import CONFIG_LEFT, SUMMARY_LEFT
from mpillm.programs.load_clients.kind import LoadReport, LoadSpec, RequestRecord, Seeds
from mpillm.submission import client_points
from mpillm.submission.steady_state import find_steady_state

REQUEST_S = 0.1  # a request of this client; they follow each other
SIZE = 20  # samples of its data set; a pass takes 2 s


def load_of(folder: Path, concurrency: int | None = 1) -> LoadSpec:
    nothing = cast(Any, None)
    more = (None, concurrency, 0.0, 0, 1.0, 0, Seeds(1, 2, 3))
    return LoadSpec(("http://h:1",), "m", "", folder / "client", nothing, (), (), range(SIZE), *more)


class Measurement:
    """A point by a client, with `tpot(i)` for the requests of pass i."""

    def __init__(
        self,
        folder: Path,
        tpot: Callable[[int], float],
        min_s: float,
        max_s: float,
        *,
        times: bool = True,
        lasts_s: float | None = None,
        concurrency: int | None = 1,
    ) -> None:
        """`times`: of the requests are known. `lasts_s`: of each test, whatever its requests."""
        self.passes: list[int] = []  # of each test
        self._tpot, self._times, self._lasts_s = tpot, times, lasts_s
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client_points, "run_client", self._run)
            load = load_of(folder, concurrency)
            self.point = client_points.measured_point(load, folder, min_s, max_s, 1 / REQUEST_S)
        assert json.loads((folder / "result_summary.json").read_text()) == self.point.summary
        if self.point.passes:
            self.state = find_steady_state(self.point.passes.complete(), SIZE, min_s)

    def _run(self, load: LoadSpec, log: Path) -> LoadReport:
        n = len(load.order)
        assert n % SIZE == 0, "whole passes (rules, 6.4)"
        self.passes.append(n // SIZE)
        (load.folder / SUMMARY_LEFT).parent.mkdir(parents=True)
        summary = {"duration_ns": self._lasted(n) * 1e9, "n_samples_issued": n}
        (load.folder / SUMMARY_LEFT).write_text(json.dumps(summary))
        (load.folder / CONFIG_LEFT).write_text("{}")
        if not self._times:
            return LoadReport("1", n, 0, self._lasted(n))
        records = []
        for i in range(n):
            first = REQUEST_S * i + 0.01
            tokens_s = 9 * self._tpot(i // SIZE)
            records.append(RequestRecord(REQUEST_S * i, first, first + tokens_s, i % SIZE, 10))
        # The client writes them as they end, in another order.
        return LoadReport("1", n, 0, self._lasted(n), requests=records[::-1])

    def _lasted(self, n: int) -> float:
        return n * REQUEST_S if self._lasts_s is None else self._lasts_s


def even(_: int) -> float:
    return 0.001


def test_enough_passes_for_a_steady_state(tmp_path: Path) -> None:
    short = Measurement(tmp_path, even, 6, 100)
    assert short.passes == [5] and short.state.is_official, "four, and one for the ramp"
    long = Measurement(tmp_path, even, 60, 200)
    assert long.passes == [40] and long.state.is_official, "1.3 x 60 s, and one"


def test_a_plateau_that_is_too_short_is_measured_again(tmp_path: Path) -> None:
    """The client takes a number of requests. Here, the level changes after 18 passes."""

    def late(i: int) -> float:
        return 0.0005 if i < 18 else 0.001

    again = Measurement(tmp_path, late, 60, 400)
    assert len(again.passes) == 2 and again.passes[0] < again.passes[1] and again.state.is_official
    short = Measurement(tmp_path, late, 60, 85)
    assert max(short.passes) * SIZE * REQUEST_S <= 85 + SIZE * REQUEST_S, "the longest time"
    assert short.state.status == "insufficient_duration"


def test_more_requests_do_not_help_against_a_drift(tmp_path: Path) -> None:
    drift = Measurement(tmp_path, lambda i: 0.001 * 1.1**i, 6, 100)
    assert drift.passes == [5] and drift.state.status == "insufficient_passes"
    brief = Measurement(tmp_path, even, 3, 5)
    assert brief.passes == [3] and brief.state.status == "insufficient_passes", "5 s allow no five passes"


def test_without_times_of_requests_the_duration_decides(tmp_path: Path) -> None:
    point = Measurement(tmp_path, even, 60, 200, times=False)
    assert point.point.passes is None and point.passes == [40]


def test_offline_takes_the_duration_alone(tmp_path: Path) -> None:
    """All requests are sent together, so there is no issue time and no steady state."""
    assert Measurement(tmp_path, lambda i: 0.001 * 1.1**i, 60, 200, concurrency=None).passes == [40]


def test_a_failed_request_has_no_times(tmp_path: Path) -> None:
    records = [RequestRecord(1.0, 1.1, 2.0, 0, 10), RequestRecord(0.0, math.nan, 0.5, 1, 0, "500: no")]
    passes = client_points.client_passes(LoadReport("1", 1, 1, 2.0, requests=records), 2)
    assert passes is not None
    (only,) = passes.complete()
    assert (only.ended, only.completed, only.tokens, only.first) == (2, 1, 10, 0.0)
    assert only.tpot == [pytest.approx(0.1)]


def test_a_client_that_is_always_too_fast_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="passes over the data set would still take less than 60 s"):
        Measurement(tmp_path, even, 60, 200, times=False, lasts_s=1)
