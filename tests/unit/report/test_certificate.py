"""What of a run's figures is the harness's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpillm.report.certificate import certificate, format_certificate
from mpillm.report.run_files import RunFiles
from tests.helpers.run_directories import make_run


def run(folder: Path, scenario: str, scale: float, rate: float) -> RunFiles:
    figures = {name: scale * i for i, name in enumerate(("p50", "p90", "p99", "mean"), 1)}
    detail = {
        f"result_{name}_latency_ns": 1e6 * scale * 100
        for name in ("50.00_percentile", "90.00_percentile", "99.00_percentile", "mean")
    }
    result: dict[str, Any] = {"samples_per_second": rate, "ttft_ms": figures, "tpot_ms": None}
    return RunFiles.read(make_run(folder, "performance", scenario, detail=detail, result=result))


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_shares(scenario: str, tmp_path: Path) -> None:
    found = certificate(run(tmp_path / "a", scenario, 10.0, 50), run(tmp_path / "b", scenario, 0.5, 1000))
    assert found["latencies"]["ttft_ms"]["p99"] == {"run": 30.0, "harness": 1.5, "share": 0.05}
    assert found["latencies"]["latency_ms"]["p50"]["share"] == 0.05
    assert "tpot_ms" not in found["latencies"]
    offline = scenario == "Offline"
    assert found["samples_per_second"] == {"run": 50, "harness": 1000, "share": 0.05 if offline else None}
    table = format_certificate(found)
    assert "20.000 ms       1.000 ms  5.00 %" in table and "5.00 %" in table
    expected = "20.0 times as fast" if offline else "LoadGen gives the rate in this scenario"
    assert expected in table
