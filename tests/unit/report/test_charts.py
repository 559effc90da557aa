"""What a page's charts show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpillm.report.page.charts import over_time
from mpillm.report.page.run_analysis import Facts
from mpillm.report.run_files import RunFiles


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
