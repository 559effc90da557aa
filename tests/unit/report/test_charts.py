"""What a page's charts show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpillm.report.page.charts import distributions, over_time
from mpillm.report.page.run_analysis import Facts
from mpillm.report.request_log import RECORD
from mpillm.report.run_files import RunFiles
from tests.helpers.run_directories import write_rows


def test_requests_that_no_instance_has_taken_wait(tmp_path: Path) -> None:
    """The leader's queue is in no instance's figures."""
    rows: list[dict[str, Any]] = [
        {"seconds": at, "instance": 0, "running": 64, "waiting": waiting, "generated_tokens": 10}
        for at, waiting in ((0.5, 128), (1.5, 100))
    ]
    progress = {
        "seconds": [0.0, 1.0, 2.0],
        "issued": [0, 1000, 1000],
        "samples": [0, 0, 300],
        "tokens": [0] * 3,
    }
    run = RunFiles(tmp_path, {"test_s": 2.0}, timeline=rows, telemetry={"progress": progress})
    (chart,) = [chart for chart in over_time(Facts(run)) if chart.name == "waiting"]
    queued = {label: y for label, y, _ in chart.lines}["for an instance"]
    assert queued == [0.0, 1000 - 64 - 128, 700 - 64 - 100]


EMPTY_CDF: dict[str, Any] = {name: {"ms": [], "share": []} for name in ("ttft", "tpot", "latency")}
FLAT = {"seconds": [0.0, 5.0], "issued": [0, 0], "samples": [0, 0], "tokens": [0, 0]}


def load_client_run(path: Path, **result: Any) -> Facts:
    """Return a run whose client sent 40 requests directly to a server. Ten of them failed after 30 s."""
    rows = np.zeros(40, RECORD)
    rows["ttft"], rows["latency"], rows["tokens"] = 0.1, 0.5, 11
    rows["error"][:10], rows["latency"][:10], rows["ttft"][:10] = 1, 30.0, np.nan
    write_rows(path, rows)
    result = {"harness": {"name": "aiperf", "completed": 30}, "test_s": 5.0, **result}
    return Facts(RunFiles(path, result, telemetry={"cdf": EMPTY_CDF, "progress": FLAT}))


def test_a_load_client_that_sends_to_servers_has_the_charts_of_its_records(tmp_path: Path) -> None:
    facts = load_client_run(tmp_path)
    charts = {chart.name: chart for chart in distributions(facts)}
    assert charts.keys() == {"cdf-ttft", "cdf-tpot", "cdf-latency"}
    assert charts["cdf-latency"].x[-1] == pytest.approx(500)
    assert [mark.split()[0] for mark, _ in charts["cdf-latency"].marks] == ["p50", "p90", "p99"]
    assert not over_time(facts), "this run's endpoint answered nothing"


def test_percentiles_of_too_few_requests_have_no_mark(tmp_path: Path) -> None:
    facts = load_client_run(tmp_path, latency_ms={"p50": 400, "p90": 600, "p99": None})
    (chart,) = [chart for chart in distributions(facts) if chart.name == "cdf-latency"]
    assert [value for _, value in chart.marks] == [400, 600]


def test_answers_in_one_piece_have_no_distribution_of_first_tokens(tmp_path: Path) -> None:
    facts = load_client_run(tmp_path, streamed=False)
    assert [chart.name for chart in distributions(facts)] == ["cdf-latency"]
