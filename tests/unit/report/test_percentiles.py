"""Percentiles of a client's requests: one definition, and none of too few requests."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mpillm.loadgen.logs import quantile
from mpillm.report.page.run_analysis import Facts
from mpillm.report.page.sections import figures, tiles
from mpillm.report.percentiles import enough, percentiles_ms, too_few
from mpillm.report.result import other_harness_rows
from mpillm.report.run_files import RunFiles


@pytest.mark.parametrize(
    ("n", "unknown"),
    [
        (1, ["p50", "p90", "p99"]),
        (2, ["p90", "p99"]),
        (9, ["p90", "p99"]),
        (10, ["p99"]),
        (99, ["p99"]),
        (100, []),
        (1000, []),
    ],
)
def test_percentiles_are_loadgens_and_need_requests(n: int, unknown: list[str]) -> None:
    seconds = np.random.default_rng(n).exponential(size=n)
    found = percentiles_ms([*seconds, math.nan])
    assert found is not None and [name for name, ms in found.items() if ms is None] == unknown
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        if name not in unknown:
            assert found[name] == pytest.approx(1e3 * quantile(seconds, q), abs=1e-4)
    assert found["mean"] == pytest.approx(1e3 * seconds.mean(), abs=1e-4)
    assert (too_few(found) == "") is (not unknown)
    assert all(name in too_few(found) for name in unknown)


def test_sums_of_a_client_without_records() -> None:
    """It may leave out any of them."""
    assert percentiles_ms([math.nan]) is None
    assert enough({"mean": 3.0, "p99": 9.0}, 99) == {"mean": 3.0, "p99": None}
    assert enough({"mean": 3.0, "p99": 9.0}, 100) == {"mean": 3.0, "p99": 9.0}
    assert too_few({"mean": 3.0}) == ""


CLIENT = {"name": "aiperf", "version": "0.13.0", "completed": 12, "asked": 12, "duration_s": 2.0, "failed": 0}
FEW = {"p50": 10.0, "p90": 20.0, "p99": None, "mean": 12.0}


def test_an_unknown_percentile_is_printed_nowhere(tmp_path: Path) -> None:
    """The console and the page print how many requests the percentile needs."""
    result = {
        "harness": CLIENT,
        "doubts": [],
        "lost": [],
        "per_instance": [],
        "compiled_in_test": 0,
        "samples": 12,
        "errors": 0,
        "test_s": 2.0,
        "samples_per_second": 6.0,
        "tokens_per_second": 60.0,
        "ttft_ms": FEW,
        "tpot_ms": {"mean": 4.0},
        "latency_ms": FEW,
        "streamed": True,
    }
    rows = dict(other_harness_rows(result, "run"))
    assert rows["time to first token"] == "p50 10 ms  p90 20 ms  mean 12 ms  (p99 needs 100 requests)"
    assert rows["time per output token"] == "mean 4 ms" and "token counts" not in rows
    own = dict(other_harness_rows(result | {"harness": {**CLIENT, "self_counted": 12}}, "run"))
    counts = "aiperf counts the tokens of 12 answers itself: it has no counts of the server"
    assert own["token counts"] == counts
    facts = Facts(RunFiles(tmp_path, result))
    tile_text, table = tiles(facts, None), figures(facts)
    assert "TTFT mean" in tile_text and "p99 needs 100 requests" in tile_text and "TTFT p99" not in tile_text
    assert "20\xa0ms</td><td>-</td><td>12\xa0ms</td>" in table.replace(' class="n"', "")
